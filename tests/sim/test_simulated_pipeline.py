from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.events import Event, Finished, Preempted, Preemption
from skipjoin.core.request import Request
from skipjoin.core.step import PAUSE_S, Direction, Move, Slice, StageTime, StepPlan
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.policies.cost import LinearCost
from skipjoin.sim.driver import Replica, simulate
from support.load import load, make
from support.policies import UnitCost
from support.watch import Run, World
from support.worlds import checkered

COST = LinearCost(floor=1.0, prefill_token=0.5, block=0.25)


def plan(number: int, tokens: int = 0, *, blocking: int = 0, overlapped: int = 0) -> StepPlan:
    def moves(count: int) -> tuple[Move, ...]:
        ids = tuple(range(count))
        return (Move(Direction.OUT, make(99), ids, ids, count),) if count else ()

    slices = (Slice(make(number), 0, tokens, True, False, ()),) if tokens else ()
    return StepPlan(number, slices, moves(blocking), moves(overlapped))


def run_in_stages(world: World, stages: int, requests: list[Request]) -> Run:
    core = world.core()
    events: list[Event] = []
    executor = SimulatedExecutor(world.cost, stages=stages)
    end = simulate(Replica(core, executor), requests, on_events=events.extend)
    core.assert_all_free()
    return Run(core, requests, end, events)


def test_consecutive_plans_are_one_stage_apart() -> None:
    executor = SimulatedExecutor(COST, stages=2)
    handles = [executor.submit(plan(number, 6), 0.0) for number in range(3)]
    assert [handle.ready_at for handle in handles] == [4.0, 6.0, 8.0]
    assert [handle.result().seconds for handle in handles] == [4.0] * 3


def test_plans_of_unequal_length_wait_or_leave_a_bubble() -> None:
    executor = SimulatedExecutor(COST, stages=2)
    long, short, late = (executor.submit(plan(*arguments), 0.0) for arguments in ((0, 14), (1, 2), (2, 14)))
    # The first stage runs the plans in [0, 4), [4, 5) and [5, 9), the second in [4, 8), [8, 9) and [9, 13).
    assert (long.ready_at, short.ready_at, late.ready_at) == (8.0, 9.0, 13.0)


def test_blocking_moves_delay_each_stage_by_its_share() -> None:
    executor = SimulatedExecutor(COST, stages=2)
    first, second = executor.submit(plan(0, 6), 0.0), executor.submit(plan(1, 6, blocking=8), 0.0)
    # Each stage has half of the 2 s of moves and half of the 4 s of work.
    assert (first.ready_at, second.ready_at) == (4.0, 8.0)
    assert (second.result().seconds, second.result().moving) == (6.0, 2.0)
    overlapped = executor.submit(plan(2, 6, overlapped=8), 100.0)
    assert (overlapped.ready_at, overlapped.result().moving) == (104.0, 0.0)


PLANS = st.lists(
    st.builds(
        lambda gap, tokens, blocking, overlapped: (gap, plan(0, tokens, blocking=blocking, overlapped=overlapped)),
        st.sampled_from([0.0, 0.5, 10.0]),
        st.integers(0, 20),
        st.integers(0, 10),
        st.integers(0, 10),
    ),
    max_size=12,
)


@given(plans=PLANS, stages=st.integers(1, 5))
def test_plans_stay_in_order_and_never_share_a_stage(plans: list[tuple[float, StepPlan]], stages: int) -> None:
    staged, serial = SimulatedExecutor(COST, stages=stages), SimulatedExecutor(COST)
    now, last_ready, busy = 0.0, 0.0, 0.0
    for gap, one in plans:
        now += gap
        handle, alone = staged.submit(one, now), serial.submit(one, now)
        result = handle.result()
        seconds = result.seconds
        busy = max(busy, now) + seconds
        # A plan with only overlapped moves waits for them for a short pause.
        pause = 0.0 if one.slices or one.blocking else PAUSE_S
        assert busy <= alone.ready_at <= busy + pause
        assert replace(alone.result(), completed=()) == replace(result, completed=(), stages=())
        assert sum(stage.busy for stage in result.stages) == pytest.approx(seconds if stages > 1 else 0.0)
        assert handle.ready_at >= max(now + seconds, last_ready + seconds / stages) - 1e-9
        assert handle.ready_at <= alone.ready_at + pause + 1e-9
        last_ready = handle.ready_at


@given(seconds=st.integers(1, 30), count=st.integers(1, 20), stages=st.integers(1, 5))
def test_equal_plans_fill_the_pipeline(seconds: int, count: int, stages: int) -> None:
    executor = SimulatedExecutor(UnitCost(), stages=stages)
    ends = [executor.submit(plan(number, seconds), 0.0).ready_at for number in range(count)]
    assert ends == pytest.approx([seconds * (stages + number) / stages for number in range(count)])


def test_each_stage_serves_a_batch() -> None:
    """There are two requests in batches of one. Each step takes as long as without stages, but two are in flight."""
    world = World("fcfs", cost=UnitCost(), max_seqs=1)
    alone = run_in_stages(world, 1, [make(0, 4, 5), make(1, 4, 5)])
    together = run_in_stages(replace(world, depth=2), 2, [make(0, 4, 5), make(1, 4, 5)])
    assert (alone.end, together.end) == (16.0, 10.0)
    assert together.output == alone.output
    assert not [event for event in together.events if isinstance(event, Preempted)]


@pytest.mark.parametrize(("recipe", "stages"), checkered(["fcfs", "fastserve"], [2, 3, 4]))
def test_every_request_finishes_with_any_number_of_stages(recipe: str, stages: int) -> None:
    """Memory is short, so KV is dropped and recomputed."""
    world = World(recipe, depth=stages)
    done = run_in_stages(world, stages, load(stages, 40))
    assert sum(isinstance(event, Finished) for event in done.events) == 40
    assert any(isinstance(event, Preempted) and event.how is Preemption.DROP for event in done.events)
    assert done.output == run_in_stages(World(recipe), 1, load(stages, 40)).output


def test_stages_report_busy_and_idle_time() -> None:
    executor = SimulatedExecutor(COST, stages=2)
    results = [executor.submit(plan(*arguments), 3.0).result() for arguments in ((0, 14), (1, 2), (2, 14))]
    # As above, but the pipeline begins at 3.
    assert [list(result.stages) for result in results] == [
        [StageTime(4.0, 0.0), StageTime(4.0, 0.0)],
        [StageTime(1.0, 0.0), StageTime(1.0, 0.0)],
        [StageTime(4.0, 0.0), StageTime(4.0, 0.0)],
    ]
    late = executor.submit(plan(3, 2, blocking=8), 20.0)
    # The previous plans ended at 12 and 16. Each stage has half of the 2 s of moves and of the 2 s of work.
    assert list(late.result().stages) == [StageTime(2.0, 8.0), StageTime(2.0, 6.0)]
    assert SimulatedExecutor(COST).submit(plan(0, 6), 0.0).result().stages == ()


def test_unequal_stages_wait_for_the_longest() -> None:
    executor = SimulatedExecutor(COST, stages=(3.0, 1.0))
    handles = [executor.submit(plan(number, 6), 0.0) for number in range(3)]
    assert [handle.ready_at for handle in handles] == [4.0, 7.0, 10.0]
    assert [list(handle.result().stages) for handle in handles] == [
        [StageTime(3.0, 0.0), StageTime(1.0, 0.0)],
        [StageTime(3.0, 0.0), StageTime(1.0, 2.0)],
        [StageTime(3.0, 0.0), StageTime(1.0, 2.0)],
    ]
    # Every stage has the same share of a block, as all have equally many layers.
    assert executor.submit(plan(3, 0, blocking=8), 100.0).result().stages == (
        StageTime(1.0, 91.0),
        StageTime(1.0, 91.0),
    )


@pytest.mark.parametrize(
    ("stages", "message"), [(0, "stages must be at least 1, got 0"), ((), "shares above 0"), ((1.0, 0.0), "above 0")]
)
def test_stages_below_one_are_refused(stages: int | tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulatedExecutor(COST, stages=stages)
