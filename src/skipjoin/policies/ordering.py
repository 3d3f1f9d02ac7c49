from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import isfinite
from typing import Any

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import Fact, Ordering
from skipjoin.core.policy_set import is_decode_invariant
from skipjoin.core.request import Band, Request
from skipjoin.core.step import Slice
from skipjoin.policies.ranking import Ranked
from skipjoin.policies.routed import Routed

# Age in seconds from which a best-effort request is served as real-time.
BEST_EFFORT_WAIT_S = 60.0


class FixedKey(Ranked):
    is_decode_invariant = True

    def __init__(self, key: Callable[[Request], Any]) -> None:
        super().__init__()
        self._key = key

    def on_arrived(self, request: Request, now: float) -> None:
        self._ranking.set_stable(request, (self._key(request), request.arrival, request.id))

    def on_finished(self, request: Request, now: float) -> None:
        self._ranking.discard(request)

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        key = self.rank(request)[0]
        if isinstance(key, int | float) and isfinite(key):
            yield Fact("key", key, "", "Requests with a smaller key run first, by arrival if equal.")


class Fcfs(FixedKey):
    is_decode_invariant = True

    def __init__(self) -> None:
        super().__init__(lambda request: request.arrival)

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        yield Fact("age", now - request.arrival, "s", "Requests that arrived earlier run first.")


class Prioritized(Routed):
    """Strict bands, each with its own ordering: by class, urgency and `priority`.

    Best-effort requests that are `best_effort_wait_s` seconds old are lifted, oldest first and one at a time: served as
    real-time until they finish, with the best priority of the real-time requests that are not urgent. If the lifted
    ones have not run for as long, another one follows.
    """

    def __init__(
        self,
        make: Callable[[], Ordering],
        *,
        best_effort: Callable[[], Ordering] | None = None,
        best_effort_wait_s: float = BEST_EFFORT_WAIT_S,
    ) -> None:
        self._make = make
        self._make_best_effort = best_effort or make
        self._wait_s = best_effort_wait_s
        self._bands: dict[Band, Ordering] = {}
        self._sorted: list[Ordering] = []
        self._sizes: dict[Band, int] = {}
        self._best_effort: dict[Request, None] = {}  # not lifted, by arrival
        self._lifted: dict[Request, float] = {}  # with the time of its latest slice, or of the lift

    @property
    def is_decode_invariant(self) -> bool:
        return all(map(is_decode_invariant, self._sorted))

    def inner(self, request: Request) -> Ordering:
        return self._bands[request.progress.band]

    def inners(self) -> Sequence[Ordering]:
        return self._sorted

    def is_best_effort(self, request: Request) -> bool:
        return request.progress.band[0]

    def on_arrived(self, request: Request, now: float) -> None:
        if request.is_best_effort:
            self._best_effort[request] = None
        self._join(request, now)

    def on_scheduled(self, slices: Sequence[Slice], now: float) -> None:
        if self._lifted:
            self._lifted.update((slice_.request, now) for slice_ in slices if slice_.request in self._lifted)
        if len(self._sorted) == 1:
            self._sorted[0].on_scheduled(slices, now)
        else:
            super().on_scheduled(slices, now)

    def on_finished(self, request: Request, now: float) -> None:
        self._leave(request, now)
        self._best_effort.pop(request, None)
        self._lifted.pop(request, None)

    def ranked(self, now: float) -> Iterator[Request]:
        if self._best_effort:
            self._lift_oldest(now)
        if self._lifted:
            self._follow_priorities(now)
        return super().ranked(now)

    def rank(self, request: Request) -> tuple[Band, Any]:
        band = request.progress.band
        return (band, self._bands[band].rank(request))

    def outranks(self, one: Request, other: Request) -> bool:
        band, theirs = one.progress.band, other.progress.band
        return self._bands[band].outranks(one, other) if band == theirs else band < theirs

    def expected_order(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        if len(self._sorted) == 1:
            return self._sorted[0].expected_order(requests, now)
        by_band: dict[Band, list[Request]] = {}
        for request in requests:
            by_band.setdefault(request.progress.band, []).append(request)
        return [
            ((band, turn), request)
            for band in sorted(by_band)
            for turn, request in self._bands[band].expected_order(by_band[band], now)
        ]

    def may_await_prefix(self, request: Request, now: float) -> bool:
        return request not in self._lifted and super().may_await_prefix(request, now)

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        if better := sum(size for band, size in self._sizes.items() if band < request.progress.band):
            yield Fact("in better classes", better, "requests", "They run first: by class, urgency and priority.")
        if request in self._lifted:
            yield Fact("served as", "real-time", "", "It is best-effort, and has waited for so long that it is lifted.")
        elif request in self._best_effort:
            left_s = max(0.0, request.arrival + self._wait_s - now)
            yield Fact("lifted in", left_s, "s", "From then on it may be served as real-time, oldest requests first.")
        yield from super().explain(request, now, kv)

    def _lift_oldest(self, now: float) -> None:
        oldest = next(iter(self._best_effort))
        if now - oldest.arrival < self._wait_s or any(now <= ran + self._wait_s for ran in self._lifted.values()):
            return
        del self._best_effort[oldest]
        self._lifted[oldest] = now
        self._move(oldest, (False, True, oldest.options.priority), now)

    def _follow_priorities(self, now: float) -> None:
        """Give the lifted requests the best priority of real-time requests, or their own where there are none."""
        own = Counter(request.progress.band for request in self._lifted)
        best = min((b for b, size in self._sizes.items() if b[:2] == (False, True) and size > own[b]), default=None)
        for request in self._lifted:
            if best is not None and request.progress.band != best:
                self._move(request, best, now)

    def _move(self, request: Request, band: Band, now: float) -> None:
        self._leave(request, now)
        request.progress.lift(band)
        self._join(request, now)

    def _join(self, request: Request, now: float) -> None:
        band = request.progress.band
        if band not in self._bands:
            self._bands[band] = self._make_best_effort() if band[0] else self._make()
            self._sizes[band] = 0
            self._sort()
        self._sizes[band] += 1
        self._bands[band].on_arrived(request, now)

    def _leave(self, request: Request, now: float) -> None:
        band = request.progress.band
        self._bands[band].on_finished(request, now)
        self._sizes[band] -= 1
        # Empty bands are removed, since users may send any integer as a priority.
        if not self._sizes[band]:
            del self._bands[band], self._sizes[band]
            self._sort()

    def _sort(self) -> None:
        self._sorted = [self._bands[band] for band in sorted(self._bands)]
