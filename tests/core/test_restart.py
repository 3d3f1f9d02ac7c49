from __future__ import annotations

import io
import json
import random

import pytest

from skipjoin.core.events import Restarted
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.step import StepResult
from skipjoin.observe.metrics import EngineMetrics
from skipjoin.observe.timeline import Timeline
from skipjoin.observe.usage import EngineUsage
from support.load import load, make
from support.policies import SOME_SYSTEMS, SYSTEMS
from support.watch import Stepper, World
from support.worlds import worlds

PIPELINES = [(1, False, 1), (2, True, 1), (3, False, 1)]


def disturbed(world: World, probability: float) -> Stepper:
    draw = random.Random(5)
    stepper = Stepper(world.core())
    todo = load(3, 12, priorities=(-1, 0, 7))
    for _ in range(100_000):
        while todo and draw.random() < 0.5:
            stepper.add(todo.pop(0))
        stepper.late = draw.choice((0, 1, 4))
        while draw.random() < 0.8 and stepper.start() is not None:
            pass
        if draw.random() < probability:
            stepper.restart()
        elif stepper.core.plans:
            stepper.finish()
        if not (todo or stepper.core.requests or stepper.core.plans):
            break
    return stepper


# All KV is lost, whatever evicted it before, so each recipe has half of the eviction policies.
@pytest.mark.parametrize("world", worlds(SYSTEMS, PIPELINES, parts=6))
def test_requests_get_the_same_tokens_whenever_the_executor_restarts(world: World) -> None:
    stepper = disturbed(world, 0.05)
    stepper.core.assert_all_free()
    restarts = [event for event in stepper.events if isinstance(event, Restarted)]
    assert len(restarts) >= 3
    assert any(event.plans for event in restarts)
    for request in load(3, 12, priorities=(-1, 0, 7)):
        assert stepper.tokens[request.id] == list(range(len(request.prompt), request.max_total_tokens))


@pytest.mark.parametrize("world", worlds(SOME_SYSTEMS, PIPELINES, parts=4))
def test_observers_follow_restarts(world: World) -> None:
    stepper = disturbed(world, 0.05)
    restarts = sum(isinstance(event, Restarted) for event in stepper.events)
    pool = {"device_blocks": world.device_blocks, "block_size": world.block_size, "block_bytes": 8}
    metrics, usage, file = EngineMetrics(**pool), EngineUsage(**pool), io.StringIO()
    timeline = Timeline(file)
    for watcher in (metrics, usage, timeline):
        watcher.observe(stepper.events)
    timeline.close()
    row = metrics.snapshot().row
    assert row("engine_restarts_total") == [restarts]
    for gauge in ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc"):
        assert not any(row(gauge))
    assert usage.kv()["recomputed_tokens"] > 0
    assert usage.series()["kv_used"][-1] <= 1
    drawn = [entry for entry in json.loads(file.getvalue()) if entry["name"] == "restart"]
    assert len(drawn) == restarts
    spans = [entry for entry in json.loads(file.getvalue()) if entry["name"] == "decode"]
    assert sum(span["args"]["generated"] for span in spans) <= sum(map(len, stepper.tokens.values()))


def test_results_from_before_a_restart_are_refused() -> None:
    stepper = Stepper(World().core())
    stepper.add(make(0, 8, 6))
    plan = stepper.start()
    assert plan is not None
    core = stepper.core
    core.restart(0.0)
    with pytest.raises(ValueError, match="not the oldest in flight"):
        core.scheduler.commit(StepResult(plan, [8], 0.01), 0.0)


def test_a_cleared_ledger_allocates_the_same_blocks_again() -> None:
    kv = KVLedger(6, 6, 4)
    one, two = make(0, 8), make(1, 8)
    for request in (one, two):
        kv.grow(request, 8)
        request.progress.computed = 8
    first = kv.blocks_of(one).table
    kv.reserve(two, 4)
    kv.tiers.move_out(two, blocking=False)
    kv.clear()
    one.progress.computed = two.progress.computed = 0
    kv.check()
    assert (kv.device_free, kv.tiers.cpu_free, kv.available, kv.is_moving) == (6, 6, 6, False)
    kv.grow(two, 8)
    assert kv.blocks_of(two).table == first
