from __future__ import annotations

import pytest

from skipjoin.core.events import Preempted, Preemption
from skipjoin.core.foreign import ForeignScheduler
from skipjoin.core.request import NEVER, Request
from skipjoin.core.step import StepPlan, StepResult
from skipjoin.core.waits import WaitReason
from support.load import make
from support.watch import WatchedCore, World


def started(world: World, *requests: Request) -> tuple[WatchedCore, StepPlan]:
    core = world.core(scheduler=ForeignScheduler)
    for request in requests:
        core.add(request, 0.0)
    plan = core.scheduler.schedule(0.0)
    assert len(plan.slices) == len(requests)
    return core, plan


def commit(core: WatchedCore, plan: StepPlan) -> None:
    core.scheduler.commit(StepResult(plan, (None,) * len(plan.slices), 0.01), 1.0)


def test_a_shorter_slice_replaces_the_planned_one() -> None:
    core, plan = started(World("fcfs"), make(0, 10))
    (slice_,) = plan.slices
    amended = core.scheduler.amend(plan, [slice_._replace(tokens=4, samples=False)], 0.0)
    commit(core, amended)
    request = slice_.request
    assert (request.progress.computed, request.progress.planned, request.progress.pending_samples) == (4, 4, 0)
    (rest,) = core.scheduler.schedule(1.0).slices
    assert (rest.start, rest.tokens, rest.samples) == (4, 6, True)


def test_a_request_that_is_left_out_waits_for_kv_and_is_planned_again() -> None:
    core, plan = started(World("fcfs"), make(0, 10), make(1, 10))
    kept, left = plan.slices
    core.kv.release(left.request)
    core.take_events()
    amended = core.scheduler.amend(plan, [kept], 0.0)
    request = left.request
    assert (request.progress.planned, request.progress.pending_samples, request.progress.last_plan) == (0, 0, NEVER)
    assert core.scheduler.waits[request].reason is WaitReason.NO_KV
    assert [event.how for event in core.take_events() if isinstance(event, Preempted)] == [Preemption.PAUSE]
    commit(core, amended)
    again = core.scheduler.schedule(1.0)
    assert request in {slice_.request for slice_ in again.slices}


def test_only_the_latest_plan_can_be_amended() -> None:
    core, plan = started(World("fcfs", depth=2, overlap=True), make(0, 10))
    core.scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="not the latest"):
        core.scheduler.amend(plan, (), 0.0)


def test_lost_kv_voids_the_slices_in_flight() -> None:
    core, plan = started(World("fcfs", depth=2, overlap=True), make(0, 10), make(1, 10))
    lost, kept = (slice_.request for slice_ in plan.slices)
    core.scheduler.lose(lost, 0.0)
    (current,) = core.scheduler.in_flight
    assert [slice_.request for slice_ in current.slices] == [kept]
    commit(core, current)
    assert (lost.progress.computed, lost.progress.planned, lost.progress.pending_samples) == (0, 0, 0)
    assert core.kv.blocks_of(lost) is None
    again = core.scheduler.schedule(1.0)
    assert [slice_.start for slice_ in again.slices if slice_.request is lost] == [0]


def test_an_inserted_plan_counts_like_a_planned_one() -> None:
    core, plan = started(World("fcfs"), make(0, 10))
    commit(core, plan)
    (slice_,) = plan.slices
    request = slice_.request
    request.progress.output.append(7)
    request.progress.known += 1
    core.kv.grow(request, 11)
    inserted = core.scheduler.insert([slice_._replace(start=10, tokens=1)], 1.0)
    assert inserted.id == request.progress.last_plan > plan.id
    assert (request.progress.planned, request.progress.pending_samples) == (11, 1)
    with pytest.raises(ValueError, match="in flight already"):
        core.scheduler.insert((), 1.0)
    commit(core, inserted)
    assert (request.progress.computed, request.progress.pending_samples) == (11, 0)
