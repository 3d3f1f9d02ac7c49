"""Abort in each state a request can be in: its blocks come home, and nobody else notices. The same for a request that
the executor gives up.

A state with KV in transit is tried with a move that lands and one that fails, at once and plans later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from skipjoin.core.events import Finished
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.kv.reservations import Account
from skipjoin.core.policy import Allocation, Deferral
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.scheduling.waits import WaitReason
from skipjoin.core.step import Direction, Move
from skipjoin.exec.simulated import never
from support.load import make
from support.policies import Answer, OnCall, Scripted
from support.watch import DROPPED, Stepper, World, nested_in

VICTIM = 1


def always(move: Move) -> bool:
    return True


def token_of(request: Request, position: int) -> int:
    """A stream that tells requests and positions apart."""
    return request.id * 1000 + position


@dataclass
class Scene:
    """A stepper with a pressure on call; request 1 is the one to be aborted, 0 and 2 are the others."""

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
        """claims: admission; None: as the recipe does."""
        eviction = OnCall()
        setting = World(recipe, depth, overlap, lambda: eviction, **world)
        policies = setting.policies()
        core = setting.core(policies if claims is None else replace(policies, admission=claims))
        stepper = Stepper(core, token_of)
        victim = make(VICTIM, prompt, 20)
        stepper.add(make(0, 8, 20), victim, make(2, 8, 20, arrival=1.0))
        return cls(stepper, eviction, victim)

    def outrank(self, prompt: int) -> None:
        """A request that comes before everybody else."""
        self.stepper.add(make(9, prompt, 3, priority=-1))

    def hold_back(self, prompt: int = 8) -> None:
        """Requests that take all slots, so that who decodes now becomes idle."""
        self.stepper.add(*(make(number, prompt, 12, priority=-1) for number in range(10, 16)))


def waiting() -> Scene:
    return Scene.begin(max_seqs=1)


def running_chunks() -> Scene:
    """Half of the prompt computed, no plan in flight."""
    scene = Scene.begin(recipe="sarathi", prompt=40, max_tokens=24)
    scene.stepper.step()
    assert 0 < scene.victim.computed < 40
    return scene


def running_chunk_in_flight() -> Scene:
    scene = running_chunks()
    scene.stepper.start()
    assert scene.victim.computed < scene.victim.planned < 40
    return scene


def decoding() -> Scene:
    scene = Scene.begin()
    scene.stepper.step()
    scene.stepper.step()
    assert len(scene.victim.output) == 2
    return scene


def decoding_in_flight() -> Scene:
    scene = decoding()
    scene.stepper.start()
    assert scene.victim.in_flight
    return scene


def in_flight_with_a_stage_free() -> Scene:
    scene = Scene.begin(depth=2, max_seqs=2)
    for _ in range(3):
        while scene.stepper.start() is not None:
            pass
        scene.stepper.finish()
    scene.stepper.start()
    assert scene.victim.in_flight
    return scene


def in_two_plans_in_flight() -> Scene:
    scene = Scene.begin(depth=2, overlap=True)
    scene.stepper.start()
    scene.stepper.start()
    assert (scene.victim.pending_samples, len(scene.stepper.core.plans)) == (2, 2)
    return scene


def in_the_older_of_two_plans() -> Scene:
    scene = Scene.begin(depth=2, overlap=True, max_seqs=2)
    scene.stepper.start()
    scene.hold_back()
    scene.stepper.start()
    assert [VICTIM in {piece.request.id for piece in plan.slices} for plan in scene.stepper.core.plans] == [True, False]
    return scene


def paused() -> Scene:
    """RequestBlocks KV on the device, in no plan."""
    scene = decoding()
    scene.hold_back()
    scene.stepper.step()
    assert not scene.victim.in_flight
    return scene


def moving_out_beside() -> Scene:
    scene = paused()
    scene.eviction.out = [scene.victim]
    plan = scene.stepper.start()
    assert plan is not None
    assert [move.request for move in plan.overlapped] == [scene.victim]
    return scene


def moving_out_before() -> Scene:
    scene = Scene.begin(device_blocks=14)
    scene.stepper.step()
    scene.outrank(37)
    plan = scene.stepper.start()
    assert plan is not None
    assert scene.victim in [move.request for move in plan.blocking if move.direction is Direction.OUT]
    return scene


def on_the_host() -> Scene:
    scene = moving_out_beside()
    scene.stepper.finish()
    held = scene.stepper.core.kv.blocks_of(scene.victim)
    assert held is not None
    assert (held.device, held.moving) == ([], None)
    assert held.cpu
    return scene


def dropped() -> Scene:
    scene = Scene.begin(device_blocks=14, host_blocks=0)
    scene.stepper.step()
    scene.outrank(37)
    scene.stepper.start()
    assert (scene.victim.evictions, scene.victim.computed) == (1, 0)
    return scene


def moving_in_beside() -> Scene:
    scene = on_the_host()
    scene.eviction.back = [scene.victim]
    plan = scene.stepper.start()
    assert plan is not None
    assert [(move.direction, move.request) for move in plan.overlapped] == [(Direction.IN, scene.victim)]
    return scene


def moving_in_before_and_running() -> Scene:
    scene = on_the_host()
    while (plan := scene.stepper.start()) is not None and not scene.victim.in_flight:
        scene.stepper.finish()
    assert plan is not None
    assert (Direction.IN, scene.victim) in [(move.direction, move.request) for move in plan.blocking]
    return scene


def moving_in_with_two_plans_in_flight() -> Scene:
    """Back from the host in the newer plan, while the older one still runs others."""
    scene = Scene.begin(depth=2, overlap=True)
    stepper = scene.stepper
    for _ in range(2):
        stepper.start()
        stepper.finish()
    scene.hold_back()
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
    raise AssertionError("the victim never came back")


def chosen_to_leave_in_flight() -> Scene:
    """Passed over in the newer plan, to be moved out when the older one is done."""
    scene = Scene.begin(depth=2, overlap=True)
    scene.stepper.start()
    scene.eviction.out = [scene.victim]
    scene.stepper.start()
    assert [VICTIM in {piece.request.id for piece in plan.slices} for plan in scene.stepper.core.plans] == [True, False]
    return scene


def moving_out_plans_later() -> Scene:
    """Others have run meanwhile; the plan that began the move has finished."""
    scene = moving_out_beside()
    scene.stepper.late = 4
    scene.stepper.finish()
    scene.stepper.late = 0
    scene.stepper.start()
    assert scene.stepper.core.kv.is_moving
    return scene


def moving_in_plans_later() -> Scene:
    scene = moving_in_beside()
    scene.stepper.late = 4
    scene.stepper.finish()
    scene.stepper.late = 0
    scene.stepper.start()
    assert scene.stepper.core.kv.is_moving
    return scene


def kept_after_a_failed_move_out() -> Scene:
    scene = moving_out_beside()
    scene.stepper.fails = always
    scene.stepper.finish()
    scene.stepper.fails = never
    held = scene.stepper.core.kv.blocks_of(scene.victim)
    assert held is not None
    assert held.device
    assert scene.victim.computed > 0
    return scene


def lost_on_the_way_back() -> Scene:
    scene = moving_in_beside()
    scene.stepper.fails = always
    scene.stepper.finish()
    scene.stepper.fails = never
    assert scene.stepper.core.kv.blocks_of(scene.victim) is None
    assert scene.victim.computed == 0
    return scene


def with_claims(*lenders: int | None) -> Scene:
    """Each request has claimed 7 blocks of what one with a smaller id claims, or of what is available; the first one
    has claimed all that three need, and an account keeps some."""
    answers: dict[int, Answer] = {
        number: lambda request, target, kv, lender=lender: Allocation(
            7, 7, tokens=28, parent=next((one for one in kv.holders() if one.id == lender), None)
        )
        for number, lender in enumerate(lenders)
    }
    answers[0] = lambda request, target, kv: Allocation(21, 21, tokens=28)
    scene = Scene.begin(claims=Scripted(answers, {Account("kept"): 10}), depth=2, overlap=True)
    scene.stepper.step()
    scene.stepper.start()
    return scene


def lent_by_another() -> Scene:
    scene = with_claims(None, 0, 0)
    assert scene.stepper.core.kv.reservations.parent_of(scene.victim) is scene.stepper.core.requests[0]
    return scene


def lending_what_it_is_lent() -> Scene:
    scene = with_claims(None, 0, VICTIM)
    assert nested_in(scene.stepper.core.kv, scene.victim) == [scene.stepper.core.requests[2]]
    return scene


def at_the_end_of_its_claim() -> Scene:
    """On the device, and granted nothing more while others run."""

    def ten_tokens(request: Request, target: int, kv: KVLedger) -> Allocation | Deferral:
        return Allocation(3, 3, tokens=10) if target <= 10 else Deferral.REQUEST

    scene = Scene.begin(claims=Scripted({VICTIM: ten_tokens}))
    for _ in range(5):
        scene.stepper.step()
    assert scene.victim.wait is not None
    assert (scene.victim.computed, scene.victim.wait.reason) == (10, WaitReason.HELD_BY_ADMISSION)
    return scene


def satisfied() -> Scene:
    """Its last token is being sampled."""
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
    moving_out_beside,
    moving_out_before,
    on_the_host,
    dropped,
    moving_in_beside,
    moving_in_before_and_running,
    moving_in_with_two_plans_in_flight,
    chosen_to_leave_in_flight,
    moving_out_plans_later,
    moving_in_plans_later,
    kept_after_a_failed_move_out,
    lost_on_the_way_back,
    lent_by_another,
    lending_what_it_is_lent,
    at_the_end_of_its_claim,
    satisfied,
]
every_state = pytest.mark.parametrize("reach", STATES)
# How moves end from then on.
fails_or_not = pytest.mark.parametrize("fails", [never, always])


@every_state
@fails_or_not
@pytest.mark.parametrize("late", [0, 3])
def test_blocks_come_home_and_nobody_else_notices(
    reach: Callable[[], Scene], fails: Callable[[Move], bool], late: int
) -> None:
    undisturbed = reach()
    undisturbed.stepper.drain()
    scene = reach()
    scene.stepper.fails, scene.stepper.late = fails, late
    told = list(scene.stepper.tokens.get(VICTIM, []))
    assert scene.stepper.core.abort(VICTIM, scene.stepper.now)
    scene.stepper.drain()
    others = {number: tokens for number, tokens in undisturbed.stepper.tokens.items() if number != VICTIM}
    assert {number: tokens for number, tokens in scene.stepper.tokens.items() if number != VICTIM} == others
    assert scene.stepper.tokens.get(VICTIM, []) == told, "tokens after the end"
    ends = [e.reason for e in scene.stepper.events if isinstance(e, Finished) and e.request.id == VICTIM]
    assert ends == [FinishReason.ABORT]


@every_state
@fails_or_not
def test_blocks_come_home_as_soon_as_no_plan_holds_them(
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
    if core.kv.is_moving and not any(holds):  # the move began with a plan that is done
        assert core.kv.blocks_of(scene.victim) is not None
        scene.stepper.drain()
        return
    for number in range(len(holds)):
        still_held = core.kv.blocks_of(scene.victim) is not None
        assert still_held == any(holds[number:])
        scene.stepper.finish()
    assert core.kv.blocks_of(scene.victim) is None


@every_state
@fails_or_not
@pytest.mark.parametrize("late", [0, 3])
def test_everybody_may_go_at_once(reach: Callable[[], Scene], fails: Callable[[Move], bool], late: int) -> None:
    scene = reach()
    scene.stepper.fails, scene.stepper.late = fails, late
    for number in list(scene.stepper.core.requests):
        scene.stepper.core.abort(number, scene.stepper.now)
    while scene.stepper.core.plans:
        assert scene.stepper.start() is None
        scene.stepper.finish()
    # What is still on the link is given plans without slices to land.
    while scene.stepper.core.kv.is_moving:
        assert not scene.stepper.step().slices
    scene.stepper.core.assert_home()


@every_state
@fails_or_not
@pytest.mark.parametrize("late", [0, 3])
def test_who_is_given_up_ends_with_an_error_and_nobody_else_notices(
    reach: Callable[[], Scene], fails: Callable[[Move], bool], late: int
) -> None:
    """From the first plan on that has it and has not finished; later plans in flight may have it too."""
    undisturbed = reach()
    undisturbed.stepper.drain()
    scene = reach()
    stepper = scene.stepper
    stepper.fails, stepper.late = fails, late
    stepper.drops = lambda piece: piece.request is scene.victim
    told = list(stepper.tokens.get(VICTIM, []))
    stepper.drain()
    others = {number: tokens for number, tokens in undisturbed.stepper.tokens.items() if number != VICTIM}
    assert {number: tokens for number, tokens in stepper.tokens.items() if number != VICTIM} == others
    assert stepper.tokens.get(VICTIM, []) == told, "tokens of a slice that was not computed"
    ends = [(e.reason, e.detail) for e in stepper.events if isinstance(e, Finished) and e.request.id == VICTIM]
    assert ends == [(FinishReason.ERROR, DROPPED)]


@every_state
def test_blocks_of_who_is_given_up_come_home_with_the_last_plan_that_has_it(reach: Callable[[], Scene]) -> None:
    scene = reach()
    stepper, core = scene.stepper, scene.stepper.core
    has = [any(piece.request is scene.victim for piece in plan.slices) for plan in core.plans]
    stepper.drops = lambda piece: piece.request is scene.victim
    for number in range(len(has)):
        assert core.kv.blocks_of(scene.victim) is not None or not any(has[number:])
        stepper.finish()
    if not any(has):
        stepper.drain()
    assert scene.victim.finish_reason is FinishReason.ERROR
    assert core.kv.blocks_of(scene.victim) is None


def test_abort_after_the_end_changes_nothing() -> None:
    scene = Scene.begin()
    scene.stepper.drain()
    events = len(scene.stepper.events)
    assert not scene.stepper.core.abort(VICTIM, scene.stepper.now)
    assert scene.stepper.core.take_events() == []
    assert len(scene.stepper.events) == events
