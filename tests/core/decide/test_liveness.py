"""Liveness: with requests and no plan in flight, a request runs, and the first in rank does not wait forever."""

from __future__ import annotations

import pytest

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy_set import Policies
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.refusals import HELD
from skipjoin.core.step import StepResult
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.eviction import Recompute
from support.load import make
from support.policies import Ranks, ShareAll, Verdicts
from support.watch import Scene, Stepper, World

DEPTHS = pytest.mark.parametrize(("depth", "overlap"), [(1, False), (2, False), (2, True)])


@DEPTHS
def test_a_promoted_owner_runs_when_its_borrower_fills_the_device(depth: int, overlap: bool) -> None:
    """Its contested slots need more blocks than the device has, until the borrower is evicted."""
    world = World("bros", depth, overlap, device_blocks=10, cpu_blocks=200, max_tokens=512, best_effort_wait_s=0.015)
    stepper = Stepper(world.core())
    stepper.add(make(0, 38, 2, best_effort=True))
    stepper.step()
    stepper.add(make(1, 36, 4, arrival=stepper.now))
    stepper.drain(100)
    assert stepper.tokens == {0: [38, 39], 1: [36, 37, 38, 39]}


@DEPTHS
def test_an_owner_that_ranks_first_again_runs_before_its_borrower_finishes(depth: int, overlap: bool) -> None:
    stepper = Scene({0: 1, 1: 0}, blocks=10, cpu=200, eviction=ShareAll(), depth=depth, overlap=overlap)
    stepper.add(make(0, 34, 6, best_effort=True))
    while stepper.core.requests[0].progress.pending > 1:
        stepper.step()
    stepper.add(make(1, 26, 14))
    while len(stepper.tokens.get(1, ())) < 2:
        stepper.fill()
        stepper.finish()
    assert stepper.core.kv.sharing.bidirectional_blocks
    owned = len(stepper.tokens.get(0, ()))
    stepper.ordering.numbers[0] = -1
    for _ in range(3 * depth):
        stepper.fill()
        stepper.finish()
    assert len(stepper.tokens[0]) > owned
    assert 1 in stepper.core.requests
    stepper.drain()


def test_a_request_that_the_batcher_refuses_is_evicted_for_one_that_it_accepts() -> None:
    """It is evicted although it ranks higher, since otherwise no request would run."""
    verdicts = Verdicts({})
    policies = Policies(Ranks({0: 0, 1: 1}), verdicts, OnDemand(), Recompute())
    core = EngineCore(Scheduler(policies, KVLedger(4, 0, 4)))
    core.add(make(0, 12, 4), 0.0)
    core.add(make(1, 12, 2), 0.0)
    ran = []
    for step in range(6):
        plan = core.start_step(float(step))
        ran.append([piece.request.id for piece in plan.slices])
        core.finish_step(StepResult(plan, [1] * len(plan.slices), 0.01), float(step))
        core.kv.check()
        verdicts.verdicts = {0: HELD} if 1 in core.requests else {}
    assert ran == [[0], [1], [1], [0], [0], [0]]


def test_a_request_does_not_wait_for_a_prefix_whose_leader_cannot_run() -> None:
    """Plan ids stand still while no request runs, so the leader seems to be running all that time."""
    verdicts = Verdicts({0: 4})
    policies = Policies(Ranks({0: 0, 1: 1}), verdicts, OnDemand(), Recompute())
    core = EngineCore(Scheduler(policies, KVLedger(20, 0, 4)))
    for number in range(2):
        core.add(make(number, 12, 1, prefix=ContentPrefix(4)), 0.0)
    first = core.start_step(0.0)
    assert [(piece.request.id, piece.tokens) for piece in first.slices] == [(0, 4)]
    core.finish_step(StepResult(first, [None], 0.01), 0.01)
    verdicts.verdicts = {0: HELD}
    second = core.start_step(0.01)
    assert [(piece.request.id, piece.start) for piece in second.slices] == [(1, 4)]
