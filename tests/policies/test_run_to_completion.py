"""Static batches: who joins one, when the next one begins, and that none lasts for ever."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipjoin.core.events import Event, Finished, Planned
from skipjoin.core.policy import (
    HELD,
    NEWCOMERS_HELD,
    PROMPT_DOES_NOT_FIT,
    AdmissionPolicy,
    EvictionPolicy,
    Ordering,
    Policies,
    Refusal,
)
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.scheduling.context import StepContext
from skipjoin.policies.admission import OnDemand, WholeMaximum
from skipjoin.policies.batching import RunToCompletion
from skipjoin.policies.eviction import Recompute
from skipjoin.policies.mlfq import SkipJoinMlfq
from skipjoin.policies.ordering import Fcfs, Prioritized
from support.load import load, make
from support.policies import COST, EVICTIONS, Ranks, UnitCost
from support.watch import Run, Stepper, World, run

PIPELINES = [(1, False), (2, False), (2, True), (3, False)]
ORDERINGS: dict[str, Callable[[], Ordering]] = {
    "fcfs": Fcfs,
    "mlfq": lambda: SkipJoinMlfq(COST, starvation_s=0.3),
}


def static(
    max_seqs: int = 6,
    max_tokens: int = 64,
    *,
    ordering: Callable[[], Ordering] = Fcfs,
    admission: AdmissionPolicy | None = None,
    eviction: EvictionPolicy | None = None,
) -> Policies:
    return Policies(
        Prioritized(ordering),
        RunToCompletion(max_seqs, max_tokens),
        admission or WholeMaximum(),
        eviction or Recompute(),
    )


def stepper(policies: Policies, **world: int) -> Stepper:
    return Stepper(World(**world).core(policies))


def ran(stepper: Stepper) -> list[int]:
    """One plan, and whose slices it has."""
    return [piece.request.id for piece in stepper.step().slices]


def verdicts(batcher: RunToCompletion, *requests: Request) -> list[int | Refusal]:
    """One step that is offered these requests, with memory for all."""
    packing, answers = batcher.open(StepContext()), []
    for request in requests:
        answers.append(answer := packing.offer(request, request.pending))
        if isinstance(answer, int):
            packing.take(request, answer)
            request.planned += answer
    return answers


def table(done: Run) -> list[tuple[float, dict[int, int]]]:
    """When each step begins, and how many tokens of whom it computes."""
    return [(now, {piece[0]: piece[2] for piece in plan[1]}) for now, plan in done.trace]


# -- who joins ----------------------------------------------------------------------------------------------------


def test_the_next_batch_begins_when_the_longest_member_has_ended() -> None:
    """A second per token. The third request joins one step late, for want of prompt tokens; the fourth arrives while
    the others run, and waits for the longest although the first and the second have long left their slots."""
    world = World(cost=UnitCost())
    requests = [make(0, 3, 4), make(1, 2, 2), make(2, 4, 5), make(3, 2, 2, arrival=12.0)]
    done = run(world, requests, core=world.core(static(3, 5)))
    assert table(done) == [
        (0.0, {0: 3, 1: 2}),
        (5.0, {0: 1, 1: 1, 2: 4}),
        (11.0, {0: 1, 2: 1}),
        (13.0, {0: 1, 2: 1}),
        (15.0, {2: 1}),
        (16.0, {2: 1}),
        (17.0, {3: 2}),
        (19.0, {3: 1}),
    ]


def test_who_arrives_while_the_batch_recruits_joins_it() -> None:
    world = World(cost=UnitCost())
    requests = [make(0, 3, 5), make(1, 3, 4, arrival=2.0), make(2, 3, 2, arrival=8.0)]
    done = run(world, requests, core=world.core(static(3, 5)))
    assert table(done) == [
        (0.0, {0: 3}),
        (3.0, {0: 1, 1: 3}),
        (7.0, {0: 1, 1: 1}),  # nobody waits: the batch is complete
        (9.0, {0: 1, 1: 1}),
        (11.0, {0: 1, 1: 1}),
        (13.0, {2: 3}),
        (16.0, {2: 1}),
    ]


def test_a_prompt_longer_than_a_step_is_the_only_one_of_its_step() -> None:
    one = stepper(static(4, 5))
    one.add(make(0, 3, 9), make(1, 8, 9), make(2, 2, 9))
    assert [ran(one) for _ in range(4)] == [[0], [0, 1], [0, 1, 2], [0, 1, 2]]


def test_the_last_slot_ends_recruiting_though_somebody_leaves_at_once() -> None:
    one = stepper(static(2))
    one.add(make(0, 4, 1), make(1, 4, 3), make(2, 4, 1), make(3, 4, 2), make(4, 4, 1))
    assert [ran(one) for _ in range(6)] == [[0, 1], [1], [1], [2, 3], [3], [4]]
    one.core.assert_all_free()


def test_a_batch_takes_whom_memory_has_room_for() -> None:
    """Ten blocks of four tokens; each of the first two takes four for good."""
    one = stepper(static(), device_blocks=10)
    one.add(make(0, 13, 3), make(1, 13, 2), make(2, 13, 3))
    assert [ran(one) for _ in range(4)] == [[0, 1], [0, 1], [0], [2]]


def test_a_more_important_request_waits_for_the_batch_and_leads_the_next_one() -> None:
    one = stepper(static(2))
    one.add(make(0, 4, 3), make(1, 4, 3, priority=1), make(2, 4, 1, priority=1))
    assert ran(one) == [0, 1]
    one.add(make(3, 4, 1, priority=-1))
    assert [ran(one) for _ in range(3)] == [[0, 1], [0, 1], [3, 2]]


# -- how a batch ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_the_abort_of_the_longest_member_lets_the_next_batch_begin(depth: int) -> None:
    one = stepper(static(2), depth=depth)
    one.add(make(0, 4, 40), make(1, 4, 2), make(2, 4, 1))
    assert [ran(one) for _ in range(3)] == [[0, 1], [0, 1], [0]]
    one.core.abort(0, one.now)
    assert ran(one) == [2]
    one.core.assert_all_free()


def test_the_abort_of_a_member_in_flight_ends_the_batch_before_its_plan_commits() -> None:
    one = stepper(static(1), depth=2)
    one.add(make(0, 4, 40), make(1, 4, 1))
    assert one.start() is not None
    assert one.start() is None
    one.core.abort(0, one.now)
    plan = one.start()
    assert plan is not None
    assert [piece.request.id for piece in plan.slices] == [1]
    one.drain()


def test_a_stop_that_ends_all_members_at_once_begins_the_next_batch() -> None:
    one = stepper(static(2), depth=2)
    one.add(*(make(number, 4, 9, stop_tokens=frozenset({4})) for number in range(4)))
    assert [ran(one), ran(one)] == [[0, 1], [2, 3]]
    one.core.assert_all_free()


def test_asking_for_a_step_when_nobody_can_run_does_not_end_recruiting() -> None:
    """Pipeline stages: while the only member is in flight, there is room for a plan but nobody to run."""
    one = stepper(static(2), depth=2)
    one.add(make(0, 4, 3))
    assert one.start() is not None
    assert [one.start() for _ in range(3)] == [None] * 3
    one.add(make(1, 4, 2))
    plan = one.start()
    assert plan is not None
    assert [piece.request.id for piece in plan.slices] == [1]
    one.finish()
    one.add(make(2, 4, 1))
    assert [ran(one) for _ in range(3)] == [[0], [1], [0]]
    assert one.start() is None
    one.finish()
    assert ran(one) == [2]
    one.drain()


# -- members that lose their memory -------------------------------------------------------------------------------


def test_a_member_whose_memory_is_taken_stays_a_member() -> None:
    """Ten blocks of four tokens: the first request grows into the second one's blocks. It waits, comes back before
    anybody new, more important ones included, and nobody joins while it is away."""
    one = stepper(static(3, admission=OnDemand(0.0)), device_blocks=10)
    first, second = make(0, 20, 12), make(1, 20, 6)
    one.add(first, second)
    assert [ran(one), ran(one)] == [[0, 1], [0]]
    assert (second.evictions, second.planned) == (1, 0)
    one.add(make(2, 4, 1, priority=-1), make(3, 4, 1))
    while first.finish_reason is None:
        assert ran(one) == [0]
    while second.finish_reason is None:
        assert ran(one) == [1]
    assert ran(one) == [2, 3]
    one.core.assert_all_free()


@pytest.mark.parametrize("waits", [True, False])
def test_a_prompt_computed_again_ends_recruiting_unless_it_keeps_a_newcomer_out(waits: bool) -> None:
    batcher = RunToCompletion(4, 10)
    first, second, third = make(0, 4), make(1, 6), make(2, 5)
    assert verdicts(batcher, first, second) == [4, 6]
    first.known, second.planned = 5, 0
    if waits:
        assert verdicts(batcher, first, second, third) == [1, 6, PROMPT_DOES_NOT_FIT]
    else:
        assert verdicts(batcher, first, second) == [1, 6]
    first.known, second.known = 6, 7
    assert verdicts(batcher, first, second, third) == [1, 1, 5 if waits else NEWCOMERS_HELD]


# -- what the queue costs -----------------------------------------------------------------------------------------


def test_newcomers_close_the_step_unless_a_member_without_memory_may_come_behind_them() -> None:
    batcher = RunToCompletion(2, 64)
    first, second, third, fourth = (make(number, 4) for number in range(4))
    assert verdicts(batcher, first, second) == [4, 4]
    assert verdicts(batcher, third) == [NEWCOMERS_HELD]  # the members are in flight, and hold their memory
    second.planned = 0
    assert verdicts(batcher, third, second, fourth) == [HELD, 4, NEWCOMERS_HELD]


def test_a_closed_batch_does_not_read_the_queue() -> None:
    ordering = Ranks({number: number for number in range(500)})
    one = stepper(Policies(ordering, RunToCompletion(3, 64), WholeMaximum(), Recompute()), device_blocks=1000)
    one.add(*(make(number, 2, 5) for number in range(500)))
    ran(one)
    ordering.read = 0
    assert ran(one) == [0, 1, 2]
    assert ordering.read == 4


def test_requests_are_let_go_at_the_step_after_their_end() -> None:
    one = stepper(static(2))
    requests = [make(0, 4, 1), make(1, 4, 3)]
    gone = weakref.ref(requests[0])
    one.add(*requests)
    del requests
    ran(one)
    batcher = one.core.scheduler.policies.batcher
    for held in (one.events, one.core.trace, one.core.scheduler._recent):
        held.clear()
    batcher.open(StepContext(now=one.now))
    gc.collect()
    assert gone() is None


# -- any load -----------------------------------------------------------------------------------------------------


def assert_static(events: list[Event], max_seqs: int) -> None:
    """Follow the batches through the events: none exceeds its slots, and once it has run a step of decodes only, or
    has filled its slots, nobody joins before all members have ended."""
    members: set[Request] = set()
    closed = False
    for event in events:
        if isinstance(event, Finished):
            members.discard(event.request)
            closed = closed and bool(members)
        elif isinstance(event, Planned) and event.plan.slices:
            new = {piece.request for piece in event.plan.slices} - members
            assert not (closed and new), f"{[request.id for request in new]} joined at {event.now}"
            members |= new
            assert len(members) <= max_seqs
            decodes = all(piece.tokens == 1 for piece in event.plan.slices)
            closed = closed or len(members) == max_seqs or (decodes and not new)


@given(
    ordering=st.sampled_from(sorted(ORDERINGS)),
    eviction=st.sampled_from(sorted(EVICTIONS)),
    admission=st.sampled_from([OnDemand(), WholeMaximum()]),
    pipeline=st.sampled_from(PIPELINES),
    seed=st.integers(0, 10**6),
    device_blocks=st.integers(25, 70),  # the largest request of the load has 100 tokens, 25 blocks
    max_seqs=st.integers(1, 10),
    max_tokens=st.integers(1, 80),
)
@settings(max_examples=60)
def test_any_load_is_served_in_static_batches(
    *,
    ordering: str,
    eviction: str,
    admission: AdmissionPolicy,
    pipeline: tuple[int, bool],
    seed: int,
    device_blocks: int,
    max_seqs: int,
    max_tokens: int,
) -> None:
    depth, overlap = pipeline
    world = World(depth=depth, overlap=overlap, device_blocks=device_blocks)
    policies = static(
        max_seqs,
        max_tokens,
        ordering=ORDERINGS[ordering],
        admission=admission,
        eviction=EVICTIONS[eviction](),
    )
    done = run(world, load(seed, 14, priorities=(0, seed % 3)), core=world.core(policies))
    assert all(request.finish_reason is FinishReason.LENGTH for request in done.requests)
    assert all(len(request.output) == request.max_tokens for request in done.requests)
    assert_static(done.events, max_seqs)


@pytest.mark.parametrize("eviction", sorted(EVICTIONS))
def test_aborts_never_hold_up_the_others(eviction: str) -> None:
    """Somebody is aborted after every other step, whatever state it is in."""
    one = Stepper(World(depth=2).core(static(admission=OnDemand(), eviction=EVICTIONS[eviction]())))
    requests = load(3, 40)
    one.add(*requests)
    for number in range(0, 40, 2):
        while one.start() is not None:
            pass
        one.finish()
        one.core.abort(number, one.now)
    one.drain()
    ended = [request.finish_reason for request in requests]
    assert ended.count(FinishReason.ABORT) >= 15
    assert set(ended) == {FinishReason.ABORT, FinishReason.LENGTH}
    assert_static(one.events, 6)
