"""Orderings of the two service classes: real-time requests by when their next token is due, best-effort ones by what
they have done and when their time is up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import inf
from typing import Any

from skipjoin.core.policy import Callbacks
from skipjoin.core.request import Request, Target
from skipjoin.core.step import Slice
from skipjoin.policies.ranking import Ranking


class NextTokens:
    """When the next token of each real-time request is due: its TTFT after the arrival, then its TPOT after the last
    token (BROS section 4.1).

    default: the objectives of requests that have none.
    """

    def __init__(self, default: Target) -> None:
        self.default = default
        self._due: dict[Request, float] = {}

    def __contains__(self, request: Request) -> bool:
        """Whether the request is served as a real-time one."""
        return request in self._due

    def due(self, request: Request) -> float:
        """When its next token is due, in seconds on the driver's clock."""
        return self._due[request]

    def begin(self, request: Request, now: float) -> None:
        """The request arrived, or is served as a real-time one from now on."""
        if request.output:
            self.sampled(request, now)
            return
        own = request.options.target.ttft_s
        since = now if request.is_best_effort else request.arrival
        self._due[request] = since + (own if own != inf else self.default.ttft_s)

    def sampled(self, request: Request, now: float) -> None:
        """A token of the request was sampled."""
        own = request.options.target.tpot_s
        self._due[request] = now + (own if own != inf else self.default.tpot_s)

    def end(self, request: Request) -> None:
        """Forget the request."""
        self._due.pop(request, None)


class ByDeadline(Callbacks):
    """Least time left until the next token is due first (BROS section 4.2). That time falls alike for all requests: the
    order stays as it is until a token comes or a deadline passes.

    A request whose deadline has passed ranks behind those that can still keep theirs, and makes way for them, the
    fewest tokens to compute first: it missed its objective, and should cost no other its own. After `overdue_s` more it
    ranks before all others, the earliest deadline first, so that none waits for ever. It gets KV as others end, and
    evicts late requests, but none that can still keep its deadline.
    """

    def __init__(self, next_tokens: NextTokens, overdue_s: float) -> None:
        self._next = next_tokens
        self._overdue_s = overdue_s
        self._tiers = self._overdue, self._winnable, self._late = Ranking(), Ranking(), Ranking()
        self._tier: dict[Request, int] = {}
        # Late requests, as they became late, which is by their deadlines: (deadline, request). Those that have a token
        # since have another deadline.
        self._missed: deque[tuple[float, Request]] = deque()
        self._now = -inf

    def arrived(self, request: Request, now: float) -> None:
        self._next.begin(request, now)
        self._put(request, _WINNABLE)

    def ran(self, slices: Sequence[Slice], now: float) -> None:
        for piece in slices:
            request = piece.request
            if piece.samples:
                self._next.sampled(request, now)
                if self._tier[request] != _WINNABLE:
                    self._take(request)
                    self._tier[request] = _WINNABLE
                self._winnable.change(request, self._key(request, _WINNABLE))
            elif self._tier[request] == _LATE:
                self._put(request, _LATE)

    def evicted(self, request: Request, now: float) -> None:
        self._put(request, self._tier[request])

    def finished(self, request: Request, now: float) -> None:
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
        # Only late requests make way. The one that waits is always due before those that run: by deadlines, two
        # requests would evict each other with every token. Overdue requests would do so to those that are in time in an
        # overload, and these would miss their deadlines.
        return self._tier[one] < self._tier[other] == _LATE

    def next_turns(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        return [(self._tier[request], request) for request in sorted(requests, key=self.rank)]

    def _follow_time(self, now: float) -> None:
        """Move the requests whose deadlines have passed."""
        due = self._next.due
        passed = []
        for request in self._winnable:
            if due(request) >= now:
                break
            passed.append(request)
        for request in passed:
            self._put(request, _LATE)
            self._missed.append((due(request), request))
        while self._missed and self._missed[0][0] + self._overdue_s <= now:
            when, request = self._missed.popleft()
            if self._tier.get(request) == _LATE and due(request) == when:
                self._put(request, _OVERDUE)

    def _put(self, request: Request, tier: int) -> None:
        self._take(request)
        self._tier[request] = tier
        self._tiers[tier].rest(request, self._key(request, tier))

    def _take(self, request: Request) -> None:
        if (tier := self._tier.get(request)) is not None:
            self._tiers[tier].discard(request)

    def _key(self, request: Request, tier: int) -> tuple[float, float, int]:
        due = self._next.due(request)
        return (request.known - request.reached if tier == _LATE else due, due, request.id)


_OVERDUE, _WINNABLE, _LATE = range(3)


class StartedFirst(Callbacks):
    """For best-effort requests: those that have begun first, so that the KV they hold comes free, and of those the ones
    that lost none of it (BROS section 4.2: the least swapping first); then by when their time is up, then by arrival.
    None evicts another."""

    rests = True

    def __init__(self) -> None:
        self._ranking = Ranking()
        self._stages: dict[Request, int] = {}

    def arrived(self, request: Request, now: float) -> None:
        self._put(request, _ON_DEVICE if request.planned else _AWAY if request.output else _NEW)

    def ran(self, slices: Sequence[Slice], now: float) -> None:
        for piece in slices:
            if self._stages[piece.request] != _ON_DEVICE:
                self._put(piece.request, _ON_DEVICE)

    def evicted(self, request: Request, now: float) -> None:
        if self._stages[request] == _ON_DEVICE:
            self._put(request, _AWAY)

    def finished(self, request: Request, now: float) -> None:
        self._ranking.discard(request)
        del self._stages[request]

    def ranked(self, now: float) -> Iterator[Request]:
        return iter(self._ranking)

    def rank(self, request: Request) -> Any:
        return self._ranking.key(request)

    def outranks(self, one: Request, other: Request) -> bool:
        return False

    def next_turns(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        return [(self._stages[request], request) for request in sorted(requests, key=self.rank)]

    def _put(self, request: Request, stage: int) -> None:
        self._stages[request] = stage
        self._ranking.rest(request, (stage, request.deadline, request.arrival, request.id))


_ON_DEVICE, _AWAY, _NEW = range(3)
