"""Abort a request, or fail it in the executor, in each state that it can be in.

States with KV in transit are tried with moves that complete and that fail, immediately and some plans later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest

from skipjoin.core.events import Finished
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.kv.reservations import Account
from skipjoin.core.policy import Allocation, Deferral
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import Direction, Move
from skipjoin.core.waits import WaitReason
from skipjoin.exec.simulated import never
from support.load import make
from support.policies import Answer, OnCall, Scripted
from support.watch import SLICE_ERROR, Stepper, World, nested_in

VICTIM = 1


def always(move: Move) -> bool:
    return True


def token_of(request: Request, position: int) -> int:
    return request.id * 1000 + position


@dataclass
class Scene:
    """A stepper with an eviction policy on demand. Request 1 is the one to abort; 0 and 2 are others."""

    stepper: Stepper
    eviction: OnCall
    victim: Request

    @classmethod
    def begin(
        cls,
        *,
        recipe: str = "fcfs",
        depth: int = 1,
        overlap: bool = False,
        prompt: int = 8,
        claims: Scripted | None = None,
        **world: int,
    ) -> Scene:
        """Add the three requests to a new stepper. `claims` replaces the recipe's admission policy."""
        eviction = OnCall()
        setting = World(recipe, depth, overlap, lambda: eviction, **world)
        policies = setting.policies()
        core = setting.core(policies if claims is None else replace(policies, admission=claims))
        stepper = Stepper(core, token_of)
        victim = make(VICTIM, prompt, 20)
        stepper.add(make(0, 8, 20), victim, make(2, 8, 20, arrival=1.0))
        return cls(stepper, eviction, victim)

    def outrank(self, prompt: int) -> None:
        self.stepper.add(make(9, prompt, 3, priority=-1))

    def fill_slots(self, prompt: int = 8) -> None:
        """Add requests that take all slots, so that decoding requests pause."""
        self.stepper.add(*(make(number, prompt, 12, priority=-1) for number in range(10, 16)))


def waiting() -> Scene:
    return Scene.begin(max_seqs=1)


def running_chunks() -> Scene:
    """Compute half of the prompt, with no plan in flight."""
    scene = Scene.begin(recipe="sarathi", prompt=40, max_tokens=24)
    scene.stepper.step()
    assert 0 < scene.victim.progress.computed < 40
    return scene


def running_chunk_in_flight() -> Scene:
    scene = running_chunks()
    scene.stepper.start()
    assert scene.victim.progress.computed < scene.victim.progress.planned < 40
    return scene


def decoding() -> Scene:
    scene = Scene.begin()
    scene.stepper.step()
    scene.stepper.step()
    assert len(scene.victim.progress.output) == 2
    return scene


def decoding_in_flight() -> Scene:
    scene = decoding()
    scene.stepper.start()
    assert scene.victim.progress.in_flight
    return scene


def in_flight_with_a_stage_free() -> Scene:
    scene = Scene.begin(depth=2, max_seqs=2)
    for _ in range(3):
        scene.stepper.fill()
        scene.stepper.finish()
    scene.stepper.start()
    assert scene.victim.progress.in_flight
    return scene


def in_two_plans_in_flight() -> Scene:
    scene = Scene.begin(depth=2, overlap=True)
    scene.stepper.start()
    scene.stepper.start()
    assert (scene.victim.progress.pending_samples, len(scene.stepper.core.plans)) == (2, 2)
    return scene


def in_the_older_of_two_plans() -> Scene:
    scene = Scene.begin(depth=2, overlap=True, max_seqs=2)
    scene.stepper.start()
    scene.fill_slots()
    scene.stepper.start()
    assert [VICTIM in {piece.request.id for piece in plan.slices} for plan in scene.stepper.core.plans] == [True, False]
    return scene


def paused() -> Scene:
    """Keep KV on the device without a slice in any plan."""
    scene = decoding()
    scene.fill_slots()
    scene.stepper.step()
    assert not scene.victim.progress.in_flight
    return scene


def moving_out_overlapped() -> Scene:
    scene = paused()
    scene.eviction.out = [scene.victim]
    plan = scene.stepper.start()
    assert [move.request for move in plan.overlapped] == [scene.victim]
    return scene


def moving_out_blocking() -> Scene:
    scene = Scene.begin(device_blocks=14)
    scene.stepper.step()
    scene.outrank(37)
    plan = scene.stepper.start()
    assert scene.victim in [move.request for move in plan.blocking if move.direction is Direction.OUT]
    return scene


def on_the_cpu_tier() -> Scene:
    scene = moving_out_overlapped()
    scene.stepper.finish()
    held = scene.stepper.core.kv.blocks_of(scene.victim)
    assert (held.device, held.moving) == ([], None)
    assert held.cpu
    return scene


def dropped() -> Scene:
    scene = Scene.begin(device_blocks=14, cpu_blocks=0)
    scene.stepper.step()
    scene.outrank(37)
    scene.stepper.start()
    assert (scene.victim.progress.evictions, scene.victim.progress.computed) == (1, 0)
    return scene


def moving_in_overlapped() -> Scene:
    scene = on_the_cpu_tier()
    scene.eviction.back = [scene.victim]
    plan = scene.stepper.start()
    assert [(move.direction, move.request) for move in plan.overlapped] == [(Direction.IN, scene.victim)]
    return scene


def moving_in_blocking_and_running() -> Scene:
    scene = on_the_cpu_tier()
    while (plan := scene.stepper.start()) is not None and not scene.victim.progress.in_flight:
        scene.stepper.finish()
    assert (Direction.IN, scene.victim) in [(move.direction, move.request) for move in plan.blocking]
    return scene


def moving_in_with_two_plans_in_flight() -> Scene:
    """Swap the victim in with the newer plan while the older one still runs others."""
    scene = Scene.begin(depth=2, overlap=True)
    stepper = scene.stepper
    for _ in range(2):
        stepper.start()
        stepper.finish()
    scene.fill_slots()
    stepper.start()
    stepper.start()
    stepper.finish()
    scene.eviction.out = [scene.victim]
    stepper.start()
    for _ in range(40):
        stepper.finish()
        plan = stepper.start()
        if plan is not None and scene.victim in [move.request for move in plan.blocking]:
            return scene
        if len(stepper.core.plans) < 2:
            stepper.start()
    raise AssertionError("the victim was never swapped in")


def chosen_for_swap_out_in_flight() -> Scene:
    """Leave the victim out of the newer plan, to move it out when the older one is done."""
    scene = Scene.begin(depth=2, overlap=True)
    scene.stepper.start()
    scene.eviction.out = [scene.victim]
    scene.stepper.start()
    assert [VICTIM in {piece.request.id for piece in plan.slices} for plan in scene.stepper.core.plans] == [True, False]
    return scene


def plans_later(scene: Scene) -> Scene:
    """Run others until the plan that began the move has finished."""
    scene.stepper.late = 4
    scene.stepper.finish()
    scene.stepper.late = 0
    scene.stepper.start()
    assert scene.stepper.core.kv.is_moving
    return scene


def moving_out_plans_later() -> Scene:
    return plans_later(moving_out_overlapped())


def moving_in_plans_later() -> Scene:
    return plans_later(moving_in_overlapped())


def kept_after_a_failed_move_out() -> Scene:
    scene = moving_out_overlapped()
    scene.stepper.fails = always
    scene.stepper.finish()
    scene.stepper.fails = never
    held = scene.stepper.core.kv.blocks_of(scene.victim)
    assert held.device
    assert scene.victim.progress.computed > 0
    return scene


def lost_by_a_failed_move_in() -> Scene:
    scene = moving_in_overlapped()
    scene.stepper.fails = always
    scene.stepper.finish()
    scene.stepper.fails = never
    assert scene.stepper.core.kv.blocks_of(scene.victim) is None
    assert scene.victim.progress.computed == 0
    return scene


def with_claims(*parents: int | None) -> Scene:
    """Give each request a reservation of 7 blocks in that of a request with a smaller id, or in the pool for None.

    Request 0 reserves what all three need, and an account keeps some blocks.
    """
    answers: dict[int, Answer] = {
        number: lambda request, target, kv, parent=parent: Allocation(
            7, 7, tokens=28, parent=next((holder for holder in kv.holders() if holder.id == parent), None)
        )
        for number, parent in enumerate(parents)
    }
    answers[0] = lambda request, target, kv: Allocation(21, 21, tokens=28)
    scene = Scene.begin(claims=Scripted(answers, {Account("kept"): 10}), depth=2, overlap=True)
    scene.stepper.step()
    scene.stepper.start()
    return scene


def nested_in_another() -> Scene:
    scene = with_claims(None, 0, 0)
    assert scene.stepper.core.kv.reservations.parent_of(scene.victim) is scene.stepper.core.requests[0]
    return scene


def nested_and_parent() -> Scene:
    scene = with_claims(None, 0, VICTIM)
    assert nested_in(scene.stepper.core.kv, scene.victim) == [scene.stepper.core.requests[2]]
    return scene


def at_the_end_of_its_reservation() -> Scene:
    """Keep the victim on the device without a further grant while others run."""

    def ten_tokens(request: Request, target: int, kv: KVLedger) -> Allocation | Deferral:
        return Allocation(3, 3, tokens=10) if target <= 10 else Deferral.REQUEST

    scene = Scene.begin(claims=Scripted({VICTIM: ten_tokens}))
    for _ in range(5):
        scene.stepper.step()
    wait = scene.stepper.core.scheduler.waits[scene.victim]
    assert (scene.victim.progress.computed, wait.reason) == (10, WaitReason.HELD_BY_ADMISSION)
    return scene


def satisfied() -> Scene:
    scene = Scene.begin()
    for _ in range(19):
        scene.stepper.step()
    scene.stepper.start()
    assert scene.victim.is_satisfied
    return scene


STATES = [
    waiting,
    running_chunks,
    running_chunk_in_flight,
    decoding,
    decoding_in_flight,
    in_flight_with_a_stage_free,
    in_two_plans_in_flight,
    in_the_older_of_two_plans,
    paused,
    moving_out_overlapped,
    moving_out_blocking,
    on_the_cpu_tier,
    dropped,
    moving_in_overlapped,
    moving_in_blocking_and_running,
    moving_in_with_two_plans_in_flight,
    chosen_for_swap_out_in_flight,
    moving_out_plans_later,
    moving_in_plans_later,
    kept_after_a_failed_move_out,
    lost_by_a_failed_move_in,
    nested_in_another,
    nested_and_parent,
    at_the_end_of_its_reservation,
    satisfied,
]
every_state = pytest.mark.parametrize("reach", STATES)


def scenes(reach: Callable[[], Scene]) -> Iterator[Scene]:
    """Yield the scene with later moves that complete or fail, at once or three plans later."""
    for fails in (never, always):
        for late in (0, 3):
            scene = reach()
            scene.stepper.fails, scene.stepper.late = fails, late
            yield scene


def others_of(scene: Scene) -> dict[int, list[int]]:
    return {number: tokens for number, tokens in scene.stepper.tokens.items() if number != VICTIM}


@cache
def undisturbed(reach: Callable[[], Scene]) -> dict[int, list[int]]:
    scene = reach()
    scene.stepper.drain()
    return others_of(scene)


@every_state
def test_blocks_are_freed_after_abort_and_others_are_unaffected(reach: Callable[[], Scene]) -> None:
    for scene in scenes(reach):
        before = list(scene.stepper.tokens.get(VICTIM, []))
        assert scene.stepper.core.abort(VICTIM, scene.stepper.now)
        scene.stepper.drain()
        assert others_of(scene) == undisturbed(reach)
        assert scene.stepper.tokens.get(VICTIM, []) == before, "a token after the request finished"
        ends = [e.reason for e in scene.stepper.events if isinstance(e, Finished) and e.request.id == VICTIM]
        assert ends == [FinishReason.ABORT]


@every_state
@pytest.mark.parametrize("fails", [never, always])
def test_blocks_are_freed_once_no_plan_in_flight_holds_them(
    reach: Callable[[], Scene], fails: Callable[[Move], bool]
) -> None:
    scene = reach()
    scene.stepper.fails = fails
    core = scene.stepper.core
    holds = [
        any(piece.request is scene.victim for piece in plan.slices)
        or any(move.request is scene.victim for move in (*plan.blocking, *plan.overlapped))
        for plan in core.plans
    ]
    core.abort(VICTIM, scene.stepper.now)
    if core.kv.is_moving and not any(holds):  # the plan that began the move is done
        assert core.kv.blocks_of(scene.victim) is not None
        scene.stepper.drain()
        return
    for number in range(len(holds)):
        still_held = core.kv.blocks_of(scene.victim) is not None
        assert still_held == any(holds[number:])
        scene.stepper.finish()
    assert core.kv.blocks_of(scene.victim) is None


@every_state
def test_all_requests_can_be_aborted_at_once(reach: Callable[[], Scene]) -> None:
    for scene in scenes(reach):
        for number in list(scene.stepper.core.requests):
            scene.stepper.core.abort(number, scene.stepper.now)
        while scene.stepper.core.plans:
            assert scene.stepper.start() is None
            scene.stepper.finish()
        # Moves in transit complete with plans without slices.
        while scene.stepper.core.kv.is_moving:
            assert not scene.stepper.step().slices
        scene.stepper.core.assert_all_free()


@every_state
def test_a_request_that_the_executor_fails_ends_with_an_error_and_others_are_unaffected(
    reach: Callable[[], Scene],
) -> None:
    """The executor fails it from its first unfinished plan on; later plans in flight may have it too."""
    for scene in scenes(reach):
        stepper, victim = scene.stepper, scene.victim
        stepper.fails_slice = lambda piece, victim=victim: piece.request is victim
        before = list(stepper.tokens.get(VICTIM, []))
        stepper.drain()
        assert others_of(scene) == undisturbed(reach)
        assert stepper.tokens.get(VICTIM, []) == before, "tokens of a slice that was not computed"
        ends = [(e.reason, e.detail) for e in stepper.events if isinstance(e, Finished) and e.request.id == VICTIM]
        assert ends == [(FinishReason.ERROR, SLICE_ERROR)]


@every_state
def test_blocks_of_a_failed_request_are_freed_with_its_last_plan(reach: Callable[[], Scene]) -> None:
    scene = reach()
    stepper, core = scene.stepper, scene.stepper.core
    has = [any(piece.request is scene.victim for piece in plan.slices) for plan in core.plans]
    stepper.fails_slice = lambda piece: piece.request is scene.victim
    for number in range(len(has)):
        assert core.kv.blocks_of(scene.victim) is not None or not any(has[number:])
        stepper.finish()
    if not any(has):
        stepper.drain()
    assert scene.victim.progress.finish_reason is FinishReason.ERROR
    assert core.kv.blocks_of(scene.victim) is None


def test_abort_of_a_finished_request_changes_nothing() -> None:
    scene = Scene.begin()
    scene.stepper.drain()
    events = len(scene.stepper.events)
    assert not scene.stepper.core.abort(VICTIM, scene.stepper.now)
    assert scene.stepper.core.take_events() == []
    assert len(scene.stepper.events) == events
