from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from papers.fastserve.static import RunToCompletion, WholeMaximum
from skipjoin.core.events import Arrived, Computed, Finished, Planned, Started, Waited
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import Slice, StepPlan, StepResult
from skipjoin.core.waits import WaitReason
from skipjoin.observe.metrics import EngineMetrics
from skipjoin.observe.requests import RequestFacts, RequestLog
from skipjoin.observe.waits import REASONS
from skipjoin.policies.batching import Greedy
from skipjoin.policies.eviction import Defer
from support.load import load, make
from support.policies import EVICTIONS, OnCall, UnitCost
from support.watch import Run, Scene, World, run

PIPELINES = [(1, False, 1), (2, True, 1), (2, False, 2)]
WORLDS = [
    pytest.param(World(recipe, depth, overlap, EVICTIONS[name], stages=stages), id=f"{recipe}-{depth}-{overlap}-{name}")
    for (recipe, name), (depth, overlap, stages) in product(
        [("fastserve", "proactive"), ("srpt", "chaos"), ("fcfs", "recompute"), ("static", "swap"), ("orca", "defer")],
        PIPELINES,
    )
]
UNIT = World("fcfs", cost=UnitCost())


def facts_of(done: Run) -> dict[int, RequestFacts]:
    finished: list[RequestFacts] = []
    RequestLog(finished.append).observe(done.events)
    return {facts.id: facts for facts in finished}


def executed(done: Run) -> dict[int, float]:
    """Return the seconds in which at least one step computed for each request."""
    until: dict[int, float] = defaultdict(float)
    seconds: dict[int, float] = defaultdict(float)
    for event in done.events:
        if isinstance(event, Computed):
            result = event.result
            for piece in result.plan.slices:
                begin = max(until[piece.request.id], event.now - (result.seconds - result.moving))
                seconds[piece.request.id] += event.now - begin
                until[piece.request.id] = event.now
    return seconds


@pytest.mark.parametrize("world", WORLDS)
def test_the_waits_of_a_request_are_its_latency_less_its_execution(world: World) -> None:
    done = run(world, load(1, 20, priorities=(-1, 0, 7)))
    seconds, reasons = executed(done), set()
    for facts in facts_of(done).values():
        waits = facts.wait_s()
        assert all(value >= 0 for value in waits.values())
        assert sum(waits.values()) == pytest.approx(facts.jct(99) - seconds[facts.id], abs=1e-6)
        if world.stages == 1:  # in a pipeline chunks of one prompt execute at the same time
            assert sum(waits.values()) == pytest.approx(facts.jct(99) - facts.execution_s, rel=0.01, abs=1e-6)
        reasons.update(reason for reason, value in waits.items() if value)
    assert len(reasons) >= 2


@pytest.mark.parametrize("world", WORLDS[:6])
def test_the_wait_metric_is_monotonic_and_matches_the_requests(world: World) -> None:
    done = run(world, load(1, 20))
    metrics = EngineMetrics(device_blocks=world.device_blocks, block_size=world.block_size, block_bytes=1)
    last = [0.0] * len(REASONS)
    for event in done.events:
        metrics.observe([event])
        if isinstance(event, Planned):
            total = metrics.snapshot().row("wait_seconds_total")
            assert all(new >= old - 1e-9 for new, old in zip(total, last, strict=True))
            last = total
    if world.stages > 1:
        return
    row = dict(zip(REASONS, metrics.snapshot().row("wait_seconds_total"), strict=True))
    facts = facts_of(done).values()
    for reason, total in row.items():
        assert total == pytest.approx(sum(fact.wait_s()[reason] for fact in facts), abs=1e-6)


def test_a_request_that_lacks_a_slot_reports_it() -> None:
    facts = facts_of(run(replace(UNIT, max_seqs=1), [make(0, 5, 2), make(1, 3, 1, arrival=1.0)]))[1]
    # It arrives during the first step, which ends at 5 s; the first request has the only slot until 6 s.
    assert {reason: s for reason, s in facts.wait_s().items() if s} == {
        WaitReason.NOT_EXAMINED: 4.0,
        WaitReason.NO_SLOT: 1.0,
    }


class Setup(Scene):
    """A scene whose requests are ranked by id and whose wait reasons are read after a step."""

    def __init__(self, *, blocks: int = 100, cpu: int = 0, **policies: Any) -> None:
        super().__init__({number: number for number in range(9)}, blocks=blocks, cpu=cpu, **policies)

    def reasons(self) -> list[str | None]:
        """Run a step and return the reasons of the live requests, by id, while it is in flight."""
        self.start()
        waits = [self.core.wait_of(request) for _, request in sorted(self.core.requests.items())]
        self.finish()
        return [wait and wait.reason.value for wait in waits]


def test_wait_reasons_of_the_batcher() -> None:
    setup = Setup(batcher=Greedy(2, 100, chunked=True))
    setup.add(*(make(number, 4, 9) for number in range(4)))
    assert setup.reasons() == [None, None, "no_slot", "no_slot"]
    setup = Setup(batcher=Greedy(8, 6, chunked=True))
    setup.add(*(make(number, 6, 9) for number in range(3)))
    assert setup.reasons() == [None, "token_budget", "token_budget"]
    setup = Setup(batcher=RunToCompletion(2, 100))
    setup.add(make(0, 4, 9), make(1, 4, 9))
    setup.reasons()
    setup.add(make(2, 4, 9))
    assert setup.reasons() == [None, None, "held_by_batcher"]


def test_memory_waits_report_the_missing_blocks() -> None:
    setup = Setup(blocks=4)
    setup.add(make(0, 8, 4), make(1, 12, 4), make(2, 4, 4))
    assert setup.reasons() == [None, "no_kv", "behind_memory"]
    (wait,) = [event for event in setup.events if isinstance(event, Waited)]
    assert (wait.request.id, wait.reason, wait.short) == (1, WaitReason.NO_KV, 1)
    setup = Setup(blocks=4, admission=WholeMaximum())
    setup.add(make(0, 4, 5), make(1, 4, 9))
    assert setup.reasons() == [None, "held_by_admission"]
    setup = Setup(blocks=4, eviction=Defer())
    setup.add(make(1, 12, 4))
    setup.reasons()
    setup.add(make(0, 8, 4))
    assert setup.reasons() == ["no_kv", None]


def test_wait_reasons_of_swapped_out_kv() -> None:
    class Returning(OnCall):
        def returns_overlapped(self, request: Request) -> bool:
            return True

    eviction = Returning()
    setup = Setup(cpu=50, eviction=eviction)
    setup.late = 1
    setup.add(make(0, 8, 20), make(1, 8, 20))
    setup.reasons()
    eviction.out = [setup.core.requests[1]]
    assert setup.reasons() == [None, "kv_in_transit"]
    setup.reasons()
    assert setup.reasons() == [None, "kv_on_cpu"]


def test_requests_that_are_not_examined_share_the_reason_of_the_tail() -> None:
    setup = Setup(blocks=4)
    setup.add(make(1, 8, 4), make(2, 12, 4))
    assert setup.reasons() == [None, "no_kv"]
    setup.add(make(0, 12, 2))
    assert setup.reasons()[2] == "behind_memory"
    changes = [(event.request.id, event.reason) for event in setup.events if isinstance(event, Waited)]
    assert (2, None) in changes


def test_execution_charged_twice_by_a_late_commit_is_corrected() -> None:
    """Two steps of 1 s run back to back; the result of the first is committed 0.2 s late."""
    request, finished = make(0, 4, 2), []
    plans = [StepPlan(number, (Slice(request, number, 1, True, False, ()),)) for number in range(2)]
    log = RequestLog(finished.append)
    log.observe([Arrived(request, 0.0), Started(request, 0.0), Planned(plans[0], 0.0, 0, 0)])
    log.observe([Planned(plans[1], 0.5, 0, 0), Computed(StepResult(plans[0], (7,), 1.0), 1.2)])
    log.observe([Computed(StepResult(plans[1], (7,), 1.0), 2.0), Finished(request, 2.0, FinishReason.LENGTH)])
    (facts,) = finished
    assert facts.execution_s == facts.jct(2.0) == 2.0
    assert sum(facts.waits.seconds) == pytest.approx(0.0, abs=1e-9)
