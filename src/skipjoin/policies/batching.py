from __future__ import annotations

from skipjoin.core.context import StepContext
from skipjoin.core.policy import (
    HELD,
    NEWCOMERS_HELD,
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


def _check_budgets(max_seqs: int, max_tokens: int) -> None:
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
        _check_budgets(max_seqs, max_tokens)
        self.max_seqs = self.cap = max_seqs
        self.max_tokens = max_tokens
        self.chunked = chunked

    def open(self, context: StepContext) -> BatchBuilder:
        kind = ChunkedBuilder if self.chunked else WholeBuilder
        return kind(self.max_seqs, self.max_tokens)


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
    """Adds every decode that is offered, and prompts up to the forward size that saturates the device.

    Decodes fill the KV cache and prompts fill the compute (EconoServe section 3.3.1).
    """

    is_decode_invariant = True

    def __init__(self, max_seqs: int, max_tokens: int, cost: CostModel, *, target: int | None = None) -> None:
        _check_budgets(max_seqs, max_tokens)
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


class RunToCompletion:
    """Static batching, i.e. job-level scheduling as in FasterTransformer (FastServe sections 2.2 and 6.1).

    The next batch starts when the last member has finished. Members join over several steps, each with up to
    `max_tokens` prompt tokens or one longer prompt. The batch closes when it is full, or after a step that ran members
    and had space for more prompts. A member that loses its KV remains a member. Answers are neither delayed until the
    whole batch has finished nor padded.
    """

    def __init__(self, max_seqs: int, max_tokens: int) -> None:
        _check_budgets(max_seqs, max_tokens)
        self.max_seqs = self.cap = max_seqs
        self.max_tokens = max_tokens
        self._step = MemberBuilder(set(), max_seqs, max_tokens, recruits=True)

    def open(self, context: StepContext) -> BatchBuilder:
        members = {request for request in self._step.members if request.finish_reason is None}
        recruits = not members or self._step.keeps_recruiting
        self._step = MemberBuilder(members, self.max_seqs, self.max_tokens, recruits=recruits)
        return self._step


class MemberBuilder:
    __slots__ = ("_absent", "_cramped", "_joined", "_ran", "_recruits", "_seqs", "_whole", "members")

    def __init__(self, members: set[Request], seqs: int, tokens: int, *, recruits: bool) -> None:
        self.members = members
        self._recruits = recruits
        self._seqs = seqs
        self._whole = WholeBuilder(seqs, tokens)
        # Members whose KV was dropped (all others have planned tokens) and that have not rejoined in this step.
        self._absent = {request for request in members if not request.planned}
        self._ran = self._joined = self._cramped = False

    @property
    def keeps_recruiting(self) -> bool:
        return self._recruits and (self._joined or self._cramped or not self._ran)

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if request not in self.members and not self._recruits:
            # Refusing all new requests spares a scan of a long queue, but would also shut out members without KV.
            return HELD if self._absent else NEWCOMERS_HELD
        verdict = self._whole.offer(request, pending)
        self._cramped = self._cramped or not isinstance(verdict, int)
        return verdict

    def take(self, request: Request, tokens: int) -> None:
        self._whole.take(request, tokens)
        self._ran = True
        self._absent.discard(request)
        if request not in self.members:
            self.members.add(request)
            self._joined = True
            self._recruits = len(self.members) < self._seqs
