from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence
from itertools import chain, compress
from math import inf
from operator import attrgetter
from typing import Any

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import Callbacks, CostModel, Fact
from skipjoin.core.request import Request, Target
from skipjoin.core.step import REQUEST_OF, SAMPLES_OF, Slice, StepShape
from skipjoin.policies.ranking import Ranked, Ranking


class NextTokens:
    """Deadlines of the next token of each real-time request.

    The first token is due a TTFT after the arrival, each further one a TPOT after the last token (BROS section 4.1). If
    `counts_lead`, which the paper does not, a request may be without KV for the time by which its tokens came faster.
    """

    def __init__(self, default: Target, *, counts_lead: bool = False) -> None:
        self.default = default
        self.counts_lead = counts_lead
        self._tpot_s: dict[Request, float] = {}
        self._due: dict[Request, float] = {}
        self._schedule: dict[Request, float] = {} if counts_lead else self._due

    @property
    def requests(self) -> KeysView[Request]:
        return self._due.keys()

    def due(self, request: Request) -> float:
        """Return when the token is due that the next plan samples, behind those that plans in flight sample."""
        return self._due[request] + request.progress.pending_samples * self._tpot_s[request]

    def dues(self, requests: Iterable[Request], *, in_flight: bool) -> Iterator[float]:
        return map(self.due if in_flight else self._due.__getitem__, requests)

    def schedule(self, request: Request) -> float:
        return self._schedule[request]

    def measure(self, now: float) -> dict[str, list[float]]:
        late = sum(due < now for due in self._due.values())
        return {"deadline_requests": [len(self._due) - late, late]}

    def begin(self, request: Request, now: float) -> None:
        target = request.progress.target.with_default(self.default)
        self._tpot_s[request] = target.tpot_s
        if request.progress.output:
            self.sampled((request,), now)
            return
        since = now if request.is_best_effort else request.arrival
        self._due[request] = self._schedule[request] = since + target.ttft_s

    def sampled(self, requests: Sequence[Request], now: float) -> list[float]:
        """Note a token of each request, and return the schedules of the next ones."""
        dues = [now + tpot_s for tpot_s in map(self._tpot_s.__getitem__, requests)]
        self._due.update(zip(requests, dues, strict=True))
        if self.counts_lead:
            dues = [self._after(request, now) + self._tpot_s[request] for request in requests]
            self._schedule.update(zip(requests, dues, strict=True))
        return dues

    def _after(self, request: Request, now: float) -> float:
        # The lead of a first token, and delays, do not count.
        return max(now, self._schedule.get(request, now)) if request.progress.output else now

    def end(self, request: Request) -> None:
        self._tpot_s.pop(request, None)
        self._due.pop(request, None)
        self._schedule.pop(request, None)


# Maximum share of the time for overdue requests. If all of them came first, an overload would make every request late.
_OVERDUE_SHARE = 0.05


class ByDeadline(Callbacks):
    """Earliest deadline of the next token first (BROS section 4.2), or earliest schedule if leads count.

    A request that missed its deadline ranks behind those that can still meet theirs, fewest remaining tokens first.
    After another `overdue_s` it is overdue: it ranks first and can preempt late requests. So that it does not make
    others late, this takes a small share of the time, longest wait first.
    """

    def __init__(self, next_tokens: NextTokens, overdue_s: float, cost: CostModel) -> None:
        self._next = next_tokens
        self._overdue_s = overdue_s
        self._cost = cost
        self._next_overdue = -inf  # earliest time at which another request becomes overdue
        self._tiers = self._overdue, self._winnable, self._late = Ranking(), Ranking(), Ranking()
        self._tier: dict[Request, int] = {}
        # (deadline, request) in the order in which requests became late, which is by deadline. Entries of requests that
        # have sampled since are stale.
        self._missed: deque[tuple[float, Request]] = deque()
        self._now = -inf

    def on_arrived(self, request: Request, now: float) -> None:
        self._next.begin(request, now)
        self._put(request, _WINNABLE)

    def on_scheduled(self, slices: Sequence[Slice], now: float) -> None:
        # Most slices sample for requests whose last token came in time, which needs no bytecode for each.
        tier, requests = self._tier, [*map(REQUEST_OF, slices)]
        sampled = [*compress(requests, map(SAMPLES_OF, slices))]
        if len(sampled) < len(requests):
            for request in {*requests}.difference(sampled):
                if tier[request] == _LATE:
                    self._put(request, _LATE)
        for request in compress(sampled, map(_WINNABLE.__ne__, map(tier.__getitem__, sampled))):
            self._take(request)
            tier[request] = _WINNABLE
        dues = self._next.sampled(sampled, now)
        keys = zip(dues, dues, map(_ID_OF, sampled), strict=True)
        self._winnable.set_all_volatile(dict(zip(sampled, keys, strict=True)))

    def on_preempted(self, request: Request, now: float) -> None:
        self._put(request, self._tier[request])

    def on_finished(self, request: Request, now: float) -> None:
        self._take(request)
        del self._tier[request]
        self._next.end(request)

    def ranked(self, now: float) -> Iterator[Request]:
        if now != self._now:
            self._now = now
            self._follow_time(now)
        return chain.from_iterable(self._tiers)

    def rank(self, request: Request) -> Any:
        tier = self._tier[request]
        return (tier, *self._tiers[tier].key(request))

    def outranks(self, one: Request, other: Request) -> bool:
        # A waiting request always has an earlier deadline than a running one, so with preemption by deadline two
        # requests would preempt each other at every token. In an overload, overdue requests would make those in time
        # miss their deadlines, too.
        mine, theirs = self._tier[one], self._tier[other]
        if mine < theirs == _LATE:
            return True
        is_first = self._next.counts_lead and not one.progress.output  # at most once per request
        return is_first and mine == theirs == _WINNABLE and self._next.schedule(one) < self._next.schedule(other)

    def may_await_prefix(self, request: Request, now: float) -> bool:
        return self._tier[request] != _OVERDUE

    def must_precede(self, request: Request, others: Iterable[Request]) -> bool:
        return self._tier[request] == _OVERDUE and any(self._tier[other] == _LATE for other in others)

    def expected_order(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        return [(self._tier[request], request) for request in sorted(requests, key=self.rank)]

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        tier, slack_s = self._tier[request], self._next.schedule(request) - now
        words, meaning = _TIERS[tier]
        yield Fact("deadline", words, "", meaning)
        what = "next" if request.progress.output else "first"
        yield Fact("slack", slack_s, "s", f"Time until its {what} token is due; negative: it is late by as much.")
        if tier == _LATE:
            left_s = max(0.0, slack_s + self._overdue_s, self._next_overdue - now)
            yield Fact("first in", left_s, "s", "From then on it may run before all others, longest wait first.")
            left = request.progress.known - request.progress.reached
            yield Fact("to compute", left, "tokens", "Of requests that missed it, those with the fewest run first.")

    def _follow_time(self, now: float) -> None:
        schedule = self._next.schedule
        passed = []
        for request in self._winnable:
            if schedule(request) >= now:
                break
            passed.append(request)
        for request in passed:
            self._put(request, _LATE)
            self._missed.append((schedule(request), request))
        while self._missed and self._missed[0][0] + self._overdue_s <= now and self._next_overdue <= now:
            when, request = self._missed.popleft()
            if self._tier.get(request) == _LATE and schedule(request) == when:
                tokens = request.progress.known - request.progress.reached
                seconds = self._cost.step(StepShape(prefill=tokens, attention=tokens * (tokens + 1) // 2))
                self._next_overdue = now + seconds / _OVERDUE_SHARE
                self._put(request, _OVERDUE)

    def _put(self, request: Request, tier: int) -> None:
        self._take(request)
        self._tier[request] = tier
        self._tiers[tier].set_stable(request, self._key(request, tier))

    def _take(self, request: Request) -> None:
        if (tier := self._tier.get(request)) is not None:
            self._tiers[tier].discard(request)

    def _key(self, request: Request, tier: int) -> tuple[float, float, int]:
        due = self._next.schedule(request)
        return (request.progress.known - request.progress.reached if tier == _LATE else due, due, request.id)


_ID_OF: Callable[[Request], int] = attrgetter("id")
_OVERDUE, _WINNABLE, _LATE = range(3)
_TIERS = (
    ("overdue", "It is so late that it runs before all others of its class."),
    ("in time", "Its next token can come in time. The request whose token is due first runs first."),
    ("missed", "Its token is late. It runs after the requests whose tokens can still come in time."),
)


# Seconds within which the lines of a batch are due.
_BATCH_WINDOW_S = 86_400.0


class StartedFirst(Ranked):
    """Ordering of best-effort requests without preemption: those with KV on the device first, so that it is freed.

    Requests that lost KV come next, which minimizes swapping (BROS section 4.2). Ties are broken by deadline, then by
    arrival. One without a deadline counts as a line of a batch that it opens, or it would wait for all batches.
    """

    is_decode_invariant = True

    def on_arrived(self, request: Request, now: float) -> None:
        self._put(request, _ON_DEVICE if request.progress.planned else _PREEMPTED if request.progress.output else _NEW)

    def on_scheduled(self, slices: Sequence[Slice], now: float) -> None:
        for slice_ in slices:
            if self.rank(slice_.request)[0] != _ON_DEVICE:
                self._put(slice_.request, _ON_DEVICE)

    def on_preempted(self, request: Request, now: float) -> None:
        if self.rank(request)[0] == _ON_DEVICE:
            self._put(request, _PREEMPTED)

    def on_finished(self, request: Request, now: float) -> None:
        self._ranking.discard(request)

    def outranks(self, one: Request, other: Request) -> bool:
        return False

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        words, meaning = _STAGES[self.rank(request)[0]]
        yield Fact("stage", words, "", meaning)

    def _put(self, request: Request, stage: int) -> None:
        due = min(request.deadline, request.arrival + _BATCH_WINDOW_S)
        self._ranking.set_stable(request, (stage, due, request.arrival, request.id))


_ON_DEVICE, _PREEMPTED, _NEW = range(3)
_STAGES = (
    ("on the device", "It has KV on the device. Best-effort requests with it run first, so that it is freed."),
    ("evicted", "It lost KV on the device to others. Best-effort requests that lost none run before it."),
    ("new", "It has not begun. Best-effort requests that have run before it."),
)
