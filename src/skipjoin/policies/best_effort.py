from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from math import inf

from skipjoin.core.context import StepContext
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import BatchBuilder, Batcher, BatcherWrapper, CostModel, Fact
from skipjoin.core.policy_set import is_decode_invariant
from skipjoin.core.refusals import ALL_BEHIND_REAL_TIME, BEHIND_REAL_TIME, INCOMING_BEHIND_REAL_TIME, QUIET_S, Refusal
from skipjoin.core.request import NEVER, Request
from skipjoin.core.step import StepShape
from skipjoin.policies.step_load import MIN_CHUNK, StepLoad, fitting_tokens

# Maximum time of a step that a real-time request may have to wait for: a share of its TTFT objective or, without one,
# of its prefill time, but at least this many minimal steps.
_TTFT_SHARE, _PREFILL_SHARE, _MIN_STEPS = 0.25, 0.2, 1.25
# Factor by which best-effort requests may always lengthen a step of real-time requests.
_BESIDE = 1.1


def is_under_way(request: Request) -> bool:
    # One that never ran may have planned tokens by a prefix-cache hit, and is an incoming request still.
    return request.progress.planned > 0 and (request.progress.last_plan != NEVER or request.progress.evictions > 0)


class Patience:
    """Maximum time of steps with best-effort requests, which real-time ones may have to wait for.

    While real-time requests are live, it is that of the least patient one: a quarter of the TTFT objective and the TPOT
    objective, or without the latter a fifth of the prefill time. A step of real-time requests may always become 10 %
    longer. For `QUIET_S` after the last one has finished, only prompts are limited: the next one waits for the step
    that it finds, and decodes are short.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.limit_s = 0.0  # maximum time of a step that real-time requests may wait for
        self.best_effort = 0  # unfinished best-effort requests
        self._of: dict[Request, float] = {}  # unfinished real-time requests
        # Their number by patience, and a heap of its keys, among them some that no request has any more.
        self._with: Counter[float] = Counter()
        self._values: list[float] = []
        self._last = -inf  # time of the last arrival or finish of a real-time request

    def begin(self, request: Request, now: float) -> None:
        if request.is_best_effort:
            self.best_effort += 1
            return
        self._last = now
        patience = self._of[request] = self._patience(request)
        if patience not in self._with:
            heapq.heappush(self._values, patience)
        self._with[patience] += 1
        self._follow_least()

    def end(self, request: Request, now: float) -> None:
        if request.is_best_effort:
            self.best_effort -= 1
            return
        patience = self._of.pop(request)
        self._last = now
        self._with[patience] -= 1
        self._follow_least()

    def _follow_least(self) -> None:
        values, count = self._values, self._with
        while values and not count[values[0]]:
            del count[heapq.heappop(values)]
        if values:
            self.limit_s = values[0]
        if len(values) > 2 * len(self._of) + 256:
            self._with = +count
            self._values = sorted(self._with)

    def is_limiting(self, now: float) -> bool:
        return bool(self.best_effort and (self._of or now < self._last + QUIET_S))

    def limit(self, real_time: StepLoad, *, decodes: bool) -> float:
        if decodes and not self._of:
            return inf
        own = _BESIDE * real_time.seconds(self.cost) if real_time != StepLoad() else 0.0
        return max(own, self.limit_s)

    def _patience(self, request: Request) -> float:
        ttft_s, tpot_s, _ = request.progress.target
        if tpot_s == inf:  # an objective for the first token alone does not make the others slower
            alone = StepLoad.of(0, len(request.prompt)).seconds(self.cost)
            tpot_s = max(_PREFILL_SHARE * alone, _MIN_STEPS * self.cost.step(StepShape(decodes=1)))
        return min(_TTFT_SHARE * ttft_s, tpot_s)


class LimitedBestEffort(BatcherWrapper):
    """Bounds the delay of real-time requests by best-effort ones, as `Patience` says."""

    def __init__(self, batcher: Batcher, patience: Patience, is_best_effort: Callable[[Request], bool]) -> None:
        super().__init__(batcher)
        self.patience = patience
        self.is_best_effort = is_best_effort

    @property
    def is_decode_invariant(self) -> bool:
        return not self.patience.best_effort and is_decode_invariant(self.batcher)

    def on_arrived(self, request: Request, now: float) -> None:
        self.patience.begin(request, now)

    def on_finished(self, request: Request, now: float) -> None:
        self.patience.end(request, now)

    def open(self, context: StepContext) -> BatchBuilder:
        inner = self.batcher.open(context)
        return LimitedBuilder(self, inner, context) if self.patience.is_limiting(context.now) else inner

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        if self.is_best_effort(request):
            meaning = "A step with this best-effort request may take as long while real-time requests are live."
            yield Fact("step limit", self.patience.limit_s, "s", meaning)


class LimitedBuilder:
    def __init__(self, rules: LimitedBestEffort, inner: BatchBuilder, context: StepContext) -> None:
        self._rules = rules
        self._inner = inner
        self._context = context
        self._load = StepLoad()
        self._real_time: StepLoad | None = None  # set when the first best-effort request joins

    def offer(self, request: Request, pending: int) -> int | Refusal:
        verdict = self._inner.offer(request, pending)
        if isinstance(verdict, Refusal) or not self._rules.is_best_effort(request):
            return verdict
        patience, real_time = self._rules.patience, self._load if self._real_time is None else self._real_time
        swapped_out, limit = self._context.blocks_swapped_out(request), patience.limit(real_time, decodes=pending == 1)
        tokens = fitting_tokens(
            self._load, request.progress.planned, verdict, swapped_out=swapped_out, cost=patience.cost, limit=limit
        )
        if tokens:
            return tokens
        if self._load == StepLoad():  # an empty step always makes some progress
            return min(verdict, MIN_CHUNK)
        if pending == 1:
            return ALL_BEHIND_REAL_TIME
        return BEHIND_REAL_TIME if is_under_way(request) else INCOMING_BEHIND_REAL_TIME

    def take(self, request: Request, tokens: int) -> None:
        if self._real_time is None and self._rules.is_best_effort(request):
            self._real_time = self._load
        self._load = self._load.plus(
            StepLoad.of(request.progress.planned, tokens, self._context.blocks_swapped_out(request))
        )
        self._inner.take(request, tokens)
