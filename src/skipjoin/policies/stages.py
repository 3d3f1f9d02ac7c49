"""Batches for a pipeline: each plan takes its share of the work, so that all stages are busy all the time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import tee

from skipjoin.core.policy import ALL_HELD, HELD, BatchBuilder, Batcher, CostModel, Refusal
from skipjoin.core.request import Request
from skipjoin.core.scheduling.context import StepContext
from skipjoin.core.step import StepShape

# What a further token, pair or request costs is read off beside a prefill of so many tokens: there no work hides behind
# the reading of the weights, so that a batch of decodes counts for what it adds to the plan that it joins.
_BESIDE = StepShape(prefill=1 << 16)
_MANY = 1 << 10
# Every slice counts for so many seconds besides, so that where slices cost nothing their number is shared.
_SLICE_S = 1e-9


class _Loads:
    """What slices add to a step, in seconds: linear in their work, so that loads of plans add up."""

    def __init__(self, cost: CostModel) -> None:
        self.revision = cost.revision
        overlapped = cost.step(_BESIDE)

        def further(**work: int) -> float:
            (name, count), *_ = work.items()
            shape = _BESIDE._replace(**{name: getattr(_BESIDE, name) + count})
            return max(0.0, cost.step(shape) - overlapped) / count

        self._token, self._pair = further(prefill=_MANY), further(attention=_MANY**2)
        self._decode, self._context = further(decodes=_MANY), further(context=_MANY**2)
        # With fewer tokens than this a step is shorter than its fixed part: cutting prompts finer costs more than it
        # brings.
        fixed = cost.step(StepShape())
        self.least_chunk = max(1, math.ceil(fixed / self._token)) if self._token > 0 else 1

    def of(self, start: int, tokens: int) -> float:
        """Of a slice."""
        if tokens == 1:
            return _SLICE_S + self._decode + self._context * (start + 1)
        return _SLICE_S + self._token * tokens + self._pair * (tokens * start + tokens * (tokens + 1) / 2)

    def reaching(self, start: int, load: float) -> int:
        """The fewest tokens from `start` on that are at least the load."""
        linear = self._token + self._pair * (start + 0.5)
        root = math.sqrt(linear * linear + 2 * self._pair * max(0.0, load))
        # The positive root of pair / 2 x n^2 + linear x n = load, in a form that holds for a pair of 0 too.
        return math.ceil(2 * load / (linear + root)) if linear > 0 else _BESIDE.prefill


class EvenStages:
    """Around any batcher, for pipeline stages: the plans in flight get even shares of the work (the even chunks of
    Sarathi, between plans), so that no stage waits long for a plan to pass, and none finds no request to run.

    A plan takes the best requests until it has its share: what all requests that run or could run add to steps, over
    the number of stages, and no more than leaves something for the stages that have no plan yet. So a plan has at least
    the mean load, or takes every idle request, and has never more than the mean and one slice. A request that is left
    over goes into the next plan, one stage's time later, and is left over no more than `stages` - 1 times in a row.

    batcher: what limits a plan. most_seqs, most_tokens: requests and prompt tokens that fit all stages together. cuts:
    whether prompts may be cut to fit the share. A lone one is cut so that its chunks follow each other through the
    stages, but no finer than pays. holds_back: whether newcomers, too, are left for the next plan.
    """

    def __init__(
        self,
        batcher: Batcher,
        cost: CostModel,
        stages: int,
        *,
        most_seqs: int,
        most_tokens: int,
        cuts: bool,
        holds_back: bool = True,
    ) -> None:
        for name, value in (("stages", stages), ("most_seqs", most_seqs), ("most_tokens", most_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.batcher = batcher
        self.stages = stages
        self.most_seqs = most_seqs
        self.most_tokens = most_tokens
        self.cuts = cuts
        self.holds_back = holds_back
        self._cost = cost
        self._loads = _Loads(cost)
        self._flying: dict[int, float] = {}  # loads of the plans in flight
        self._last: EvenBuilder | None = None

    @property
    def cap(self) -> int:
        return self.batcher.cap

    def open(self, context: StepContext) -> BatchBuilder:
        if self._loads.revision != self._cost.revision:
            self._loads = _Loads(self._cost)
        known, last = self._flying, self._last
        # A plan that is not known is the one that came of the last batch.
        self._flying = {
            plan.id: known.get(plan.id, last.load if last is not None else 0.0) for plan in context.in_flight
        }
        passed = last.passed_over() if last is not None else {}
        ours, theirs = tee(context.candidates)
        inner = self.batcher.open(replace(context, candidates=theirs))
        self._last = EvenBuilder(self, inner, self._loads, tuple(self._flying.values()), passed)
        self._last.look_at(replace(context, candidates=ours))
        return self._last


class EvenBuilder:
    """One step's batch under `EvenStages`.

    inner: the batch of the batcher that limits it. flying: loads of the plans in flight. passed: how often in a row
    requests were left over. load: of the batch so far.
    """

    def __init__(
        self, rules: EvenStages, inner: BatchBuilder, loads: _Loads, flying: Sequence[float], passed: dict[Request, int]
    ) -> None:
        self._rules = rules
        self._inner = inner
        self._loads = loads
        self._flying = sum(flying)
        self._more = max(0, rules.stages - len(flying) - 1)  # plans that could follow at once
        self._passed = passed
        # Requests that could run and are not in the batch: tokens, their load, and the slices that they are worth.
        self._idle: dict[Request, tuple[int, float, int]] = {}
        self._slices = 0  # of them together
        self._sought = 0.0  # load of all that could run, those in the batch too
        self._share = self.load = 0.0
        self._overdue: set[Request] = set()
        self._is_full = False

    def look_at(self, context: StepContext) -> None:
        """Learn what there is to share."""
        rules, loads, offer, load_of = self._rules, self._loads, self._inner.offer, self._loads.of
        seats, tokens = rules.most_seqs, rules.most_tokens
        for plan in context.in_flight:
            seats -= len(plan.slices)
            tokens -= sum(piece.tokens for piece in plan.slices if piece.tokens > 1)
        for request, pending in context.candidates:
            if seats <= 0:
                break
            if not isinstance(offer(request, pending), int):
                continue
            seats -= 1
            count, slices = pending, 1
            if count > 1:
                if tokens <= 0:
                    continue
                if rules.cuts:
                    count = min(count, tokens)
                    slices = max(1, count // loads.least_chunk)
                tokens -= count
            load = load_of(request.planned, count)
            self._idle[request] = count, load, slices
            self._slices += slices
            self._sought += load
        most = rules.stages - 1
        self._overdue = {request for request, times in self._passed.items() if times >= most and request in self._idle}
        self._share = self._share_of(self._sought)

    def passed_over(self) -> dict[Request, int]:
        """How often in a row requests were left over, this step included."""
        return {request: self._passed.get(request, 0) + 1 for request in self._idle} if self._is_full else {}

    def offer(self, request: Request, pending: int) -> int | Refusal:
        load = self.load
        if load and (load >= self._share or self._slices <= self._more) and not self._is_urgent(request):
            self._is_full = True
            return HELD if self._overdue or not self._rules.holds_back else ALL_HELD
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
                load = self._loads.of(request.planned, tokens)
        else:
            load = self._loads.of(request.planned, tokens)
            self._sought += load
            self._share = self._share_of(self._sought)
        self.load += load

    def _share_of(self, sought: float) -> float:
        return min((self._flying + sought) / self._rules.stages, sought / (self._more + 1))

    def _is_urgent(self, request: Request) -> bool:
        """Whether the request must not be left over. Nor may one that was not looked at, as others are evicted for it;
        while a request that matters more was left over, that one can wait."""
        is_unseen = request not in self._idle and not self._is_full
        return is_unseen or request in self._overdue or not (self._rules.holds_back or request.planned)

    def _fit(self, request: Request, pending: int, most: int) -> int:
        """How many of the prompt's tokens make the share full; `most` if that leaves too little to be worth a slice."""
        loads, share = self._loads, self._share
        if request not in self._idle:  # it takes its memory from others
            share = self._share_of(self._sought + loads.of(request.planned, pending))
        tokens = max(loads.least_chunk, loads.reaching(request.planned, share - self.load))
        return most if tokens >= most or pending - tokens < loads.least_chunk else tokens
