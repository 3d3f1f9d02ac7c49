from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.step import PAUSE_S, Direction, Move, Slice, StepPlan
from skipjoin.exec.simulated import SimulatedExecutor, SimulatedHandle
from skipjoin.policies.cost import LinearCost
from support.load import make

OUT, IN = Direction.OUT, Direction.IN
# A step takes a second, and so does a block in either direction.
COST = LinearCost(floor=1.0, prefill_token=0.0, block=1.0)
FAST = LinearCost(floor=1.0, prefill_token=0.0, block=0.02)


def move(direction: Direction, blocks: int, number: int = 0) -> Move:
    ids = tuple(range(number, number + blocks))
    return Move(direction, make(99), ids, ids, blocks)


def plan(number: int, *overlapped: Move, blocking: tuple[Move, ...] = (), works: bool = True) -> StepPlan:
    work = (Slice(make(number), 0, 4, True, False, ()),) if works else ()
    return StepPlan(number, work, blocking, overlapped)


def landings(handles: list[SimulatedHandle]) -> list[list[Move]]:
    return [list(handle.result().completed) for handle in handles]


def run_steps(executor: SimulatedExecutor, *plans: StepPlan) -> list[SimulatedHandle]:
    handles: list[SimulatedHandle] = []
    for plan in plans:
        handles.append(executor.submit(plan, handles[-1].ready_at if handles else 0.0))
    return handles


def test_an_overlapped_move_completes_with_the_first_step_that_ends_after_it() -> None:
    two = move(OUT, 2)
    handles = run_steps(SimulatedExecutor(COST), plan(0, two), plan(1), plan(2))
    assert [handle.ready_at for handle in handles] == [1.0, 2.0, 3.0]
    assert landings(handles) == [[], [two], []]
    assert [handle.result().moving for handle in handles] == [0.0] * 3


def test_the_two_directions_are_independent() -> None:
    out, back = move(OUT, 3), move(IN, 3)
    assert landings(run_steps(SimulatedExecutor(COST), plan(0, out, back), plan(1), plan(2))) == [[], [], [out, back]]


def test_moves_of_one_direction_are_serialized() -> None:
    first, second, third = (move(IN, 2, number) for number in range(3))
    handles = run_steps(
        SimulatedExecutor(COST), plan(0, first, second), plan(1, third), *(plan(n) for n in range(2, 6))
    )
    assert landings(handles) == [[], [first], [], [second], [], [third]]


def test_moves_that_finish_in_one_step_are_reported_in_order() -> None:
    """Blocking moves come first, then the shorter of the others although it began later."""
    long, short, blocking = move(OUT, 3), move(IN, 1), move(OUT, 4)
    handles = run_steps(SimulatedExecutor(COST), plan(0, long, short), *(plan(number) for number in (1, 2)))
    assert landings(handles) == [[short], [], [long]]
    handles = [SimulatedExecutor(COST).submit(plan(0, long, short, blocking=(blocking,)), 0.0)]
    assert landings(handles) == [[blocking, short]]
    executor = SimulatedExecutor(COST)
    executor.submit(plan(0, long, short, works=False), 0.0)
    assert landings([executor.submit(plan(1, blocking=(blocking,)), 3.5)]) == [[blocking, short, long]]


def test_blocking_moves_delay_overlapped_ones() -> None:
    """They have the link to themselves while the step waits."""
    out, back, later, blocking = move(OUT, 3), move(IN, 2), move(IN, 1), move(OUT, 3)
    executor = SimulatedExecutor(COST)
    handles = run_steps(executor, plan(0, out, back), plan(1, later, blocking=(blocking,)), plan(2), plan(3))
    # After one second the blocking move takes three seconds and the step one. In that second the second block moves in;
    # the third block out and the last move in follow.
    assert (handles[1].ready_at, handles[1].result().seconds, handles[1].result().moving) == (5.0, 4.0, 3.0)
    assert landings(handles) == [[], [blocking, back], [out, later], []]


def test_overlapped_moves_begin_after_the_blocking_moves_of_the_step() -> None:
    blocking, overlapped = move(OUT, 3), move(IN, 2)
    handles = run_steps(SimulatedExecutor(COST), plan(0, overlapped, blocking=(blocking,)), plan(1))
    assert [handle.ready_at for handle in handles] == [4.0, 5.0]
    assert landings(handles) == [[blocking], [overlapped]]


def test_a_plan_that_only_waits_ends_with_the_first_completing() -> None:
    executor = SimulatedExecutor(LinearCost(floor=1.0, prefill_token=0.0, block=0.001))
    soon, late = move(OUT, 2), move(IN, 3)
    handle = executor.submit(plan(0, soon, late, works=False), 10.0)
    assert handle.ready_at == pytest.approx(10.002)
    assert landings([handle]) == [[soon]]
    assert (handle.result().seconds, handle.result().tokens) == (0.0, ())
    handle = executor.submit(plan(1, works=False), 10.002)
    assert handle.ready_at == pytest.approx(10.003)
    assert landings([handle]) == [[late]]


def test_a_plan_that_only_waits_ends_after_the_pause() -> None:
    executor = SimulatedExecutor(COST)
    executor.submit(plan(0, move(OUT, 1), works=False), 0.0)
    now, waits = PAUSE_S, 0
    while not (handle := executor.submit(plan(1, works=False), now)).result().completed:
        assert handle.ready_at == pytest.approx(now + PAUSE_S)
        now, waits = handle.ready_at, waits + 1
    assert handle.ready_at == pytest.approx(1.0)
    assert waits > 100


def test_a_plan_that_only_waits_does_not_overtake_a_step() -> None:
    executor = SimulatedExecutor(COST, stages=2)
    working, waiting = executor.submit(plan(0), 0.0), executor.submit(plan(1, move(OUT, 1), works=False), 0.0)
    assert waiting.ready_at >= working.ready_at == 1.0


def test_failed_moves_are_reported_separately_in_order() -> None:
    moves = [move(OUT, 1, number) for number in range(4)]
    executor = SimulatedExecutor(COST, fails=lambda moved: moved.source[0] % 2 == 1)
    result = executor.submit(plan(0, blocking=tuple(moves)), 0.0).result()
    assert (result.completed, result.failed) == ([moves[0], moves[2]], [moves[1], moves[3]])
    assert result.seconds == 5.0, "failed moves take as long"


def test_each_stage_moves_its_share_of_a_block() -> None:
    """Each of two stages moves half of every block in half a second; the second begins when it receives the plan."""
    executor = SimulatedExecutor(COST, stages=2)
    two = move(OUT, 2)
    handles = [executor.submit(plan(0, two), 0.0), executor.submit(plan(1), 0.0), executor.submit(plan(2), 0.0)]
    # The first stage finishes its half at 1.0, the second at 1.5 with the end of the second plan.
    assert [handle.ready_at for handle in handles] == [1.0, 1.5, 2.0]
    assert landings(handles) == [[], [two], []]


MOVES = st.lists(st.builds(move, st.sampled_from([OUT, IN]), st.integers(1, 9), st.integers(0, 99)), max_size=3)


@given(
    steps=st.lists(st.tuples(MOVES, MOVES, st.booleans(), st.sampled_from([0.0, 0.3, 7.0])), max_size=10),
    stages=st.integers(1, 4),
    share=st.sampled_from([0, 2, 3]),
)
def test_every_move_finishes_once_and_no_earlier_than_the_link_allows(
    steps: list[tuple[list[Move], list[Move], bool, float]], stages: int, share: int
) -> None:
    def fails(one: Move) -> bool:
        return share > 0 and len(one.source) % share == 0

    executor = SimulatedExecutor(FAST, stages=stages, fails=fails)
    now, started, finished, busy = 0.0, [], [], {OUT: 0.0, IN: 0.0}
    for number, (blocking, overlapped, works, gap) in enumerate(steps):
        now += gap
        result_of = executor.submit(plan(number, *overlapped, blocking=tuple(blocking), works=works), now)
        result = result_of.result()
        assert (
            [moved for moved in result.completed if fails(moved)]
            == [moved for moved in result.failed if not fails(moved)]
            == []
        )
        own = [*result.completed, *result.failed]
        assert all(any(moved is other for other in own) for moved in blocking), "a blocking move is in its own result"
        started += [*blocking, *overlapped]
        finished += own
        for moved in (*blocking, *overlapped):
            busy[moved.direction] += FAST.block * len(moved.source) / stages
        now = max(now, result_of.ready_at)
    for number in range(5000):
        if len(finished) == len(started):
            break
        result_of = executor.submit(plan(100 + number, works=False), now)
        finished += [*result_of.result().completed, *result_of.result().failed]
        now = max(now, result_of.ready_at)
    else:
        raise AssertionError("a move never ends")
    assert sorted(map(id, finished)) == sorted(map(id, started))
    assert now >= max(busy.values()) - 1e-9
