"""KV and steps over time, compared with a count over all requests after every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest

from skipjoin.core.events import Computed, Event, Moved, Planned
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.step import LINK, Direction, Move, Slice, StepPlan, StepResult
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.observe.record import Record, add_usage, rounded
from skipjoin.observe.residency import Residency
from skipjoin.observe.usage import POINTS, EngineUsage
from skipjoin.sim.driver import Replica, simulate
from support.load import load, make
from support.policies import EVICTIONS, SOME_SYSTEMS, OnCall, Patchwork, UnitCost
from support.watch import Stepper, World, run
from support.worlds import combinations

BLOCK_BYTES = 1000


def usage_of(world: World) -> EngineUsage:
    return EngineUsage(device_blocks=world.device_blocks, block_size=world.block_size, block_bytes=BLOCK_BYTES)


def swapped(usage: EngineUsage) -> tuple[int, int]:
    kv = usage.kv()
    return kv["swapped_out_bytes"], kv["swapped_in_bytes"]


def failing(share: float) -> Callable[[Move], bool]:
    draw = random.Random(11)
    return lambda move: draw.random() < share


def on_device(kv: KVLedger, request: Request) -> int:
    """Return the number of the request's tokens with KV on the device, without blocks in transit."""
    held = kv.blocks_of(request)
    move, blocks = held.transit.move, held.device
    carried = () if move is None else move.source if move.direction is Direction.OUT else move.target
    return kv.tokens_in(request, blocks.index(carried[0]) if carried and carried[0] in blocks else len(blocks))


@pytest.mark.parametrize(
    ("recipe", "eviction", "depth_and_failures"),
    [
        pytest.param(*values, marks=marks)
        for values, marks in combinations(
            SOME_SYSTEMS, [*sorted(EVICTIONS), "patchwork"], list(product([1, 2], [0.0, 0.5, 1.0])), parts=4
        )
    ],
)
def test_used_kv_is_the_computed_kv_on_the_device(
    recipe: str, eviction: str, depth_and_failures: tuple[int, float]
) -> None:
    depth, fails = depth_and_failures
    world = World(
        recipe, depth, overlap=depth > 1, eviction=(EVICTIONS | {"patchwork": lambda: Patchwork(1)})[eviction]
    )
    core, usage = world.core(), usage_of(world)
    seen: list[float] = []
    bytes_moved = dict.fromkeys(LINK, 0)

    def compare(events: list[Event]) -> None:
        usage.observe(events)
        resident = sum(
            on_device(core.kv, holder) for holder in core.kv.holders() if holder.progress.finish_reason is None
        )
        seen.append(resident)
        # A step in flight has made its preemptions but has computed nothing yet.
        assert usage._used == resident
        for event in events:
            if isinstance(event, Moved):
                bytes_moved[event.move.direction] += len(event.move.source) * BLOCK_BYTES
        assert swapped(usage) == tuple(bytes_moved.values())

    executor = SimulatedExecutor(world.cost, fails=failing(fails))
    simulate(Replica(core, executor), load(7, 24, stop_tokens=frozenset(range(70, 75))), on_events=compare)
    assert max(seen) > 0
    assert seen[-1] == 0
    kv = usage.kv()
    assert 0 < kv["used_mean"] <= kv["allocated_mean"] <= 1
    if recipe == "static":
        return
    assert sum(kv["preemptions"].values()) > 0
    if recipe == "econoserve":  # its requests pause and keep their KV, where others are preempted
        return
    moves = eviction not in ("recompute", "defer")
    assert (kv["recomputed_tokens"] > 0) or (moves and not fails)
    assert (kv["swapped_out_bytes"] > 0) == (moves and fails < 1)
    assert kv["swapped_in_bytes"] <= kv["swapped_out_bytes"]


@pytest.mark.parametrize(("is_blocking", "wasted"), [(True, 0), (False, 2 * BLOCK_BYTES)])
def test_a_request_uses_what_its_step_swaps_in_first(is_blocking: bool, wasted: int) -> None:
    """An overlapped move arrives after the step, so the KV that leaves again without another step was not used."""
    request, use = make(0, 32), Residency(block_size=16, block_bytes=BLOCK_BYTES)
    moves = [Move(direction, request, (0, 1), (0, 1), 32) for direction in (Direction.IN, Direction.OUT)]
    slices = (Slice(request, 31, 1, True, False, ()),)
    plan = StepPlan(0, slices, blocking=(moves[0],)) if is_blocking else StepPlan(0, slices, overlapped=(moves[0],))
    use.observe(Computed(StepResult(plan, (0,), 1.0), 1.0))
    for move in moves:
        use.observe(Moved(move, 1.0))
    assert use.wasted_bytes == wasted


def test_plans_that_only_wait_are_not_steps() -> None:
    """The second request's KV is in transit when the first finishes, so no request can run until it completes."""
    eviction = OnCall()
    world = World("fcfs", eviction=lambda: eviction)
    stepper, usage = Stepper(world.core()), usage_of(world)
    leaving = make(1, 8, 4)
    stepper.add(make(0, 8, 2), leaving)
    stepper.step()
    stepper.late, eviction.out = 3, [leaving]
    waits = [not stepper.step().slices for _ in range(4)]
    assert waits == [False, True, True, True]
    stepper.late = 0
    stepper.drain()
    usage.observe(stepper.events)
    assert (usage.steps, usage.slices) == (5, 6)


def test_steps_and_batch_sizes_are_counted() -> None:
    world = World("fcfs")
    done = run(world, load(3, 12))
    usage = usage_of(world)
    usage.observe(done.events)
    plans = [event.result.plan for event in done.events if isinstance(event, Computed)]
    assert usage.steps == len(plans)
    assert usage.slices == sum(len(plan.slices) for plan in plans)
    sizes = [sum(piece.tokens for piece in plan.slices) for plan in plans]
    record: Record = {}
    add_usage(record, [usage, usage], target_tokens=10)
    assert record["forward"]["mean"] == pytest.approx(sum(sizes) / len(sizes), rel=1e-5)
    assert record["forward"]["at_target"] == pytest.approx(sum(size >= 9 for size in sizes) / len(sizes), rel=1e-5)
    assert (record["kv"]["used_mean"], record["steps"]) == (rounded(usage.kv()["used_mean"]), 2 * usage.steps)


def test_means_are_weighted_by_time() -> None:
    # 4 of 8 tokens are used from 4 s on and one more each second; the second block is allocated with the fifth token.
    world = World("fcfs", cost=UnitCost(), device_blocks=2)
    done = run(world, [make(0, 4, 3)])
    usage = usage_of(world)
    usage.observe(done.events)
    assert done.end == 6.0
    assert usage.kv()["used_mean"] == pytest.approx((4 * 0 + 4 / 8 + 5 / 8) / 6)
    assert usage.kv()["allocated_mean"] == pytest.approx((4 * 1 / 2 + 1 + 1) / 6)


def test_the_series_is_thinned_and_spans_the_run() -> None:
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
