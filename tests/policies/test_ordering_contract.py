from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import islice, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papers.bros.turns import ByTurn, Turn
from papers.econoserve.coupled import ByArrival, ByGroup, Closest, HoldersFirst, Room
from skipjoin.core.context import StepContext
from skipjoin.core.forecast import LENGTH_EDGES, Forecast, length_bin
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy import Allocation, Ordering
from skipjoin.core.request import ProgramId, Request, Target
from skipjoin.core.selective import fitting
from skipjoin.core.step import Slice
from skipjoin.policies.adaptive import Adaptive
from skipjoin.policies.deadlines import ByDeadline, NextTokens, StartedFirst
from skipjoin.policies.econo import ByObjective, PaddedLengths, QueueOrder, Tasks, TwoQueues
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.fairness import Fair
from skipjoin.policies.gittins import GittinsIndex
from skipjoin.policies.mlfq import Promotion, SkipJoinMlfq
from skipjoin.policies.needs import NeedIndex
from skipjoin.policies.ordering import Fcfs, FixedKey, Prioritized
from skipjoin.policies.predictors import ForecastQuantile, forecast_tokens, longest_output
from skipjoin.policies.program_book import ProgramBook
from skipjoin.policies.programs import ByProgram
from skipjoin.policies.remaining import RemainingTime
from skipjoin.policies.valued import Valued
from skipjoin.policies.wait_times import ShortestWithWaits
from support.load import changed, make
from support.policies import COST, told_by
from support.worlds import halved


def mlfq() -> Ordering:
    return SkipJoinMlfq(COST, starvation_s=0.5)


def srpt() -> Ordering:
    return Valued(RemainingTime(ExecutionTime(COST), longest_output))


def alise() -> Ordering:
    return ShortestWithWaits(RemainingTime(ExecutionTime(COST), ForecastQuantile(0.3), aging_s=20.0))


def adaptive(overtaking_s: float = 100.0) -> Ordering:
    """Return an ordering whose gate for first tokens closes while requests live."""
    return Adaptive(GittinsIndex(COST, 4), overtaking_s=overtaking_s, first_share=0.01, prompt_patience=30.0)


def by_deadline(*, counts_lead: bool = False) -> Ordering:
    return ByDeadline(NextTokens(Target(ttft_s=0.3, tpot_s=0.1), counts_lead=counts_lead), overdue_s=0.5, cost=COST)


def closest() -> Ordering:
    room = Room()
    room.begin(KVLedger(200, 0, 4))
    room.open(StepContext(), 8, 512)
    return Closest(ByArrival(), room, PaddedLengths(0.15))


def by_objective(*, longest_first: bool = False) -> ByObjective:
    """Return an ordering whose time bounds pass while requests live."""
    return ByObjective(
        ExecutionTime(COST),
        PaddedLengths(0.0),
        time_ranges_s=(0.5, 1.0),
        kv_range=8,
        length_range=4,
        longest_first=longest_first,
    )


def fair(make: Callable[[], Ordering]) -> Ordering:
    return Fair(make, lead=200, output_weight=2.0)


def by_program(book: ProgramBook) -> Ordering:
    return ByProgram(adaptive, book, overtaking_s=2.0)


class Overdue:
    """Ranks overdue requests first, then by bins of generated tokens: a key that changes with time and with bins."""

    revision = 0

    def key(self, request: Request, known: int, now: float) -> tuple[bool, int]:
        return (now < request.arrival + 1.0, length_bin(max(1, known - len(request.prompt))))

    def until(self, request: Request, now: float) -> float:
        return request.arrival + 1.0 if now < request.arrival + 1.0 else math.inf

    def tokens(self, request: Request, known: int) -> int:
        generated = max(1, known - len(request.prompt))
        return len(request.prompt) + LENGTH_EDGES[length_bin(generated) + 1]


def needs(request: Request, kv: KVAccounts) -> tuple[int, int]:
    """Return the blocks of the prompt and of the output, which a new forecast changes."""
    return kv.blocks_for(request.progress.known), kv.blocks_for(int(forecast_tokens(request)))


def two_queues(order: QueueOrder) -> Ordering:
    """Return queues in which requests become overdue as others reserve KV."""
    return TwoQueues(Tasks(order), NeedIndex(needs), PaddedLengths(0.0), overdue_s=3.0, overdue_share=0.02)


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
    "skip-join, shortest prefill": lambda: SkipJoinMlfq(
        COST, starvation_s=0.5, shortest_prefill=True, promotion=Promotion.ONE_QUANTUM
    ),
    "two queues": lambda: SkipJoinMlfq(COST, levels=2, starvation_s=0.1),
    "econoserve, by arrival": lambda: two_queues(ByArrival()),
    "econoserve, by group": lambda: two_queues(ByGroup(PaddedLengths(0.2), 4)),
    "econoserve": lambda: two_queues(by_objective()),
    "econoserve, longest first": lambda: two_queues(by_objective(longest_first=True)),
    "prioritized econoserve": lambda: Prioritized(lambda: two_queues(by_objective())),
    "fair econoserve": lambda: Prioritized(lambda: fair(lambda: two_queues(by_objective()))),
    "prioritized fcfs": lambda: Prioritized(Fcfs),
    "prioritized srpt": lambda: Prioritized(srpt),
    "prioritized alise": lambda: Prioritized(alise),
    "prioritized closest": lambda: Prioritized(closest),
    "prioritized skip-join": lambda: Prioritized(mlfq, best_effort_wait_s=0.5),
    "by deadline": by_deadline,
    "by schedule": lambda: by_deadline(counts_lead=True),
    "prioritized by deadline": lambda: Prioritized(by_deadline, best_effort=StartedFirst, best_effort_wait_s=0.5),
    "started first": StartedFirst,
    "fair fcfs": lambda: fair(Fcfs),
    "fair skip-join": lambda: fair(mlfq),
    "fair bands": lambda: Prioritized(lambda: fair(alise), best_effort_wait_s=0.5),
    "adaptive": adaptive,
    "adaptive, much aging": lambda: adaptive(5.0),
    "prioritized adaptive": lambda: Prioritized(adaptive, best_effort_wait_s=0.5),
    "fair adaptive": lambda: fair(adaptive),
    "programs": lambda: by_program(ProgramBook()),
    "fair programs": lambda: fair(partial(by_program, ProgramBook())),
    "by turn": lambda: ByTurn(Turn(), lambda: Prioritized(Fcfs)),
}
every_ordering = pytest.mark.parametrize("build", ORDERINGS.values(), ids=ORDERINGS.keys())


def half_of_orderings(begin: int) -> pytest.MarkDecorator:
    """Run a test for every second ordering, and in `make test-all` for the others."""
    names = halved(ORDERINGS, begin)
    return pytest.mark.parametrize(
        "build", [pytest.param(ORDERINGS[param.values[0]], id=param.values[0], marks=param.marks) for param in names]
    )


class Simulation:
    def __init__(self, ordering: Ordering) -> None:
        self.ordering = ordering
        self.now = 0.0
        self.live: list[Request] = []
        self._next = 0

    def arrive(self, prompt: int, max_tokens: int) -> None:
        best_effort = not prompt % 4
        client = f"client {prompt % 5}"
        request = make(
            self._next,
            prompt,
            max_tokens,
            arrival=self.now,
            priority=prompt % 3,
            best_effort=best_effort,
            client=client,
        )
        if prompt % 2:
            request = changed(request, program=ProgramId(client, f"program {prompt % 7}"))
        self._next += 1
        self.live.append(request)
        self.ordering.on_arrived(request, self.now)

    def run(self, batch: list[Request], most: int) -> None:
        """Compute up to `most` tokens of each request, then append the samples, as the engine does."""
        slices = []
        for request in batch:
            tokens = min(most, request.progress.known - request.progress.computed)
            start, end = request.progress.computed, request.progress.computed + tokens
            slices.append(Slice(request, start, tokens, end == request.progress.known, False, ()))
            request.progress.computed = request.progress.planned = end
            if not start:
                self.ordering.on_reserved(request, Allocation(0), self.now)
        self.now += 0.02
        self.ordering.on_scheduled(slices, self.now)
        for piece in slices:
            if piece.samples:
                piece.request.progress.known += 1
                if piece.request.progress.known >= piece.request.max_total_tokens:
                    self.leave(piece.request)

    def evict(self, request: Request, *, drop: bool) -> None:
        if drop:
            request.progress.computed = request.progress.planned = 0
        self.ordering.on_preempted(request, self.now)

    def forecast(self, request: Request, tokens: int) -> None:
        request.progress.forecast = Forecast(tokens, "test")
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


def apply(simulation: Simulation, operation: str, number: int) -> None:
    if operation == "arrive":
        simulation.arrive(1 + number, 1 + number % 9)
    elif operation == "wait":
        simulation.now += number / 100
    elif simulation.live:
        at = number % len(simulation.live)
        if operation == "run":
            # A batch from the middle, chunked for odd numbers.
            simulation.run(simulation.live[at : at + 3], most=64 if number % 2 else 1000)
        elif operation == "leave":
            simulation.leave(simulation.live[at])
        elif operation == "forecast":
            simulation.forecast(simulation.live[at], 1 + number // 20)
        else:
            simulation.evict(simulation.live[at], drop=operation == "drop")


def simulated(ordering: Ordering, operations: list[tuple[str, int]]) -> Simulation:
    simulation = Simulation(ordering)
    for operation, number in operations:
        apply(simulation, operation, number)
    return simulation


@half_of_orderings(0)
@given(operations=OPERATIONS)
def test_ranked_is_all_requests_sorted_by_distinct_ranks(
    build: Callable[[], Ordering], operations: list[tuple[str, int]]
) -> None:
    simulation = Simulation(build())
    for operation, number in operations:
        apply(simulation, operation, number)
        ranked = list(simulation.ordering.ranked(simulation.now))
        assert set(ranked) == set(simulation.live)
        assert len(ranked) == len(simulation.live)
        ranks = [simulation.ordering.rank(request) for request in ranked]
        assert all(one < other for one, other in pairwise(ranks))


@pytest.mark.parametrize("name", [name for name in ORDERINGS if "econoserve" in name])
@given(operations=OPERATIONS, prompt=st.integers(0, 40), output=st.integers(0, 8))
def test_requests_that_fit_are_found_in_rank_order(
    name: str, operations: list[tuple[str, int]], prompt: int, output: int
) -> None:
    simulation, kv = Simulation(ORDERINGS[name]()), KVLedger(1000, 0, 4)
    for operation, number in operations:
        apply(simulation, operation, number)
        ranked = list(simulation.ordering.ranked(simulation.now))
        fit = [
            request
            for request in ranked
            if not request.progress.planned and any(map(int.__le__, needs(request, kv), (prompt, output)))
        ]
        assert list(fitting(simulation.ordering, lambda: (prompt, output), kv)) == fit
        limits = [prompt, output]
        found = fitting(simulation.ordering, lambda limits=limits: tuple(limits), kv)
        assert list(islice(found, 1)) == fit[:1]
        limits[:] = 0, 0
        assert list(found) == [], "the first took what there was"


@half_of_orderings(1)
@given(operations=OPERATIONS)
def test_the_order_is_stable_between_calls_and_while_it_is_read(
    build: Callable[[], Ordering], operations: list[tuple[str, int]]
) -> None:
    simulation = simulated(build(), operations)
    iterator = simulation.ordering.ranked(simulation.now)
    first = list(islice(iterator, 1))
    before = {request: simulation.ordering.rank(request) for request in simulation.live}
    rest = list(iterator)
    assert {request: simulation.ordering.rank(request) for request in simulation.live} == before
    assert list(simulation.ordering.ranked(simulation.now)) == first + rest


@half_of_orderings(0)
@given(operations=OPERATIONS)
def test_outranks_is_a_strict_order_that_agrees_with_rank(
    build: Callable[[], Ordering], operations: list[tuple[str, int]]
) -> None:
    simulation = simulated(build(), operations)
    ordering = simulation.ordering
    ranked = list(ordering.ranked(simulation.now))
    for (i, one), (j, other) in product(enumerate(ranked), repeat=2):
        if ordering.outranks(one, other):
            assert i < j
            # Requests that rank below `other` are outranked too, and requests above `one` outrank `other`, because
            # the search for victims stops at the first that is not outranked.
            assert all(ordering.outranks(one, worse) for worse in ranked[j:])
            assert all(ordering.outranks(better, other) for better in ranked[: i + 1])


@half_of_orderings(1)
@given(operations=OPERATIONS, number=st.integers(0, 400), drop=st.booleans())
def test_eviction_never_improves_the_rank(
    build: Callable[[], Ordering], operations: list[tuple[str, int]], number: int, drop: bool
) -> None:
    simulation = simulated(build(), operations)
    if not simulation.live:
        return
    list(simulation.ordering.ranked(simulation.now))
    victim = simulation.live[number % len(simulation.live)]
    before = simulation.ordering.rank(victim)
    simulation.evict(victim, drop=drop)
    assert simulation.ordering.rank(victim) >= before


@half_of_orderings(0)
@given(operations=OPERATIONS, chosen=st.integers(0, 2**40), later=st.floats(0, 5))
def test_next_turns_are_sorted_and_neither_they_nor_explanations_have_side_effects(
    build: Callable[[], Ordering], operations: list[tuple[str, int]], chosen: int, later: float
) -> None:
    simulation = simulated(build(), operations)
    asked = [request for number, request in enumerate(simulation.live) if chosen >> number & 1]
    before = {request: simulation.ordering.rank(request) for request in simulation.live}
    turns = simulation.ordering.expected_order(iter(asked), simulation.now + later)
    assert {request.id for _, request in turns} == {request.id for request in asked}
    assert len(turns) == len(asked)
    assert all(not other < one for (one, _), (other, _) in pairwise(turns))
    for request in asked:
        told = told_by(simulation.ordering, request, simulation.now + later)
        assert all(isinstance(value, str) or math.isfinite(value) for value in told.values())
    assert simulation.ordering.expected_order(reversed(asked), simulation.now + later) == turns
    assert {request: simulation.ordering.rank(request) for request in simulation.live} == before


@pytest.mark.parametrize("name", ["fcfs", "fixed key, many equal", "srpt", "prioritized fcfs", "prioritized srpt"])
@given(operations=OPERATIONS)
def test_turns_agree_with_ranks_where_time_does_not_change_them(name: str, operations: list[tuple[str, int]]) -> None:
    simulation = simulated(ORDERINGS[name](), operations)
    ordering = simulation.ordering
    turns = ordering.expected_order(simulation.live, simulation.now)
    assert [request for _, request in turns] == sorted(simulation.live, key=ordering.rank)
    for (one_turn, one), (other_turn, other) in pairwise(turns):
        assert (one_turn < other_turn) == ordering.outranks(one, other)


@cache
def long_queue() -> list[Request]:
    """Return requests that several orderings may share, because nothing runs or changes them."""
    return [
        make(number, 1 + number % 7, 4, arrival=number * 1e-9, priority=number % 2, client=f"client {number % 5}")
        for number in range(10_000)
    ]


@every_ordering
def test_reading_the_first_of_a_long_queue_does_not_read_all(build: Callable[[], Ordering]) -> None:
    ordering = build()
    for request in long_queue():
        ordering.on_arrived(request, 0.0)

    def seconds(most: int | None) -> float:
        start = time.thread_time()
        for _ in islice(ordering.ranked(0.0), most):
            pass
        return time.thread_time() - start

    # On a busy machine the caches are cold in most of the short readings, whose ratio is 1 to 40 and more.
    first = seconds(None)
    assert min(seconds(1) for _ in range(50)) < min(first, seconds(None)) / 20
