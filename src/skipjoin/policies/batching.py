from __future__ import annotations

from skipjoin.core.context import StepContext
from skipjoin.core.policy import (
    NO_SLOT,
    NO_TOKENS,
    PROMPT_DOES_NOT_FIT,
    PROMPTS_ARE_FULL,
    BatchBuilder,
    CostModel,
    Refusal,
)
from skipjoin.core.request import Request
from skipjoin.policies.forward import saturating_tokens


def check_budgets(max_seqs: int, max_tokens: int) -> None:
    for name, value in (("max_seqs", max_seqs), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


class Greedy:
    """Adds requests in rank order until the step has `max_seqs` requests or `max_tokens` tokens.

    If `chunked`, prompts are cut to the remaining tokens of the step (Sarathi). Otherwise `max_tokens` limits prompt
    tokens only, and a prompt that does not fit waits without being overtaken.
    """

    is_decode_invariant = True

    def __init__(self, max_seqs: int, max_tokens: int, *, chunked: bool) -> None:
        check_budgets(max_seqs, max_tokens)
        self.max_seqs = self.cap = max_seqs
        self.max_tokens = max_tokens
        self.chunked = chunked

    def open(self, context: StepContext) -> BatchBuilder:
        kind = ChunkedBuilder if self.chunked else WholeBuilder
        return kind(self.max_seqs, self.max_tokens)


class Yielding(Greedy):
    """`Greedy` in which chunks of prompts leave tokens for the decodes of a step, whichever are offered first.

    As many decodes are expected as the last step had streams. Prompts get at least half of the tokens.
    """

    is_decode_invariant = True

    def __init__(self, max_seqs: int, max_tokens: int) -> None:
        super().__init__(max_seqs, max_tokens, chunked=True)
        self._last: YieldingBuilder | None = None

    def open(self, context: StepContext) -> BatchBuilder:
        streams = 0 if self._last is None else self._last.streams
        self._last = YieldingBuilder(self.max_seqs, self.max_tokens, min(streams, self.max_tokens // 2))
        return self._last


class YieldingBuilder:
    __slots__ = ("_kept", "_seqs", "_tokens", "streams")

    def __init__(self, seqs: int, tokens: int, kept: int) -> None:
        self._seqs, self._tokens = seqs, tokens
        self._kept = kept  # tokens for decodes that are still to be offered
        self.streams = 0  # requests of the step that decode in the next one, unless they finish

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if self._seqs <= 0:
            return NO_SLOT
        if self._tokens <= 0:
            return NO_TOKENS
        if pending == 1:
            return 1
        room = self._tokens - self._kept
        return min(pending, room) if room > 0 else PROMPTS_ARE_FULL

    def take(self, request: Request, tokens: int) -> None:
        self._seqs -= 1
        self._tokens -= tokens
        if tokens == 1:
            self._kept = max(0, self._kept - 1)
            self.streams += 1
        elif tokens == request.progress.pending:
            self.streams += 1


class ChunkedBuilder:
    __slots__ = ("_seqs", "_tokens")

    def __init__(self, seqs: int, tokens: int) -> None:
        self._seqs, self._tokens = seqs, tokens

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if self._seqs <= 0:
            return NO_SLOT
        if self._tokens <= 0:
            return NO_TOKENS
        return pending if pending <= self._tokens else self._tokens

    def take(self, request: Request, tokens: int) -> None:
        self._seqs -= 1
        self._tokens -= tokens


class WholeBuilder:
    __slots__ = ("_prompts", "_seqs", "_tokens")

    def __init__(self, seqs: int, tokens: int) -> None:
        self._seqs, self._tokens = seqs, tokens
        self._prompts = 0

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if self._seqs <= 0:
            return NO_SLOT
        if pending == 1 or pending <= self._tokens or not self._prompts:
            return pending
        return PROMPT_DOES_NOT_FIT

    def take(self, request: Request, tokens: int) -> None:
        self._seqs -= 1
        if tokens > 1:
            self._prompts += 1
            self._tokens -= tokens


class TargetForward:
    """Adds every decode, and prompts up to the forward size that saturates the device (EconoServe section 3.3.1)."""

    is_decode_invariant = True

    def __init__(self, max_seqs: int, max_tokens: int, cost: CostModel, *, target: int | None = None) -> None:
        check_budgets(max_seqs, max_tokens)
        self.max_seqs = self.cap = max_seqs
        self.max_tokens = max_tokens
        self._cost = cost
        self._fixed = target
        self._revision = cost.revision
        self.target = self._size()

    def open(self, context: StepContext) -> BatchBuilder:
        self._follow_cost()
        return TargetBuilder(self.max_seqs, self.target)

    def _follow_cost(self) -> None:
        if self._cost.revision != self._revision:
            self._revision = self._cost.revision
            self.target = self._size()

    def _size(self) -> int:
        return saturating_tokens(self._cost, self.max_tokens) if self._fixed is None else self._fixed


class TargetBuilder:
    __slots__ = ("_beyond", "_seqs")

    def __init__(self, seqs: int, tokens: int) -> None:
        self._seqs = seqs
        # A decode takes a slot and a token, so counting slots is enough for most requests.
        self._beyond = tokens - seqs

    @property
    def tokens_left(self) -> int:
        return self._seqs + self._beyond

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if self._seqs <= 0:
            return NO_SLOT
        if pending == 1:
            return 1
        left = self.tokens_left
        return min(pending, left) if left > 0 else PROMPTS_ARE_FULL

    def take(self, request: Request, tokens: int) -> None:
        self._seqs -= 1
        if tokens > 1:
            self._beyond -= tokens - 1
