"""Two queues (EconoServe sections 3.3 and 3.4): prompts that wait for compute, generations that wait for KV."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from enum import IntEnum
from itertools import count, pairwise
from typing import Any, Protocol

from skipjoin.core.request import UNLIMITED, Request
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.predictors import forecast_tokens
from skipjoin.policies.valued import Valued

# A request that outgrew its forecast is expected to generate a quarter of what it has generated, and so many at least.
_OVERRUN_SHARE, _OVERRUN_TOKENS = 4, 32


class Phase(IntEnum):
    """What a request needs next, in the order in which a step serves it."""

    RUNNING = 0  # it generates, and has claimed the KV that it needs
    WAITING = 1  # it generates, and waits for KV to claim
    PROMPT = 2  # tokens have to be computed before the next one can be sampled


def phase_of(request: Request, known: int) -> Phase:
    """The phase of a request with `known` tokens, one that was just sampled and is not appended yet included."""
    if known - request.computed > 1 or known == len(request.prompt):
        return Phase.PROMPT
    return Phase.RUNNING if known <= request.claimed else Phase.WAITING


class PaddedLengths:
    """How long outputs get, with a margin (EconoServe section 2.3).

    padding: share of the forecast that is added to it or, below 0, not claimed at first: a request that outgrows its
    claim mostly gets a further one at once, and until then others use the KV. A guest claims its forecast at least,
    since its host needs the KV back. lengths: expected output tokens of a request in all.
    """

    def __init__(self, padding: float, lengths: Callable[[Request], float] = forecast_tokens) -> None:
        if not padding > -1:
            raise ValueError(f"padding must be above -1, got {padding}")
        self._padding = padding
        self._guest_padding = max(padding, 0.0)
        self._lengths = lengths

    def kv_tokens(self, request: Request, generated: int, *, guest: bool = False) -> int:
        """The tokens of KV that the request needs until its end, if it goes on after `generated` output tokens. The
        last token's own KV is never computed."""
        padded = math.ceil(self._lengths(request) * (1 + (self._guest_padding if guest else self._padding)))
        total = padded if padded > generated else generated + _overrun(generated)
        return len(request.prompt) + min(total, request.max_tokens) - 1

    def remaining(self, request: Request, generated: int) -> int:
        """Output tokens that are still expected, without the margin, at least 1."""
        left = math.ceil(self._lengths(request)) - generated
        return left if left > 0 else _overrun(generated)


def _overrun(generated: int) -> int:
    return max(_OVERRUN_TOKENS, generated // _OVERRUN_SHARE)


class QueueOrder(Protocol):
    """How the requests that wait are ordered, in either queue."""

    @property
    def revision(self) -> int:
        """As that of a `Value`."""
        ...

    def key(self, request: Request, known: int, phase: Phase, now: float) -> tuple[Any, ...]:
        """The place in the queue of the phase, smallest first; equal keys by arrival. Of generations, those with equal
        keys are a group: they claim KV together, as far as there is enough (EconoServe section 3.3.2)."""
        ...

    def until(self, request: Request, known: int, now: float) -> float:
        """When time alone changes the key, later than `now`; inf: never."""
        ...

    def left(self, request: Request) -> None:
        """The request does not wait any more."""


class ByArrival:
    """First come, first served in either queue, without groups."""

    revision = 0

    def key(self, request: Request, known: int, phase: Phase, now: float) -> tuple[Any, ...]:
        return (request.arrival, request.id)

    def until(self, request: Request, known: int, now: float) -> float:
        return math.inf

    def left(self, request: Request) -> None:
        pass


class ByGroup(ByArrival):
    """First come, first served, but generations of one remaining length wait as one group, in the place of the member
    that came first.

    lengths: tells what remains. length_range: tokens by which lengths that count as one may differ.
    """

    def __init__(self, lengths: PaddedLengths, length_range: int) -> None:
        self._lengths = lengths
        self._length_range = length_range
        self._groups: dict[int, dict[Request, None]] = {}
        self._first: dict[int, tuple[float, int]] = {}
        self._member_of: dict[Request, int] = {}

    def key(self, request: Request, known: int, phase: Phase, now: float) -> tuple[Any, ...]:
        if phase is not Phase.WAITING:
            return super().key(request, known, phase, now)
        length = _range(self._lengths.remaining(request, known - len(request.prompt)), self._length_range)
        if self._member_of.get(request) != length:
            self.left(request)
            self._member_of[request] = length
            self._groups.setdefault(length, {})[request] = None
            self._first.setdefault(length, (request.arrival, request.id))
        return (*self._first[length], length)

    def left(self, request: Request) -> None:
        length = self._member_of.pop(request, None)
        if length is not None:
            del self._groups[length][request]
            if not self._groups[length]:
                del self._groups[length], self._first[length]


class ByObjective:
    """By what is left of the time to the request's objective, then by the KV that it holds, the most first, as it gives
    back the most, then by length (EconoServe section 3.4). Each is a range, so that requests that differ little are
    equal, and generations of equal ranges form groups.

    The time that is left is what the target for the completion (`Target.jct_s`) leaves beside the work still to do. A
    request without a target counts among those with the most time left. One that cannot keep its target any more comes
    after all that can.

    time: prices the work. lengths: expected output lengths. time_ranges_s: borders of the ranges of time left, rising.
    kv_range, length_range: width of the other ranges, in tokens. longest_first: within a range of held KV (the paper's
    order); otherwise shortest first. overdue_s: a request that has been here for so many seconds comes before all that
    have not, so that none waits without end.
    """

    def __init__(
        self,
        time: ExecutionTime,
        lengths: PaddedLengths,
        *,
        time_ranges_s: Sequence[float] = (0.5, 2.0),
        kv_range: int = 128,
        length_range: int = 32,
        longest_first: bool = False,
        overdue_s: float = math.inf,
    ) -> None:
        borders = (0.0, *time_ranges_s)
        if any(not one < other for one, other in pairwise(borders)):
            raise ValueError(f"time_ranges_s must rise from above 0, got {', '.join(map(str, time_ranges_s))}")
        self._time = time
        self._lengths = lengths
        self._borders = borders[::-1]
        self._kv_range = kv_range
        self._length_range = length_range
        self._sign = -1 if longest_first else 1
        self._overdue_s = overdue_s

    @property
    def revision(self) -> int:
        return self._time.revision

    def key(self, request: Request, known: int, phase: Phase, now: float) -> tuple[Any, ...]:
        if phase is Phase.PROMPT:
            length = known - request.reached
        else:
            length = self._lengths.remaining(request, known - len(request.prompt))
        return (
            self._urgency(request, known, now),
            -(request.computed // self._kv_range),
            self._sign * _range(length, self._length_range),
        )

    def until(self, request: Request, known: int, now: float) -> float:
        times = (*self._crossings(request, known), request.arrival + self._overdue_s)
        return min((when for when in times if when > now), default=math.inf)

    def left(self, request: Request) -> None:
        pass

    def _urgency(self, request: Request, known: int, now: float) -> int:
        """The range of the time left: -1 for a request that is overdue, then from the least time left to the most, and
        last where the target is lost."""
        if now >= request.arrival + self._overdue_s:
            return -1
        ranges = len(self._borders)
        passed = bisect_right(self._crossings(request, known), now)
        return ranges if passed == ranges else ranges - 1 - passed

    def _crossings(self, request: Request, known: int) -> list[float]:
        """When the time left falls to each border, rising."""
        target_s = request.options.target.jct_s
        if target_s == math.inf:
            return [math.inf] * len(self._borders)
        latest = request.arrival + target_s - self._work_s(request, known)
        return [latest - border for border in self._borders]

    def _work_s(self, request: Request, known: int) -> float:
        left = self._lengths.remaining(request, known - len(request.prompt))
        uncached = known - request.reached
        return left * self._time.decode(known) + (self._time.prefill(uncached) if uncached > 1 else 0.0)


def _range(tokens: int, width: int) -> int:
    return tokens // width


class Tasks:
    """The two queues as a value: generations that run, in the order in which they claimed KV, then those that wait for
    it, then prompts. So what is lent KV comes after its lender.

    order: of those that wait.
    """

    def __init__(self, order: QueueOrder) -> None:
        self._order = order
        self._claims = count()
        self._claimed: dict[Request, int] = {}

    @property
    def revision(self) -> int:
        return self._order.revision

    def key(self, request: Request, known: int, now: float) -> tuple[Any, ...]:
        phase = phase_of(request, known)
        if phase is Phase.RUNNING:
            return (phase, self._claimed.get(request, -1))
        return (phase, *self._order.key(request, known, phase, now))

    def until(self, request: Request, now: float) -> float:
        known = request.known
        return math.inf if phase_of(request, known) is Phase.RUNNING else self._order.until(request, known, now)

    def tokens(self, request: Request, known: int) -> int:
        return request.claimed + 1 if known <= request.claimed < UNLIMITED else known + 1

    def group(self, request: Request, now: float) -> Hashable:
        """Equal for generations that wait as one group."""
        return self._order.key(request, request.known, Phase.WAITING, now)

    def claimed(self, request: Request) -> None:
        """The request was granted a claim."""
        self._claimed[request] = next(self._claims)
        self._order.left(request)

    def finished(self, request: Request) -> None:
        """The request ended."""
        self._claimed.pop(request, None)
        self._order.left(request)


class TwoQueues(Valued):
    """The ordering by `Tasks`."""

    rests = True

    def __init__(self, tasks: Tasks) -> None:
        super().__init__(tasks)
        self._tasks = tasks

    def claimed(self, request: Request, now: float) -> None:
        self._tasks.claimed(request)
        self._place(request, now)

    def finished(self, request: Request, now: float) -> None:
        super().finished(request, now)
        self._tasks.finished(request)
