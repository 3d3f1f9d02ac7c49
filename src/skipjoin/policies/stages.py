from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import tee

from skipjoin.core.context import StepContext
from skipjoin.core.policy import BatchBuilder, Batcher, BatcherWrapper, CostModel
from skipjoin.core.refusals import Refusal, Scope
from skipjoin.core.request import Request
from skipjoin.core.step import StepShape
from skipjoin.core.waits import WaitReason

# Marginal costs are measured next to a prefill of this many tokens, where no work hides behind weight loading. A batch
# of decodes then counts what it adds to a plan.
_BESIDE = StepShape(prefill=1 << 16)
_MANY = 1 << 10
# Cost of every slice, so that the number of slices is balanced where they cost nothing.
_SLICE_S = 1e-9


class _Loads:
    def __init__(self, cost: CostModel) -> None:
        self.revision = cost.revision
        overlapped = cost.step(_BESIDE)

        def further(**work: int) -> float:
            (name, count), *_ = work.items()
            shape = _BESIDE._replace(**{name: getattr(_BESIDE, name) + count})
            return max(0.0, cost.step(shape) - overlapped) / count

        self._token, self._pair = further(prefill=_MANY), further(attention=_MANY**2)
        self._decode, self._context = further(decodes=_MANY), further(context=_MANY**2)
        # A step with fewer tokens is shorter than its fixed time, so finer chunks cost more than they gain.
        fixed = cost.step(StepShape())
        self.min_chunk = max(1, math.ceil(fixed / self._token)) if self._token > 0 else 1

    def of(self, start: int, tokens: int) -> float:
        if tokens == 1:
            return _SLICE_S + self._decode + self._context * (start + 1)
        return _SLICE_S + self._token * tokens + self._pair * (tokens * start + tokens * (tokens + 1) / 2)

    def reaching(self, start: int, load: float) -> int:
        linear = self._token + self._pair * (start + 0.5)
        root = math.sqrt(linear * linear + 2 * self._pair * max(0.0, load))
        # Positive root of pair / 2 x n^2 + linear x n = load, in a form that also holds for pair = 0.
        return math.ceil(2 * load / (linear + root)) if linear > 0 else _BESIDE.prefill


class EvenStages(BatcherWrapper):
    """Gives the plans in flight equal shares of the work, so that no pipeline stage idles.

    A plan takes the best requests until its load reaches the mean: the load of all running and runnable requests
    divided by the number of stages. A request is skipped at most `stages` - 1 times in a row.

    Args:
        max_seqs, max_tokens: What fits all stages together.
        cuts: Whether prompts may be cut to the share, a lone one so that its chunks pipeline through the stages.
        holds_back: Whether new requests may be skipped, too.
    """

    def __init__(
        self,
        batcher: Batcher,
        cost: CostModel,
        stages: int,
        *,
        max_seqs: int,
        max_tokens: int,
        cuts: bool,
        holds_back: bool = True,
    ) -> None:
        super().__init__(batcher)
        self.stages = stages
        self.max_seqs = max_seqs
        self.max_tokens = max_tokens
        self.cuts = cuts
        self.holds_back = holds_back
        self._cost = cost
        self._loads = _Loads(cost)
        self._flying: dict[int, float] = {}  # loads by plan id
        self._last: EvenBuilder | None = None

    def open(self, context: StepContext) -> BatchBuilder:
        if self._loads.revision != self._cost.revision:
            self._loads = _Loads(self._cost)
        known, last = self._flying, self._last
        # A plan without a known load is the one built from the last batch.
        self._flying = {
            plan.id: known.get(plan.id, last.load if last is not None else 0.0) for plan in context.in_flight
        }
        passed = last.passed_over() if last is not None else {}
        ours, theirs = tee(context.candidates)
        inner = self.batcher.open(context._replace(candidates=theirs))
        self._last = EvenBuilder(self, inner, self._loads, tuple(self._flying.values()), passed)
        self._last.look_at(context._replace(candidates=ours))
        return self._last


class EvenBuilder:
    def __init__(
        self, rules: EvenStages, inner: BatchBuilder, loads: _Loads, flying: Sequence[float], passed: dict[Request, int]
    ) -> None:
        self._rules = rules
        self._inner = inner
        self._loads = loads
        self._flying = sum(flying)
        self._more = max(0, rules.stages - len(flying) - 1)  # further plans that could start
        self._passed = passed
        # Runnable requests not in the batch: tokens, load, and number of useful slices.
        self._idle: dict[Request, tuple[int, float, int]] = {}
        self._slices = 0  # useful slices of all idle requests
        self._sought = 0.0  # load of all runnable requests, including the batch
        self._share = self.load = 0.0
        self._overdue: set[Request] = set()
        self._is_full = False

    def look_at(self, context: StepContext) -> None:
        rules, loads, offer, load_of = self._rules, self._loads, self._inner.offer, self._loads.of
        slots, tokens = rules.max_seqs, rules.max_tokens
        for plan in context.in_flight:
            slots -= len(plan.slices)
            tokens -= sum(slice_.tokens for slice_ in plan.slices if slice_.tokens > 1)
        for request, pending in context.candidates:
            if slots <= 0:
                break
            if not isinstance(offer(request, pending), int):
                continue
            slots -= 1
            count, slices = pending, 1
            if count > 1:
                if tokens <= 0:
                    continue
                if rules.cuts:
                    count = min(count, tokens)
                    slices = max(1, count // loads.min_chunk)
                tokens -= count
            load = load_of(request.progress.planned, count)
            self._idle[request] = count, load, slices
            self._slices += slices
            self._sought += load
        most = rules.stages - 1
        self._overdue = {request for request, times in self._passed.items() if times >= most and request in self._idle}
        self._share = self._share_of(self._sought)

    def passed_over(self) -> dict[Request, int]:
        return {request: self._passed.get(request, 0) + 1 for request in self._idle} if self._is_full else {}

    def offer(self, request: Request, pending: int) -> int | Refusal:
        load = self.load
        if load and (load >= self._share or self._slices <= self._more) and not self._is_urgent(request):
            self._is_full = True
            verdict, scope = self._inner.offer(request, pending), Scope.ALL
            if self._overdue or not self._rules.holds_back:
                scope = Scope.REQUEST
            return Refusal(scope, verdict.reason if isinstance(verdict, Refusal) else WaitReason.HELD_BY_BATCHER)
        verdict = self._inner.offer(request, pending)
        if self._rules.cuts and isinstance(verdict, int) and verdict > 1:
            return self._fit(request, pending, verdict)
        return verdict

    def take(self, request: Request, tokens: int) -> None:
        self._inner.take(request, tokens)
        seen = self._idle.pop(request, None)
        if seen is not None:
            count, load, slices = seen
            self._slices -= slices
            self._overdue.discard(request)
            if count != tokens:
                load = self._loads.of(request.progress.planned, tokens)
        else:
            load = self._loads.of(request.progress.planned, tokens)
            self._sought += load
            self._share = self._share_of(self._sought)
        self.load += load

    def _share_of(self, sought: float) -> float:
        return min((self._flying + sought) / self._rules.stages, sought / (self._more + 1))

    def _is_urgent(self, request: Request) -> bool:
        is_unseen = request not in self._idle and not self._is_full
        return is_unseen or request in self._overdue or not (self._rules.holds_back or request.progress.planned)

    def _fit(self, request: Request, pending: int, most: int) -> int:
        """Return how many prompt tokens fill the share, or `most` if the rest would be too small for a slice."""
        loads, share = self._loads, self._share
        if request not in self._idle:  # it needs memory of others
            share = self._share_of(self._sought + loads.of(request.progress.planned, pending))
        tokens = max(loads.min_chunk, loads.reaching(request.progress.planned, share - self.load))
        return most if tokens >= most or pending - tokens < loads.min_chunk else tokens
