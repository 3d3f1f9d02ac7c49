"""The simulated link between the tiers: when moves end, and in which result that is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.step import PAUSE_S, Direction, Move, Slice, StepPlan
from skipjoin.exec.simulated import SimulatedExecutor, SimulatedHandle
from skipjoin.policies.cost import LinearCost
from support.load import make

OUT, IN = Direction.OUT, Direction.IN
# A step takes a second, and so does a block, in each direction.
COST = LinearCost(floor=1.0, prefill_token=0.0, block=1.0)
FAST = LinearCost(floor=1.0, prefill_token=0.0, block=0.02)


def move(direction: Direction, blocks: int, number: int = 0) -> Move:
    """The number tells moves apart."""
    some = tuple(range(number, number + blocks))
    return Move(direction, make(99), some, some, blocks)


def plan(number: int, *overlapped: Move, blocking: tuple[Move, ...] = (), works: bool = True) -> StepPlan:
    work = (Slice(make(number), 0, 4, True, False, ()),) if works else ()
    return StepPlan(number, work, blocking, overlapped)


def landings(handles: list[SimulatedHandle]) -> list[list[Move]]:
    return [list(handle.result().landed) for handle in handles]


def run_steps(executor: SimulatedExecutor, *plans: StepPlan) -> list[SimulatedHandle]:
    """One after the other, each submitted when the one before it is done."""
    handles: list[SimulatedHandle] = []
    for one in plans:
        handles.append(executor.submit(one, handles[-1].ready_at if handles else 0.0))
    return handles


def test_a_move_beside_steps_lands_with_the_first_step_that_ends_after_it() -> None:
    two = move(OUT, 2)
    handles = run_steps(SimulatedExecutor(COST), plan(0, two), plan(1), plan(2))
    assert [handle.ready_at for handle in handles] == [1.0, 2.0, 3.0]
    assert landings(handles) == [[], [two], []]
    assert [handle.result().moving for handle in handles] == [0.0] * 3


def test_the_directions_do_not_wait_for_each_other() -> None:
    out, back = move(OUT, 3), move(IN, 3)
    assert landings(run_steps(SimulatedExecutor(COST), plan(0, out, back), plan(1), plan(2))) == [[], [], [out, back]]


def test_moves_of_one_direction_follow_each_other() -> None:
    first, second, third = (move(IN, 2, number) for number in range(3))
    handles = run_steps(
        SimulatedExecutor(COST), plan(0, first, second), plan(1, third), *(plan(n) for n in range(2, 6))
    )
    assert landings(handles) == [[], [first], [], [second], [], [third]]


def test_what_ends_together_is_told_in_the_order_in_which_it_ended() -> None:
    """Before moves first; of the others the shorter one, though it began later."""
    long, short, forced = move(OUT, 3), move(IN, 1), move(OUT, 4)
    handles = run_steps(SimulatedExecutor(COST), plan(0, long, short), *(plan(number) for number in (1, 2)))
    assert landings(handles) == [[short], [], [long]]
    handles = [SimulatedExecutor(COST).submit(plan(0, long, short, blocking=(forced,)), 0.0)]
    assert landings(handles) == [[forced, short]]
    executor = SimulatedExecutor(COST)
    executor.submit(plan(0, long, short, works=False), 0.0)
    assert landings([executor.submit(plan(1, blocking=(forced,)), 3.5)]) == [[forced, short, long]]


def test_moves_before_a_step_go_first_and_hold_up_those_beside() -> None:
    """The link is theirs while the step stands still."""
    out, back, later, forced = move(OUT, 3), move(IN, 2), move(IN, 1), move(OUT, 3)
    executor = SimulatedExecutor(COST)
    handles = run_steps(executor, plan(0, out, back), plan(1, later, blocking=(forced,)), plan(2), plan(3))
    # After one second the forced move takes three, and the step its own: of the others, one second is left for the
    # second block on its way in, then come the third one on its way out and the one that began last.
    assert (handles[1].ready_at, handles[1].result().seconds, handles[1].result().moving) == (5.0, 4.0, 3.0)
    assert landings(handles) == [[], [forced, back], [out, later], []]


def test_moves_overlapped_a_step_begin_once_its_own_before_moves_are_done() -> None:
    forced, overlapped = move(OUT, 3), move(IN, 2)
    handles = run_steps(SimulatedExecutor(COST), plan(0, overlapped, blocking=(forced,)), plan(1))
    assert [handle.ready_at for handle in handles] == [4.0, 5.0]
    assert landings(handles) == [[forced], [overlapped]]


def test_a_plan_that_only_waits_ends_with_the_first_landing() -> None:
    executor = SimulatedExecutor(LinearCost(floor=1.0, prefill_token=0.0, block=0.001))
    soon, late = move(OUT, 2), move(IN, 3)
    handle = executor.submit(plan(0, soon, late, works=False), 10.0)
    assert handle.ready_at == pytest.approx(10.002)
    assert landings([handle]) == [[soon]]
    assert (handle.result().seconds, handle.result().tokens) == (0.0, ())
    handle = executor.submit(plan(1, works=False), 10.002)
    assert handle.ready_at == pytest.approx(10.003)
    assert landings([handle]) == [[late]]


def test_a_plan_that_only_waits_lasts_a_moment_at_most() -> None:
    executor = SimulatedExecutor(COST)
    executor.submit(plan(0, move(OUT, 1), works=False), 0.0)
    now, waits = PAUSE_S, 0
    while not (handle := executor.submit(plan(1, works=False), now)).result().landed:
        assert handle.ready_at == pytest.approx(now + PAUSE_S)
        now, waits = handle.ready_at, waits + 1
    assert handle.ready_at == pytest.approx(1.0)
    assert waits > 100


def test_a_plan_that_only_waits_overtakes_nobody() -> None:
    executor = SimulatedExecutor(COST, stages=2)
    working, waiting = executor.submit(plan(0), 0.0), executor.submit(plan(1, move(OUT, 1), works=False), 0.0)
    assert waiting.ready_at >= working.ready_at == 1.0


def test_what_fails_is_told_apart_in_its_order() -> None:
    moves = [move(OUT, 1, number) for number in range(4)]
    executor = SimulatedExecutor(COST, fails=lambda one: one.source[0] % 2 == 1)
    result = executor.submit(plan(0, blocking=tuple(moves)), 0.0).result()
    assert (result.landed, result.failed) == ([moves[0], moves[2]], [moves[1], moves[3]])
    assert result.seconds == 5.0, "to fail takes as long"


def test_stages_share_the_blocks_and_the_last_one_is_later() -> None:
    """Each of two stages moves half of every block, in half a second each; the second begins when it gets the plan."""
    executor = SimulatedExecutor(COST, stages=2)
    two = move(OUT, 2)
    handles = [executor.submit(plan(0, two), 0.0), executor.submit(plan(1), 0.0), executor.submit(plan(2), 0.0)]
    # The first stage has its half by 1.0, the second by 1.5, with the end of the second plan.
    assert [handle.ready_at for handle in handles] == [1.0, 1.5, 2.0]
    assert landings(handles) == [[], [two], []]


MOVES = st.lists(st.builds(move, st.sampled_from([OUT, IN]), st.integers(1, 9), st.integers(0, 99)), max_size=3)


@given(
    steps=st.lists(st.tuples(MOVES, MOVES, st.booleans(), st.sampled_from([0.0, 0.3, 7.0])), max_size=10),
    stages=st.integers(1, 4),
    share=st.sampled_from([0, 2, 3]),
)
def test_every_move_ends_once_and_no_sooner_than_the_link_is_through_with_it(
    steps: list[tuple[list[Move], list[Move], bool, float]], stages: int, share: int
) -> None:
    def fails(one: Move) -> bool:
        return share > 0 and len(one.source) % share == 0

    executor = SimulatedExecutor(FAST, stages=stages, fails=fails)
    now, begun, ended, busy = 0.0, [], [], {OUT: 0.0, IN: 0.0}
    for number, (blocking, overlapped, works, gap) in enumerate(steps):
        now += gap
        result_of = executor.submit(plan(number, *overlapped, blocking=tuple(blocking), works=works), now)
        result = result_of.result()
        assert [one for one in result.landed if fails(one)] == [one for one in result.failed if not fails(one)] == []
        own = [*result.landed, *result.failed]
        assert all(any(one is other for other in own) for one in blocking), "a blocking move is in its own result"
        begun += [*blocking, *overlapped]
        ended += own
        for one in (*blocking, *overlapped):
            busy[one.direction] += FAST.block * len(one.source) / stages
        now = max(now, result_of.ready_at)
    for number in range(5000):
        if len(ended) == len(begun):
            break
        result_of = executor.submit(plan(100 + number, works=False), now)
        ended += [*result_of.result().landed, *result_of.result().failed]
        now = max(now, result_of.ready_at)
    else:
        raise AssertionError("a move never ends")
    assert sorted(map(id, ended)) == sorted(map(id, begun))
    assert now >= max(busy.values()) - 1e-9
