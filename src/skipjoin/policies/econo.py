"""Decoupled queues of EconoServe (sections 3.3 and 3.4): prompts wait for compute, decodes wait for KV."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from enum import IntEnum
from itertools import count
from typing import Any, Protocol

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import Allocation, Fact
from skipjoin.core.policy_set import explanation
from skipjoin.core.request import UNLIMITED, Request
from skipjoin.core.selective import Limits
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.needs import NeedIndex
from skipjoin.policies.predictors import forecast_tokens
from skipjoin.policies.valued import Valued

# A request that outgrew its forecast is expected to generate a quarter of its output so far, but at least 32 tokens.
_OVERRUN_SHARE, _OVERRUN_TOKENS = 4, 32


class Phase(IntEnum):
    """Next need of a request, in the order in which a step serves it."""

    RUNNING = 0  # decodes within its KV reservation
    WAITING = 1  # decodes, and waits for a KV reservation
    PROMPT = 2  # has tokens to compute before it can sample


def phase_of(request: Request, known: int) -> Phase:
    """Return the phase of a request with `known` tokens, including one that was just sampled."""
    if known - request.progress.computed > 1 or known == len(request.prompt):
        return Phase.PROMPT
    return Phase.RUNNING if known <= request.progress.reserved_tokens else Phase.WAITING


_PHASES = {
    Phase.RUNNING: ("decodes", "It generates tokens within its KV reservation, and runs in every step."),
    Phase.WAITING: ("waits for KV", "It generates tokens once it has a KV reservation for its output."),
    Phase.PROMPT: ("prompt", "Its prompt is computed in the room that decodes leave in a step."),
}


class PaddedLengths:
    """Predicted output lengths with padding (EconoServe section 2.3), a share of the forecast that is added.

    A negative share is not reserved until a request outgrows its reservation. Nested reservations are never below the
    forecast, since the parent request needs its KV.
    """

    def __init__(self, padding: float, lengths: Callable[[Request], float] = forecast_tokens) -> None:
        self._padding = padding
        self._nested_padding = max(padding, 0.0)
        self._lengths = lengths

    def kv_tokens(self, request: Request, generated: int, *, nested: bool = False) -> int:
        """Return the total KV tokens of a request that continues after `generated` output tokens."""
        padded = math.ceil(self._lengths(request) * (1 + (self._nested_padding if nested else self._padding)))
        total = padded if padded > generated else generated + _overrun(generated)
        return len(request.prompt) + min(total, request.max_tokens) - 1

    def remaining(self, request: Request, generated: int) -> int:
        """Return the expected number of further output tokens without padding, at least 1."""
        left = math.ceil(self._lengths(request)) - generated
        return left if left > 0 else _overrun(generated)


def _overrun(generated: int) -> int:
    return max(_OVERRUN_TOKENS, generated // _OVERRUN_SHARE)


class QueueOrder(Protocol):
    """Order of the waiting requests in both queues; see `Value`."""

    @property
    def revision(self) -> int: ...

    def key(self, request: Request, known: int, phase: Phase, now: float) -> tuple[Any, ...]:
        """Return the key in the phase's queue, by which decodes form groups that reserve KV together."""

    def until(self, request: Request, known: int, now: float) -> float: ...
    def lost(self, request: Request) -> None: ...
    def left(self, request: Request) -> None: ...


class ByObjective:
    """Order by slack to the request's objective, then most KV held, then length (EconoServe section 3.4).

    Each is compared by range, of `kv_range` and `length_range` tokens, and decodes of equal ranges form groups. Slack
    is the time until the completion target (`Target.jct_s`) minus the remaining work, with the ascending boundaries
    `time_ranges_s`. Requests without a target follow those with one, and missed targets are last. A request that lost
    its KV on the device frees none when it finishes, but needs as much again: of these, those with the least come
    first, and after those that hold KV.
    """

    def __init__(
        self,
        time: ExecutionTime,
        lengths: PaddedLengths,
        *,
        time_ranges_s: Sequence[float],
        kv_range: int = 128,
        length_range: int = 32,
        longest_first: bool = False,
    ) -> None:
        self._time = time
        self._lengths = lengths
        self._borders = (0.0, *time_ranges_s)[::-1]
        self._kv_range = kv_range
        self._length_range = length_range
        self._sign = -1 if longest_first else 1
        self._without_kv: set[Request] = set()  # waiting requests that lost their KV on the device
        self._asked: tuple[object, ...] = ()  # arguments of the latest `_crossings`
        self._times: list[float] = []

    @property
    def revision(self) -> int:
        return self._time.revision

    def key(self, request: Request, known: int, phase: Phase, now: float) -> tuple[Any, ...]:
        if phase is Phase.PROMPT:
            length = known - request.progress.reached
        else:
            length = self._lengths.remaining(request, known - len(request.prompt))
        held = request.progress.computed // self._kv_range
        return (
            self._urgency(request, known, now),
            held if request in self._without_kv else -held,
            self._sign * (length // self._length_range),
        )

    def until(self, request: Request, known: int, now: float) -> float:
        crossings = self._crossings(request, known)
        passed = bisect_right(crossings, now)
        return crossings[passed] if passed < len(crossings) else math.inf

    def lost(self, request: Request) -> None:
        self._without_kv.add(request)

    def left(self, request: Request) -> None:
        self._without_kv.discard(request)

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        known, due = request.progress.known, request.arrival + request.progress.target.jct_s
        left = self._lengths.remaining(request, known - len(request.prompt))
        work_s = self._work_s(request, known)
        yield Fact("predicted to remain", left, "tokens", "Output that it is expected to generate yet.")
        yield Fact("remaining work", work_s, "s", "Time for it and for the prompt alone.")
        if due < math.inf:
            yield Fact("deadline in", due - now, "s", "Time until its completion objective; negative: missed.")
            meaning = "Time that it can still wait and meet it. Requests with little slack run first, lost ones last."
            yield Fact("slack", due - now - work_s, "s", meaning)
        else:
            yield Fact("slack", "unlimited", "", "It has no completion objective, and follows those that have.")

    def _urgency(self, request: Request, known: int, now: float) -> int:
        """Return the range of slack, from least to most, then missed targets."""
        ranges = len(self._borders)
        passed = bisect_right(self._crossings(request, known), now)
        return ranges if passed == ranges else ranges - 1 - passed

    def _crossings(self, request: Request, known: int) -> list[float]:
        # `key` and `until` ask for the same times, one after the other.
        time, progress = self._time, request.progress
        asked = (request, known, progress.reached, progress.forecast, time.alpha, time.beta, time.t0)
        if asked != self._asked:
            self._asked, self._times = asked, self._times_of(request, known)
        return self._times

    def _times_of(self, request: Request, known: int) -> list[float]:
        target_s = request.progress.target.jct_s
        if target_s == math.inf:
            return [math.inf] * len(self._borders)
        latest = request.arrival + target_s - self._work_s(request, known)
        return [latest - border for border in self._borders]

    def _work_s(self, request: Request, known: int) -> float:
        left = self._lengths.remaining(request, known - len(request.prompt))
        uncached = known - request.progress.reached
        return left * self._time.decode(known) + (self._time.prefill(uncached) if uncached > 1 else 0.0)


class Tasks:
    """Value function of the two queues: running decodes by time of reservation, then waiting decodes, then prompts.

    The order is told which requests lost their KV on the device if it `parks`. `overdue` requests precede all others of
    their phase because of their age.
    """

    def __init__(self, order: QueueOrder, *, parks: bool = False) -> None:
        self.overdue: set[Request] = set()
        self._order = order
        self._parks = parks
        self._reservations = count()
        self._reserved: dict[Request, int] = {}

    @property
    def revision(self) -> int:
        return self._order.revision

    def key(self, request: Request, known: int, now: float) -> tuple[Any, ...]:
        phase = phase_of(request, known)
        if phase is Phase.RUNNING:
            return (phase, self._reserved.get(request, -1))
        return (phase, request not in self.overdue, *self._order.key(request, known, phase, now))

    def until(self, request: Request, now: float) -> float:
        known = request.progress.known
        return math.inf if phase_of(request, known) is Phase.RUNNING else self._order.until(request, known, now)

    def tokens(self, request: Request, known: int) -> int:
        reserved = request.progress.reserved_tokens
        return reserved + 1 if known <= reserved < UNLIMITED else known + 1

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        words, meaning = _PHASES[phase_of(request, request.progress.known)]
        yield Fact("phase", words, "", meaning)
        yield from explanation(self._order, request, now, kv)

    def group(self, request: Request, now: float) -> Hashable:
        return self._order.key(request, request.progress.known, Phase.WAITING, now)

    def on_reserved(self, request: Request) -> None:
        self._reserved[request] = next(self._reservations)
        self._order.left(request)

    def on_preempted(self, request: Request) -> None:
        if self._parks:
            self._order.lost(request)

    def on_finished(self, request: Request) -> None:
        self.overdue.discard(request)
        self._reserved.pop(request, None)
        self._order.left(request)


class TwoQueues(Valued):
    """Ordering by `Tasks`, which finds the prompts that fit in `index` by binary search (EconoServe section 3.4).

    A request that is `overdue_s` seconds old precedes all others. If all of them came first, an overload would make
    every request late, so they take at most `overdue_share` of the reserved KV, oldest first.
    """

    is_decode_invariant = True

    def __init__(
        self, tasks: Tasks, index: NeedIndex, lengths: PaddedLengths, *, overdue_s: float, overdue_share: float
    ) -> None:
        super().__init__(tasks)
        self._tasks = tasks
        self._index = index
        self._lengths = lengths
        self._overdue_s = overdue_s
        self._overdue_share = overdue_share
        self._ages: deque[Request] = deque()  # requests that are not overdue, oldest first, and finished ones
        # Tokens of KV reserved for outputs so far, and their number at which another request may become overdue.
        self._reserved_tokens = self._next_overdue = 0

    def on_arrived(self, request: Request, now: float) -> None:
        super().on_arrived(request, now)
        self._ages.append(request)

    def on_reserved(self, request: Request, allocation: Allocation, now: float) -> None:
        self._tasks.on_reserved(request)
        if allocation.tokens is not None and phase_of(request, request.progress.known) is Phase.RUNNING:
            self._reserved_tokens += allocation.tokens
        self._place(request, now)

    def on_preempted(self, request: Request, now: float) -> None:
        self._tasks.on_preempted(request)
        super().on_preempted(request, now)

    def on_finished(self, request: Request, now: float) -> None:
        super().on_finished(request, now)
        self._tasks.on_finished(request)
        self._index.discard(request)

    def may_await_prefix(self, request: Request, now: float) -> bool:
        return request not in self._tasks.overdue

    def fitting(self, limits: Limits, kv: KVAccounts) -> Iterator[Request]:
        return self._index.fitting(limits, kv)

    def ranked(self, now: float) -> Iterator[Request]:
        while self._ages and self._ages[0].arrival + self._overdue_s <= now:
            request = self._ages[0]
            if request in self._ranking and not self._make_overdue(request, now):
                break
            self._ages.popleft()
        return super().ranked(now)

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        yield from super().explain(request, now, kv)
        if request in self._tasks.overdue:
            yield Fact("overdue", "yes", "", "It precedes all others, because of its age.")
        elif self._overdue_s < math.inf:
            overdue_s = max(0.0, request.arrival + self._overdue_s - now)
            yield Fact("overdue in", overdue_s, "s", "From then on it may precede all others, oldest first.")

    def _make_overdue(self, request: Request, now: float) -> bool:
        known = request.progress.known
        if phase_of(request, known) is not Phase.RUNNING:
            if self._reserved_tokens < self._next_overdue:
                return False
            tokens = self._lengths.kv_tokens(request, known - len(request.prompt))
            self._next_overdue = self._reserved_tokens + math.ceil(tokens / self._overdue_share)
        self._tasks.overdue.add(request)
        self._age(request, now)
        return True

    def _place(self, request: Request, now: float) -> None:
        super()._place(request, now)
        if not request.progress.planned or phase_of(request, request.progress.known) is Phase.WAITING:
            self._index.put(request, self.rank(request))
        else:
            self._index.discard(request)

    def _age(self, request: Request, now: float) -> None:
        super()._place(request, now)
        self._index.move(request, self.rank(request))

    def _moved(self, request: Request, known: int) -> None:
        if phase_of(request, known) is Phase.WAITING:
            self._index.put(request, self.rank(request))
