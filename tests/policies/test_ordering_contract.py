"""What the scheduler relies on in every ordering."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache
from itertools import islice, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipjoin.core.forecast import LENGTH_EDGES, Forecast, length_bin
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy import Ordering
from skipjoin.core.request import Request, Target
from skipjoin.core.scheduling.context import StepContext
from skipjoin.core.step import Slice
from skipjoin.policies.coupled import Closest, HoldersFirst, Room
from skipjoin.policies.deadlines import ByDeadline, NextTokens, StartedFirst
from skipjoin.policies.econo import ByArrival, ByGroup, ByObjective, PaddedLengths, Tasks, TwoQueues
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.fairness import Fair
from skipjoin.policies.mlfq import SkipJoinMlfq
from skipjoin.policies.ordering import Fcfs, FixedKey, Prioritized
from skipjoin.policies.predictors import ForecastQuantile, longest_output
from skipjoin.policies.remaining import RemainingTime
from skipjoin.policies.turns import ByTurn, Turn
from skipjoin.policies.valued import Valued
from skipjoin.policies.wait_times import ShortestWithWaits
from support.load import make
from support.policies import COST


def mlfq() -> Ordering:
    return SkipJoinMlfq(COST, starvation_s=0.5)


def srpt() -> Ordering:
    return Valued(RemainingTime(ExecutionTime(COST), longest_output))


def alise() -> Ordering:
    return ShortestWithWaits(RemainingTime(ExecutionTime(COST), ForecastQuantile(0.3), aging_s=20.0))


def by_deadline() -> Ordering:
    return ByDeadline(NextTokens(Target(ttft_s=0.3, tpot_s=0.1)), overdue_s=0.5)


def closest() -> Ordering:
    room = Room()
    room.begin(KVLedger(200, 0, 4))
    room.open(StepContext(), 8, 512)
    return Closest(ByArrival(), room, PaddedLengths(0.15))


def by_objective(*, longest_first: bool = False) -> ByObjective:
    """With borders that time crosses while requests live."""
    return ByObjective(
        ExecutionTime(COST),
        PaddedLengths(0.0),
        time_ranges_s=(0.5, 1.0),
        kv_range=8,
        length_range=4,
        longest_first=longest_first,
        overdue_s=3.0,
    )


def fair(make: Callable[[], Ordering]) -> Ordering:
    """With a lead that is reached while requests live."""
    return Fair(make, lead=200, output_weight=2.0)


class Overdue:
    """Overdue requests first, then the least generated, by bins of lengths. A key that time changes, and bins do."""

    revision = 0

    def key(self, request: Request, known: int, now: float) -> tuple[bool, int]:
        return (now < request.arrival + 1.0, length_bin(max(1, known - len(request.prompt))))

    def until(self, request: Request, now: float) -> float:
        return request.arrival + 1.0 if now < request.arrival + 1.0 else math.inf

    def tokens(self, request: Request, known: int) -> int:
        generated = max(1, known - len(request.prompt))
        return len(request.prompt) + LENGTH_EDGES[length_bin(generated) + 1]


ORDERINGS: dict[str, Callable[[], Ordering]] = {
    "fcfs": Fcfs,
    "fixed key, many equal": lambda: FixedKey(lambda request: len(request.prompt) % 3),
    "srpt": srpt,
    "alise": alise,
    "closest": closest,
    "groups of one length": lambda: HoldersFirst(ByGroup(PaddedLengths(0.15), 4)),
    "overdue, by bins": lambda: Valued(Overdue()),
    "skip-join": mlfq,
    "mlfq": lambda: SkipJoinMlfq(COST, starvation_s=0.5, skip_join=False),
    "two queues": lambda: SkipJoinMlfq(COST, levels=2, starvation_s=0.1),
    "econoserve, by arrival": lambda: TwoQueues(Tasks(ByArrival())),
    "econoserve, by group": lambda: TwoQueues(Tasks(ByGroup(PaddedLengths(0.2), 4))),
    "econoserve": lambda: TwoQueues(Tasks(by_objective())),
    "econoserve, longest first": lambda: TwoQueues(Tasks(by_objective(longest_first=True))),
    "prioritized econoserve": lambda: Prioritized(lambda: TwoQueues(Tasks(by_objective()))),
    "prioritized fcfs": lambda: Prioritized(Fcfs),
    "prioritized srpt": lambda: Prioritized(srpt),
    "prioritized alise": lambda: Prioritized(alise),
    "prioritized closest": lambda: Prioritized(closest),
    "prioritized skip-join": lambda: Prioritized(mlfq, best_effort_wait_s=0.5),
    "by deadline": by_deadline,
    "prioritized by deadline": lambda: Prioritized(by_deadline, best_effort=StartedFirst, best_effort_wait_s=0.5),
    "started first": StartedFirst,
    "fair fcfs": lambda: fair(Fcfs),
    "fair skip-join": lambda: fair(mlfq),
    "fair bands": lambda: Prioritized(lambda: fair(alise), best_effort_wait_s=0.5),
    "by turn": lambda: ByTurn(Turn(), lambda: Prioritized(Fcfs)),
}
every_ordering = pytest.mark.parametrize("build", ORDERINGS.values(), ids=ORDERINGS.keys())


class Life:
    """Requests that live as the engine lets them, without an engine."""

    def __init__(self, ordering: Ordering) -> None:
        self.ordering = ordering
        self.now = 0.0
        self.live: list[Request] = []
        self._next = 0

    def arrive(self, prompt: int, max_tokens: int) -> None:
        best_effort = not prompt % 4
        request = make(
            self._next,
            prompt,
            max_tokens,
            arrival=self.now,
            priority=prompt % 3,
            best_effort=best_effort,
            client=f"client {prompt % 5}",
        )
        self._next += 1
        self.live.append(request)
        self.ordering.on_arrived(request, self.now)

    def run(self, batch: list[Request], most: int) -> None:
        """Compute up to `most` tokens of each, then append what was sampled, as the engine does."""
        slices = []
        for request in batch:
            tokens = min(most, request.known - request.computed)
            end = request.computed + tokens
            slices.append(Slice(request, request.computed, tokens, end == request.known, False, ()))
            request.computed = request.planned = end
        self.now += 0.02
        self.ordering.on_scheduled(slices, self.now)
        for piece in slices:
            if piece.samples:
                piece.request.known += 1
                if piece.request.known >= piece.request.max_total_tokens:
                    self.leave(piece.request)

    def evict(self, request: Request, *, drop: bool) -> None:
        if drop:
            request.computed = request.planned = 0
        self.ordering.on_preempted(request, self.now)

    def forecast(self, request: Request, tokens: int) -> None:
        request.forecast = Forecast(tokens, "test")
        self.ordering.on_reforecast(request, self.now)

    def leave(self, request: Request) -> None:
        self.live.remove(request)
        self.ordering.on_finished(request, self.now)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "arrive", "run", "run", "drop", "swap", "forecast", "leave", "wait"]),
        st.integers(0, 400),
    ),
    max_size=40,
)


def live_through(life: Life, operation: str, number: int) -> None:
    """Do one operation, as far as it makes sense now."""
    if operation == "arrive":
        life.arrive(1 + number, 1 + number % 9)
    elif operation == "wait":
        life.now += number / 100
    elif life.live:
        at = number % len(life.live)
        if operation == "run":
            # A batch from somewhere in the middle, in chunks now and then.
            life.run(life.live[at : at + 3], most=64 if number % 2 else 1000)
        elif operation == "leave":
            life.leave(life.live[at])
        elif operation == "forecast":
            life.forecast(life.live[at], 1 + number // 20)
        else:
            life.evict(life.live[at], drop=operation == "drop")


@every_ordering
@given(operations=OPERATIONS)
@settings(max_examples=25)
def test_ranked_is_all_requests_sorted_by_distinct_ranks(
    build: Callable[[], Ordering], operations: list[tuple[str, int]]
) -> None:
    life = Life(build())
    for operation, number in operations:
        live_through(life, operation, number)
        ranked = list(life.ordering.ranked(life.now))
        assert set(ranked) == set(life.live)
        assert len(ranked) == len(life.live)
        ranks = [life.ordering.rank(request) for request in ranked]
        assert all(one < other for one, other in pairwise(ranks))


@every_ordering
@given(operations=OPERATIONS)
@settings(max_examples=25)
def test_order_rests_between_calls_and_while_it_is_read(
    build: Callable[[], Ordering], operations: list[tuple[str, int]]
) -> None:
    life = Life(build())
    for operation, number in operations:
        live_through(life, operation, number)
    iterator = life.ordering.ranked(life.now)
    first = list(islice(iterator, 1))
    before = {request: life.ordering.rank(request) for request in life.live}
    rest = list(iterator)
    assert {request: life.ordering.rank(request) for request in life.live} == before
    assert list(life.ordering.ranked(life.now)) == first + rest


@every_ordering
@given(operations=OPERATIONS)
@settings(max_examples=20)
def test_outranks_is_a_strict_order_that_agrees_with_rank(
    build: Callable[[], Ordering], operations: list[tuple[str, int]]
) -> None:
    life = Life(build())
    for operation, number in operations:
        live_through(life, operation, number)
    ordering = life.ordering
    ranked = list(ordering.ranked(life.now))
    for (i, one), (j, other) in product(enumerate(ranked), repeat=2):
        if ordering.outranks(one, other):
            assert i < j
            # Whoever is worse than `other` is outranked too, and whoever is better than `one` outranks `other`:
            # the search for victims stops at the first that is not outranked.
            assert all(ordering.outranks(one, worse) for worse in ranked[j:])
            assert all(ordering.outranks(better, other) for better in ranked[: i + 1])


@every_ordering
@given(operations=OPERATIONS, number=st.integers(0, 400), drop=st.booleans())
@settings(max_examples=25)
def test_eviction_never_makes_a_request_matter_more(
    build: Callable[[], Ordering], operations: list[tuple[str, int]], number: int, drop: bool
) -> None:
    life = Life(build())
    for operation, at in operations:
        live_through(life, operation, at)
    if not life.live:
        return
    list(life.ordering.ranked(life.now))
    victim = life.live[number % len(life.live)]
    before = life.ordering.rank(victim)
    life.evict(victim, drop=drop)
    assert life.ordering.rank(victim) >= before


@every_ordering
@given(operations=OPERATIONS, chosen=st.integers(0, 2**40), later=st.floats(0, 5))
@settings(max_examples=25)
def test_turns_are_of_those_asked_for_in_order_and_change_nothing(
    build: Callable[[], Ordering], operations: list[tuple[str, int]], chosen: int, later: float
) -> None:
    life = Life(build())
    for operation, number in operations:
        live_through(life, operation, number)
    asked = [request for number, request in enumerate(life.live) if chosen >> number & 1]
    before = {request: life.ordering.rank(request) for request in life.live}
    turns = life.ordering.next_turns(iter(asked), life.now + later)
    assert {request.id for _, request in turns} == {request.id for request in asked}
    assert len(turns) == len(asked)
    assert all(not other < one for (one, _), (other, _) in pairwise(turns))
    assert life.ordering.next_turns(reversed(asked), life.now + later) == turns
    assert {request: life.ordering.rank(request) for request in life.live} == before


@pytest.mark.parametrize("name", ["fcfs", "fixed key, many equal", "srpt", "prioritized fcfs", "prioritized srpt"])
@given(operations=OPERATIONS)
@settings(max_examples=25)
def test_where_time_promotes_nobody_turns_are_by_rank_and_equal_between_equals(
    name: str, operations: list[tuple[str, int]]
) -> None:
    life = Life(ORDERINGS[name]())
    for operation, number in operations:
        live_through(life, operation, number)
    ordering = life.ordering
    turns = ordering.next_turns(life.live, life.now)
    assert [request for _, request in turns] == sorted(life.live, key=ordering.rank)
    for (one_turn, one), (other_turn, other) in pairwise(turns):
        assert (one_turn < other_turn) == ordering.outranks(one, other)


@cache
def long_queue() -> list[Request]:
    """Requests that several orderings may hold at a time: nothing runs, so nothing changes them."""
    return [
        make(number, 1 + number % 7, 4, arrival=number * 1e-9, priority=number % 2, client=f"client {number % 5}")
        for number in range(30_000)
    ]


@every_ordering
def test_the_first_of_a_long_queue_costs_no_pass_over_it(build: Callable[[], Ordering]) -> None:
    ordering = build()
    for request in long_queue():
        ordering.on_arrived(request, 0.0)

    def seconds(most: int | None) -> float:
        start = time.perf_counter()
        for _ in islice(ordering.ranked(0.0), most):
            pass
        return time.perf_counter() - start

    seconds(None)
    assert min(seconds(1) for _ in range(5)) < min(seconds(None) for _ in range(3)) / 50
