"""KV and steps over time, against a count that looks at every request after every step."""

from __future__ import annotations

import pytest

from skipjoin.core.events import Computed, Event, Planned
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.observe.usage import POINTS, Usage
from skipjoin.policies.pressure import Recompute, Swap
from skipjoin.recipes import RECIPES
from skipjoin.sim.driver import Replica, simulate
from support.load import load, make
from support.policies import UnitCost
from support.watch import World, run

BLOCK_BYTES = 1000


def usage_of(world: World) -> Usage:
    return Usage(device_blocks=world.device_blocks, block_size=world.block_size, block_bytes=BLOCK_BYTES)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pressure", [Recompute, Swap])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_used_kv_is_what_requests_have_computed_on_the_device(
    recipe: str, pressure: type[Recompute], depth: int
) -> None:
    world = World(recipe, depth, overlap=depth > 1, pressure=pressure)
    core, usage = world.core(), usage_of(world)
    seen: list[float] = []

    def look(events: list[Event]) -> None:
        usage.observe(events)
        holders = [request for request in core.kv.holders() if not core.kv.holding(request).host]  # type: ignore[union-attr]
        resident = sum(request.computed for request in holders if request.finish_reason is None)
        seen.append(resident)
        # A step under way has been decided, and its evictions are done, but it has computed nothing yet.
        assert usage._used == resident

    simulate(
        Replica(core, SimulatedExecutor(world.cost)), load(7, 24, stop_tokens=frozenset(range(70, 75))), on_events=look
    )
    assert max(seen) > 0
    assert seen[-1] == 0
    kv = usage.kv()
    assert 0 < kv["used_mean"] <= kv["allocated_mean"] <= 1
    if recipe != "orca":
        assert kv["preemptions"] > 0
        dropped = pressure is Recompute
        assert (kv["recomputed_tokens"] > 0) or not dropped
        assert (kv["swapped_out_bytes"] > 0) is not dropped
        assert kv["swapped_in_bytes"] <= kv["swapped_out_bytes"]


def test_steps_and_batches_are_counted() -> None:
    world = World("fcfs")
    done = run(world, load(3, 12))
    usage = usage_of(world)
    usage.observe(done.events)
    plans = [event.result.plan for event in done.events if isinstance(event, Computed)]
    assert usage.steps == len(plans)
    assert usage.batch_mean == pytest.approx(sum(len(plan.slices) for plan in plans) / len(plans))


def test_means_are_over_time() -> None:
    # 4 of 8 tokens are used from 4 s, one more each second; two of two blocks are allocated once it outgrows one.
    world = World("fcfs", cost=UnitCost(), device_blocks=2)
    done = run(world, [make(0, 4, 3)])
    usage = usage_of(world)
    usage.observe(done.events)
    assert done.end == 6.0
    assert usage.kv()["used_mean"] == pytest.approx((4 * 0 + 4 / 8 + 5 / 8) / 6)
    assert usage.kv()["allocated_mean"] == pytest.approx((4 * 1 / 2 + 1 + 1) / 6)


def test_the_series_is_thinned_and_still_spans_the_run() -> None:
    world = World("fcfs", cost=UnitCost())
    done = run(world, [make(number, 5, 38, arrival=43.0 * number) for number in range(40)])
    usage = usage_of(world)
    usage.observe(done.events)
    series = usage.series()
    planned = [event.now for event in done.events if isinstance(event, Planned)]
    assert len(planned) > 4 * POINTS
    assert POINTS / 3 < len(series["time_s"]) <= POINTS
    assert {len(values) for values in series.values()} == {len(series["time_s"])}
    assert series["time_s"][0] == planned[0]
    assert series["time_s"][-1] > 0.98 * planned[-1]
    gaps = [after - before for before, after in zip(series["time_s"], series["time_s"][1:], strict=False)]
    assert max(gaps) < 12 * min(gaps)
