from __future__ import annotations

from collections.abc import Sequence
from math import inf

from skipjoin.core.context import StepContext
from skipjoin.core.policy import BatchBuilder, Callbacks, CostModel, CountingBuilder
from skipjoin.core.refusals import NO_SLOT, NO_TOKENS, PROMPT_DOES_NOT_FIT, PROMPTS_ARE_FULL, Refusal
from skipjoin.core.request import Request
from skipjoin.core.step import Slice
from skipjoin.policies.forward import saturating_tokens
from skipjoin.policies.step_load import MIN_CHUNK, StepLoad, fitting_tokens

# Time up to which prompts may lengthen a step, in times of its decodes, even if a TPOT objective is missed.
_MIN_OVER_DECODES = 1.25


def check_budgets(max_seqs: int, max_tokens: int) -> None:
    for name, value in (("max_seqs", max_seqs), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


class Greedy:
    """Adds requests in rank order until the step has `max_seqs` requests or `max_tokens` tokens.

    If `chunked`, prompts are cut to the remaining tokens (Sarathi). Otherwise `max_tokens` limits prompt tokens only,
    and a prompt that does not fit waits without being overtaken.
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


class ChunkedBuilder(CountingBuilder):
    __slots__ = ("_seqs", "_tokens")

    def __init__(self, seqs: int, tokens: int) -> None:
        self._seqs, self._tokens = seqs, tokens

    @property
    def decodes(self) -> int:
        return max(0, min(self._seqs, self._tokens))

    def take_decodes(self, count: int) -> None:
        self._seqs -= count
        self._tokens -= count

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if self._seqs <= 0:
            return NO_SLOT
        if self._tokens <= 0:
            return NO_TOKENS
        return pending if pending <= self._tokens else self._tokens

    def take(self, request: Request, tokens: int) -> None:
        self._seqs -= 1
        self._tokens -= tokens


class WholeBuilder(CountingBuilder):
    __slots__ = ("_prompts", "_seqs", "_tokens")

    def __init__(self, seqs: int, tokens: int) -> None:
        self._seqs, self._tokens = seqs, tokens
        self._prompts = 0

    @property
    def decodes(self) -> int:
        return max(0, self._seqs)

    def take_decodes(self, count: int) -> None:
        self._seqs -= count

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


class Yielding(Callbacks):
    """Adds requests in rank order, where prompts leave tokens and time for decodes, whichever are offered first.

    Streams of the last step are expected to decode. Prompts get at least half of the tokens. They are cut so that the
    step meets the streams' shortest TPOT objective, by default `tpot_s`, but may lengthen it by a quarter.
    """

    is_decode_invariant = True

    def __init__(self, max_seqs: int, max_tokens: int, cost: CostModel, *, tpot_s: float = inf) -> None:
        check_budgets(max_seqs, max_tokens)
        self.max_seqs = self.cap = max_seqs
        self.max_tokens = max_tokens
        self.cost = cost
        self.tpot_s = tpot_s
        self.finished = 0  # requests since the last step
        self._last: Sequence[Slice] = ()
        self._with_objective: set[Request] = set()

    @property
    def has_objectives(self) -> bool:
        return self.tpot_s < inf or bool(self._with_objective)

    def on_arrived(self, request: Request, now: float) -> None:
        if request.progress.target.tpot_s < inf:
            self._with_objective.add(request)

    def on_scheduled(self, slices: Sequence[Slice], now: float) -> None:
        self._last = slices
        self.finished = 0

    def on_finished(self, request: Request, now: float) -> None:
        self.finished += 1
        self._with_objective.discard(request)

    def open(self, context: StepContext) -> BatchBuilder:
        last = context.in_flight[-1].slices if context.overlap and context.in_flight else self._last
        return YieldingBuilder(self, last)


class YieldingBuilder(CountingBuilder):
    __slots__ = ("_beyond", "_chunks", "_kept", "_last", "_least", "_limit_s", "_load", "_rules", "_seqs")

    def __init__(self, rules: Yielding, last: Sequence[Slice]) -> None:
        self._rules, self._last = rules, last
        self._seqs = rules.max_seqs
        # A decode takes a slot and a token, so counting slots is enough for most requests: these tokens are left beyond
        # one for each slot, and the step is full once this many slots are left.
        self._beyond = rules.max_tokens - rules.max_seqs
        self._least = max(0, -self._beyond)
        self._chunks = 0
        self._kept: int | None = None  # tokens for decodes; None until a prompt is offered
        self._load, self._limit_s = StepLoad(), inf

    @property
    def decodes(self) -> int:
        return max(0, self._seqs - self._least)

    def take_decodes(self, count: int) -> None:
        self._seqs -= count

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if self._seqs <= self._least:
            return NO_SLOT if self._seqs <= 0 else NO_TOKENS
        return 1 if pending == 1 else self._fit(request, pending) or PROMPTS_ARE_FULL

    def take(self, request: Request, tokens: int) -> None:
        self._seqs -= 1
        if tokens > 1:
            self._beyond -= tokens - 1
            self._least = max(0, -self._beyond)
            self._chunks += 1
            if self._limit_s < inf:
                self._load = self._load.plus(StepLoad.of(request.progress.planned, tokens))

    def _fit(self, request: Request, pending: int) -> int:
        if (kept := self._kept) is None:
            kept = self._kept = self._expect_decodes()
        decodes = self._rules.max_seqs - self._seqs - self._chunks
        room = min(pending, self._seqs + self._beyond - max(0, kept - decodes))
        if room <= 0 or self._limit_s == inf:
            return max(0, room)
        start, cost = request.progress.planned, self._rules.cost
        fits = fitting_tokens(self._load, start, room, swapped_out=0, cost=cost, limit=self._limit_s)
        return fits or (0 if self._load.prefill else min(room, MIN_CHUNK))

    def _expect_decodes(self) -> int:
        rules = self._rules
        if not rules.has_objectives:
            return min(max(0, len(self._last) - rules.finished), rules.max_tokens // 2)
        streams = [
            progress
            for slice_ in self._last
            if slice_.samples and (progress := slice_.request.progress).finish_reason is None
        ]
        objectives = [progress.target.tpot_s for progress in streams]
        tpot_s = min(objectives, default=inf)
        if rules.tpot_s < tpot_s and inf in objectives:
            tpot_s = rules.tpot_s
        if tpot_s < inf:
            self._load = StepLoad(decodes=len(streams), context=sum(progress.known for progress in streams))
            self._limit_s = max(tpot_s, _MIN_OVER_DECODES * self._load.seconds(rules.cost))
        return min(len(streams), rules.max_tokens // 2)


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


class TargetBuilder(CountingBuilder):
    __slots__ = ("_beyond", "_seqs")

    def __init__(self, seqs: int, tokens: int) -> None:
        self._seqs = seqs
        # A decode takes a slot and a token, so counting slots is enough for most requests.
        self._beyond = tokens - seqs

    @property
    def tokens_left(self) -> int:
        return self._seqs + self._beyond

    @property
    def decodes(self) -> int:
        return max(0, self._seqs)

    def take_decodes(self, count: int) -> None:
        self._seqs -= count

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
