from __future__ import annotations

import pytest

from skipjoin.core.events import Event, Moved, MoveFailed, Preempted, Preemption
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move, StepResult
from support.load import make
from support.policies import OnCall
from support.watch import Scene

OUT, IN = Direction.OUT, Direction.IN


class OnCallOverlapped(OnCall):
    def returns_overlapped(self, request: Request) -> bool:
        return True


class Swaps(Scene):
    """A scene with evictions that a test sets. Prompts have 8 tokens: two blocks of four."""

    def __init__(
        self,
        numbers: dict[int, int],
        *,
        blocks: int = 20,
        cpu: int = 20,
        depth: int = 1,
        eviction: OnCall | None = None,
    ) -> None:
        self.eviction = eviction or OnCall()
        super().__init__(numbers, blocks=blocks, cpu=cpu, eviction=self.eviction, depth=depth)

    def request(self, number: int, max_tokens: int = 20, prompt: int = 8) -> Request:
        request = make(number, prompt, max_tokens)
        self.add(request)
        return request

    def swap_out(self, request: Request) -> None:
        """Swap the request out during one step, with the move completing at its end."""
        self.eviction.out = [request]
        plan = self.step()
        assert [move.request for move in plan.overlapped] == [request]
        held = self.kv.blocks_of(request)
        assert held.cpu
        assert not held.device

    def story(self, request: Request) -> list[Event]:
        """Return what happened to the request's KV, oldest first."""
        kinds = Preempted | Moved | MoveFailed
        events = [event for event in self.events if isinstance(event, kinds)]
        return [e for e in events if (e.request if isinstance(e, Preempted) else e.move.request) is request]


def always(move: Move) -> bool:
    return True


def test_other_requests_run_during_a_move_and_its_blocks_stay_pinned() -> None:
    scene = Swaps({0: 1, 1: 2, 2: 3}, blocks=7)
    first, second = scene.request(0), scene.request(1)
    assert scene.ran() == [0, 1]
    scene.late = 3
    scene.eviction.out = [second]
    scene.request(2, prompt=5)
    for _ in range(3):  # three of the seven blocks are free, and request 0 takes one of them
        assert scene.ran() == [0, 2]
        assert (scene.kv.device_free, scene.kv.is_moving) == (0, True)
    assert scene.ran() == [0, 2]
    assert (scene.kv.device_free, scene.kv.is_moving) == (2, False)
    assert first.progress.computed > second.progress.computed == 8
    scene.late = 0
    scene.drain()


def test_a_request_runs_once_its_overlapped_move_in_has_completed() -> None:
    scene = Swaps({0: 1, 1: 2})
    scene.request(0)
    mover = scene.request(1)
    scene.ran()
    scene.swap_out(mover)
    scene.late = 2
    scene.eviction.back = [mover]
    assert [scene.ran() for _ in range(4)] == [[0], [0], [0], [0, 1]]
    scene.drain()


def test_plans_without_slices_wait_for_a_move_if_no_request_can_run() -> None:
    scene = Swaps({0: 2, 1: 1})
    request = scene.request(0)
    scene.request(1)
    scene.ran()
    scene.late = 3
    scene.eviction.out = [request]
    assert scene.ran() == [1]
    scene.core.abort(1, scene.now)
    assert [scene.ran() for _ in range(4)] == [[], [], [], [0]]
    scene.drain()


def test_no_plan_without_slices_is_made_while_another_is_in_flight() -> None:
    scene = Swaps({0: 2, 1: 1}, depth=2)
    request = scene.request(0)
    scene.request(1)
    scene.ran()
    scene.late = 2
    scene.eviction.out = [request]
    assert [piece.request.id for piece in scene.start().slices] == [1]
    scene.core.abort(1, scene.now)
    for _ in range(2):
        assert scene.start() is None
        scene.finish()
        assert not scene.start().slices
    scene.drain()


def test_moves_complete_after_the_last_request_has_finished() -> None:
    scene = Swaps({0: 1})
    request = scene.request(0)
    scene.ran()
    scene.late = 5
    scene.eviction.out = [request]
    scene.start()
    scene.core.abort(0, scene.now)
    assert scene.kv.device_free < scene.kv.device_total
    scene.drain()


def test_a_request_in_flight_that_is_chosen_for_swap_out_pauses_first() -> None:
    scene = Swaps({0: 1, 1: 2}, depth=2)
    scene.request(0)
    leaver = scene.request(1)
    assert [p.request.id for p in scene.start().slices] == [0, 1]
    scene.eviction.out = [leaver]
    plan = scene.start()
    assert [piece.request.id for piece in plan.slices] == [0]
    assert plan.overlapped == ()
    scene.finish()
    scene.eviction.out = [leaver]
    assert [move.request for move in scene.start().overlapped] == [leaver]
    assert leaver.progress.evictions == 0, "no request needed its blocks, so it was not evicted"
    scene.drain()


def test_moves_that_are_impossible_are_not_made() -> None:
    """The CPU tier has room for one of the two requests, and neither is on it to be swapped in."""
    scene = Swaps({0: 1, 1: 2, 2: 3}, cpu=3)
    requests = [scene.request(number) for number in range(3)]
    scene.ran()
    scene.eviction.out, scene.eviction.back = requests[1:], requests[1:]
    plan = scene.step()
    assert [(move.direction, move.request.id) for move in plan.overlapped] == [(OUT, 1)]
    scene.drain()


def test_the_highest_ranked_request_is_not_swapped_out_during_a_step() -> None:
    """Swapped in and out repeatedly, it would never run."""
    scene = Swaps({0: 1, 1: 2})
    requests = [scene.request(0), scene.request(1)]
    scene.ran()
    scene.eviction.out = requests
    plan = scene.step()
    assert [move.request.id for move in plan.overlapped] == [1]
    assert [piece.request.id for piece in plan.slices] == [0]
    scene.drain()


def test_a_request_goes_on_after_a_failed_overlapped_move_out() -> None:
    scene = Swaps({0: 1, 1: 2})
    scene.request(0)
    request = scene.request(1)
    scene.ran()
    table = scene.kv.blocks_of(request).table
    scene.eviction.out = [request]
    scene.fails = always
    assert scene.ran() == [0]
    scene.fails = lambda move: False
    assert scene.kv.blocks_of(request).table == table
    (piece,) = [piece for piece in scene.step().slices if piece.request is request]
    assert (piece.start, piece.tokens) == (8, 1)
    kinds = [event.how if isinstance(event, Preempted) else type(event) for event in scene.story(request)]
    assert kinds == [Preemption.SWAP, MoveFailed]
    scene.drain()
    assert scene.tokens[1] == list(range(8, 28))


def test_no_request_is_swapped_out_during_the_step_after_a_failed_move() -> None:
    """A request that is in transit whenever its blocks are needed would keep them forever."""
    scene = Swaps({0: 1, 1: 2}, blocks=5)
    scene.request(0, 5, prompt=12)
    stubborn = scene.request(1, 5)
    scene.ran()
    scene.fails = always
    for _ in range(3):
        scene.eviction.out = [stubborn]
        scene.ran()
    assert stubborn.progress.evictions == 1
    assert scene.kv.blocks_of(stubborn) is None
    scene.fails = lambda move: False
    scene.drain()


def test_kv_of_a_failed_blocking_move_out_is_recomputed() -> None:
    scene = Swaps({0: 5, 1: 1}, blocks=5)
    victim = scene.request(0, 5)
    scene.ran()
    scene.request(1, 2, prompt=16)
    scene.fails = always
    plan = scene.step()
    assert [(move.direction, move.request.id) for move in plan.blocking] == [(OUT, 0)]
    assert [piece.request.id for piece in plan.slices] == [1], "the request that caused the eviction runs"
    assert scene.tokens[1] == [16]
    assert (victim.progress.computed, scene.kv.blocks_of(victim)) == (0, None)
    kinds = [event.how if isinstance(event, Preempted) else type(event) for event in scene.story(victim)]
    assert kinds == [Preemption.SWAP, MoveFailed, Preemption.DROP]
    assert victim.progress.evictions == 1, "the failed move is not a second eviction"
    scene.drain()
    assert scene.tokens[0] == list(range(8, 13))


def test_kv_of_a_failed_overlapped_move_in_is_recomputed() -> None:
    scene = Swaps({0: 1, 1: 2})
    scene.request(0)
    request = scene.request(1)
    scene.ran()
    scene.swap_out(request)
    scene.eviction.back = [request]
    scene.fails = always
    assert scene.ran() == [0]
    scene.fails = lambda move: False
    assert scene.kv.blocks_of(request) is None
    plan = scene.step()
    assert [(p.start, p.tokens) for p in plan.slices if p.request is request] == [(0, 9)]
    scene.drain()
    assert scene.tokens[1] == list(range(8, 28))


@pytest.mark.parametrize("depth", [1, 2])
def test_slices_that_read_the_kv_of_a_failed_move_are_discarded(depth: int) -> None:
    scene = Swaps({0: 1, 1: 2}, depth=depth)
    scene.request(0)
    request = scene.request(1, 5)
    scene.ran()
    scene.swap_out(request)
    known = request.progress.known
    plan = scene.start()
    assert [move.request for move in plan.blocking] == [request]
    assert [piece.request.id for piece in plan.slices] == [0, 1]
    before = len(scene.tokens[0])
    core = scene.core
    failed = [move for move in plan.blocking if move.request is request]
    lost: list[set[Request]] = []
    commit = core.scheduler.commit

    def noted(result: StepResult, now: float) -> set[Request]:
        lost.append(commit(result, now))
        return lost[-1]

    core.scheduler.commit = noted  # type: ignore[method-assign]
    scene.fails = failed.__contains__
    scene.finish()
    assert lost == [{request}]
    assert len(scene.tokens[0]) == before + 1
    assert (
        request.progress.known,
        request.progress.computed,
        request.progress.planned,
        request.progress.pending_samples,
    ) == (known, 0, 0, 0)
    scene.drain()
    assert scene.tokens[1] == list(range(8, 13))


@pytest.mark.parametrize("direction", [OUT, IN])
def test_a_request_aborted_in_transit_is_released_though_its_move_fails(direction: Direction) -> None:
    scene = Swaps({0: 1, 1: 2})
    scene.request(0)
    request = scene.request(1)
    scene.ran()
    if direction is IN:
        scene.swap_out(request)
    scene.eviction.out, scene.eviction.back = [request], [request]
    scene.start()
    scene.core.abort(1, scene.now)
    scene.fails = always
    scene.finish()
    assert scene.kv.blocks_of(request) is None
    story = [event for event in scene.story(request) if isinstance(event, Preempted)]
    assert [event.how for event in story] == [Preemption.SWAP], "a finished request is not preempted again"
    scene.drain()


def test_the_eviction_policy_decides_whether_moves_in_block_or_overlap() -> None:
    for eviction, before in ((OnCall(), 1), (OnCallOverlapped(), 0)):
        scene = Swaps({0: 1, 1: 2}, eviction=eviction)
        scene.request(0)
        request = scene.request(1)
        scene.ran()
        scene.swap_out(request)
        plan = scene.step()
        assert len(plan.blocking) == before
        assert [piece.request.id for piece in plan.slices] == [0, 1][: 1 + before]
        scene.eviction.back = [request]
        scene.step()
        assert scene.ran() == [0, 1]
        scene.drain()


def test_the_highest_ranked_request_is_swapped_in_by_a_blocking_move() -> None:
    """The blocks that an overlapped move needs may never become free."""
    scene = Swaps({0: 1, 1: 2, 2: 3}, blocks=8, eviction=OnCallOverlapped())
    scene.request(0, 9)
    swapped_out, other = scene.request(1, 9), scene.request(2, 9)
    scene.ran()
    scene.swap_out(swapped_out)
    assert scene.ran() == [0, 2]
    scene.ordering.numbers[1] = 0
    plan = scene.step()
    assert [(move.direction, move.request) for move in plan.blocking if move.direction is IN] == [(IN, swapped_out)]
    assert swapped_out in [piece.request for piece in plan.slices]
    assert other.progress.evictions == 1
    scene.ordering.numbers[2] = -1
    scene.drain()


def test_lower_ranked_incoming_requests_do_not_take_blocks_that_a_swapped_request_needs() -> None:
    scene = Swaps({0: 1, 1: 3, 2: 4, 3: 2}, blocks=8, eviction=OnCallOverlapped())
    scene.request(0, 6, prompt=12)
    swapped_out = scene.request(1, 6)
    scene.ran()
    scene.swap_out(swapped_out)  # it has 2 blocks, and request 0 holds 4 of the 8
    scene.request(2, 1, prompt=12)
    assert scene.ran() == [0], "request 2 would leave 1 of the 4 blocks, and request 1 needs 2"
    scene.request(3, 1, prompt=12)
    assert scene.ran() == [0, 3], "request 3 outranks request 1 and takes them"
    scene.eviction.back = [swapped_out]
    scene.ran()
    assert 1 in scene.ran()
    scene.drain()


def test_waiting_for_kv_names_the_requests_that_lack_only_kv_on_the_device() -> None:
    scene = Swaps({0: 1, 1: 2, 2: 3}, eviction=OnCallOverlapped())
    scene.request(0)
    swapped, moving = scene.request(1), scene.request(2)
    scene.ran()
    assert scene.step().waiting_for_kv == ()
    scene.swap_out(swapped)
    scene.late = 1
    scene.eviction.out = [moving]
    assert scene.step().waiting_for_kv == (swapped, moving)
    scene.late = 0
    scene.eviction.back = [swapped]
    assert scene.step().waiting_for_kv == (swapped, moving)
    scene.eviction.back = [moving]
    assert scene.step().waiting_for_kv == (moving,)
    assert scene.step().waiting_for_kv == ()
    scene.drain()


def test_the_eviction_policy_is_not_asked_without_a_cpu_tier() -> None:
    scene = Swaps({0: 1}, cpu=0)
    request = scene.request(0)
    scene.ran()
    scene.eviction.out = [request]
    assert scene.ran() == [0]
    assert scene.eviction.out == [request]
    scene.drain()
