from __future__ import annotations

import gc
import math
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from functools import partial
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.events import Admitted, Arrived, Computed, Event, Finished, Preempted, Preemption, Token
from skipjoin.core.prefixes import NamedPrefix
from skipjoin.core.request import FinishReason, Request, ServiceClass, Target
from skipjoin.core.step import Direction
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.observe.metric_snapshot import Snapshot
from skipjoin.observe.metric_table import ENGINE_METRICS
from skipjoin.observe.metrics import EngineMetrics, Histogram
from skipjoin.observe.requests import RequestFacts, RequestLog
from skipjoin.observe.stages import StageUse
from skipjoin.observe.timeline import Timeline
from skipjoin.observe.usage import EngineUsage
from skipjoin.policies.eviction import Recompute
from skipjoin.sim.driver import Replica, simulate
from support.load import changed, load, make
from support.policies import COST, SOME_SYSTEMS, Chaos, SwapAll
from support.watch import Stepper, World, run
from support.worlds import worlds

WORLDS = worlds(SOME_SYSTEMS, [(1, False, 1), (2, True, 1)], parts=4)
BLOCK_BYTES = 1000
HOW = ("pause", "spill", "swap", "drop")


def metrics_of(world: World, *, is_compressed: bool = False) -> EngineMetrics:
    pool = {"device_blocks": world.device_blocks, "block_size": world.block_size, "block_bytes": BLOCK_BYTES}
    return EngineMetrics(**pool, is_compressed=is_compressed)


def count_and_sum(snapshot: Snapshot, name: str) -> tuple[float, Any]:
    row = snapshot.summed(name)
    return sum(row[:-1]), row[-1]


def by_label(snapshot: Snapshot, name: str) -> dict[str, float]:
    (metric,) = (metric for metric in ENGINE_METRICS if metric.name == name)
    return dict(zip(metric.values, snapshot.summed(name), strict=True))


def test_a_request_dropped_by_the_executor_counts_as_an_error() -> None:
    """It is an error in the metrics, the request log and the timeline, and no request counts as running."""
    world = World(depth=2, overlap=True)
    done = run(world, load(5, 20), fails_slice=lambda piece: piece.request.id % 4 == 0)
    metrics, facts, file = metrics_of(world), list[RequestFacts](), StringIO()
    metrics.observe(done.events)
    RequestLog(facts.append).observe(done.events)
    timeline = Timeline(file)
    timeline.observe(done.events)
    timeline.close()
    reasons = by_label(metrics.snapshot(), "request_success_total")
    assert {name: count for name, count in reasons.items() if count} == {"length": 15, "error": 5}
    assert metrics.snapshot().summed("num_requests_running") == metrics.snapshot().summed("num_requests_waiting") == [0]
    assert {fact.id for fact in facts if not fact.is_complete} == {0, 4, 8, 12, 16}
    assert file.getvalue().count('"left":"error"') == 5


@pytest.mark.parametrize("world", WORLDS)
def test_metrics_of_a_run_match_its_events(world: World) -> None:
    done = run(world, load(5, 20))
    metrics = metrics_of(world)
    metrics.observe(done.events)
    found = metrics.snapshot()

    facts: list[RequestFacts] = []
    RequestLog(facts.append).observe(done.events)
    usage = EngineUsage(device_blocks=world.device_blocks, block_size=world.block_size, block_bytes=BLOCK_BYTES)
    usage.observe(done.events)
    outputs = [len(request.progress.output) for request in done.requests]
    prompts = [len(request.prompt) for request in done.requests]

    assert found.summed("generation_tokens_total") == [sum(outputs)]
    assert found.row("prompt_tokens_total") == [sum(prompts)]
    assert by_label(found, "request_success_total") == {
        "stop": 0,
        "length": 20,
        "abort": 0,
        "deadline": 0,
        "error": 0,
    }
    assert count_and_sum(found, "request_prompt_tokens") == (20, sum(prompts))
    assert count_and_sum(found, "request_generation_tokens") == (20, sum(outputs))
    assert count_and_sum(found, "request_params_max_tokens") == (20, sum(outputs))
    assert count_and_sum(found, "inter_token_latency_seconds")[0] == sum(outputs) - 20
    steps = [event.result for event in done.events if isinstance(event, Computed)]
    computed = sum(piece.tokens for result in steps for piece in result.plan.slices)
    # Plans without slices, which only give moves time, are not steps.
    assert found.row("engine_steps_total") == [sum(bool(plan[1]) for _, plan in done.trace)] == [usage.steps]
    assert count_and_sum(found, "iteration_tokens_total")[1] == computed
    # All known tokens except each request's last are computed once; discarded samples needed a computation too.
    assert found.row("recomputed_tokens_total") == [computed - sum(prompts) - sum(outputs) + 20]
    assert found.row("recomputed_tokens_total") == [usage.recomputed_tokens]
    preempted = Counter(event.how.name.lower() for event in done.events if isinstance(event, Preempted))
    assert by_label(found, "num_preemptions_total") == usage.kv()["preemptions"] == {how: preempted[how] for how in HOW}
    assert preempted.total() == sum(fact.preemptions for fact in facts)
    assert sum(found.row("swap_out_bytes_total")) == usage.kv()["swapped_out_bytes"]
    assert sum(found.row("swap_in_bytes_total")) == usage.kv()["swapped_in_bytes"]
    assert found.row("swap_stall_seconds_total")[0] == pytest.approx(sum(result.moving for result in steps))
    assert found.row("swap_delay_seconds_total")[0] == pytest.approx(sum(fact.swapping_s for fact in facts))
    latencies: dict[str, list[float | None]] = {
        "time_to_first_token_seconds": [fact.ttft(0.0) for fact in facts],
        "e2e_request_latency_seconds": [fact.jct(0.0) for fact in facts],
        "request_queue_time_seconds": [fact.queue(0.0) for fact in facts],
        "request_prefill_time_seconds": [fact.prefill(0.0) for fact in facts],
        "request_decode_time_seconds": [fact.decode() for fact in facts],
        "request_time_per_output_token_seconds": [fact.tpot(0.0) for fact in facts],
    }
    for name, values in latencies.items():
        known = [value for value in values if value is not None]
        assert count_and_sum(found, name) == pytest.approx((len(known), sum(known)))
    # The phases of a request add up, and so do the gaps between its tokens.
    parts = [count_and_sum(found, f"request_{part}_time_seconds")[1] for part in ("prefill", "decode", "inference")]
    assert parts[0] + parts[1] == pytest.approx(parts[2])
    assert count_and_sum(found, "inter_token_latency_seconds")[1] == pytest.approx(parts[1])
    gauges = {metric.name: found.summed(metric.name) for metric in ENGINE_METRICS if metric.kind == "gauge"}
    assert gauges.pop("batch_cap") == [world.max_seqs]
    assert not any(map(any, gauges.values()))


@pytest.mark.parametrize("world", WORLDS)
def test_events_count_the_same_in_one_call_or_in_several(world: World) -> None:
    """Metrics depend on events alone, never on the present state of a request."""
    done = run(world, load(6, 16))
    whole, parts = metrics_of(world), metrics_of(world)
    whole.observe(done.events)
    for event in done.events:
        parts.observe([event])
    rows = zip(ENGINE_METRICS, whole.snapshot().rows, parts.snapshot().rows, strict=True)
    assert all(one == pytest.approx(other) for _, one, other in rows)


@pytest.mark.parametrize("stages", [1, 2])
def test_stage_metrics_match_the_step_results(stages: int) -> None:
    world = World("fastserve", depth=2, stages=stages)
    done = run(world, load(5, 20))
    metrics, use = metrics_of(world), StageUse()
    metrics.observe(done.events)
    use.observe(done.events)
    found = metrics.snapshot()
    busy, idle = found.row("stage_busy_seconds_total"), found.row("stage_idle_seconds_total")
    assert (busy, idle) == ([sum(use.busy)], [sum(use.idle)])
    steps = [event.result for event in done.events if isinstance(event, Computed)]
    assert busy[0] == pytest.approx(sum(result.seconds for result in steps) if stages > 1 else 0.0)
    assert (idle[0] > 0) == (stages > 1)


@pytest.mark.parametrize("eviction", [Recompute, SwapAll])
@pytest.mark.parametrize("overlap", [False, True])
def test_gauges_follow_the_engine(eviction: type[Recompute], overlap: bool) -> None:
    world = World("fastserve", 1 + overlap, overlap, eviction, device_blocks=12)
    core = world.core()
    stepper, metrics = Stepper(core), metrics_of(world, is_compressed=True)
    plain = metrics_of(world)
    seen = 0
    swapped = 0.0
    stepper.add(*(make(number, 8, 12) for number in range(8)))
    while core.requests or core.plans:
        if stepper.start() is None:
            stepper.finish()
        for collector in (metrics, plain):
            collector.observe(stepper.events[seen:])
        seen = len(stepper.events)
        found = metrics.snapshot()
        assert plain.snapshot().row("kv_compressed_bytes") == [0]
        running, waiting = found.summed("num_requests_running")[0], found.summed("num_requests_waiting")[0]
        assert running + waiting == len(core.requests)
        assert running >= (len(core.plans[-1].slices) if core.plans and not overlap else 0)
        holdings = ((holder, core.kv.blocks_of(holder)) for holder in core.kv.holders())
        in_cpu_tier = {
            one: len(held.cpu) for one, held in holdings if held and held.cpu and held.moving is not Direction.OUT
        }
        for piece in (piece for plan in core.plans for piece in plan.slices):
            in_cpu_tier.pop(piece.request, None)
        assert found.row("num_requests_swapped") == [len(in_cpu_tier)]
        assert found.row("kv_compressed_bytes") == [BLOCK_BYTES * sum(in_cpu_tier.values())]
        swapped += len(in_cpu_tier)
        if core.plans:
            assert 0 < found.row("kv_cache_usage_perc")[0] <= 1
    assert (swapped > 0) == (eviction is SwapAll)
    assert metrics.snapshot().row("kv_cache_usage_perc") == [0]


def test_finish_reasons_are_counted_separately() -> None:
    stepper = Stepper(World(max_seqs=2).core())
    stepper.add(make(0, 8, 9), make(1, 8, 9, deadline=0.015), make(2, 8, 9, deadline=0.005), make(3, 8, 9))
    stepper.step()
    stepper.core.abort(0, stepper.now)
    stepper.drain()
    metrics = metrics_of(World())
    metrics.observe(stepper.events)
    found = metrics.snapshot()
    assert by_label(found, "request_success_total") == {"stop": 0, "length": 1, "abort": 1, "deadline": 2, "error": 0}
    assert found.row("deadline_dropped_total") == [2]
    # The request that never ran counts its whole life as queueing and has no phases.
    assert count_and_sum(found, "request_queue_time_seconds")[0] == 4
    assert count_and_sum(found, "request_inference_time_seconds")[0] == 3
    assert found.summed("generation_tokens_total") == [sum(isinstance(event, Token) for event in stepper.events)]


def objectives_of(request: Request, end: Callable[[Stepper], object] | None = None) -> dict[str, list[str]]:
    stepper = Stepper(World().core())
    stepper.add(request)
    for _ in range(3):
        stepper.step()
    if end is not None:
        end(stepper)
    stepper.drain()
    metrics = metrics_of(World())
    metrics.observe(stepper.events)
    found = metrics.snapshot()
    return {
        name: [
            objective for objective, times in by_label(found, f"slo_{name}_total").items() for _ in range(int(times))
        ]
        for name in ("attained", "missed")
    }


def test_objectives_are_counted_as_soon_as_they_are_decided() -> None:
    """Five tokens in steps of 10 ms mean a TTFT and a TPOT of 10 ms and a JCT of 50 ms."""

    def ask(*target: float, **fields: Any) -> Request:
        return make(0, 4, 5, target=Target(*target), **fields)

    def abort(stepper: Stepper, reason: FinishReason = FinishReason.ABORT) -> None:
        stepper.core.abort(0, stepper.now, reason)

    assert objectives_of(make(0, 4, 5)) == {"attained": [], "missed": []}
    assert objectives_of(ask(0.011, 0.011, 0.051)) == {"attained": ["ttft", "tpot", "jct"], "missed": []}
    assert objectives_of(ask(0.009, 0.009, 0.049)) == {"attained": [], "missed": ["ttft", "tpot", "jct"]}
    assert objectives_of(ask(math.inf, math.inf, 0.049)) == {"attained": [], "missed": ["jct"]}
    # A stop counts like any other end. After an abort by the client, only objectives decided before count.
    stop = partial(abort, reason=FinishReason.STOP)
    assert objectives_of(ask(0.011, 0.011, 0.031), stop) == {"attained": ["ttft", "tpot", "jct"], "missed": []}
    assert objectives_of(ask(0.011, 0.011, 0.031), abort) == {"attained": ["ttft"], "missed": []}
    assert objectives_of(ask(0.011, 0.011, 0.029), abort) == {"attained": ["ttft"], "missed": ["jct"]}
    assert objectives_of(ask(0.011, 0.011, 9.0, deadline=0.025)) == {"attained": ["ttft"], "missed": ["tpot", "jct"]}
    # A target that depends on the output length is known once the output is complete.
    late, exact = ask(math.inf, math.inf, 0.049), Target(jct_s=0.051)
    assert objectives_of(late, lambda stepper: late.progress.expect(None, exact)) == {"attained": ["jct"], "missed": []}
    # A request resumed from another engine has no first token here.
    assert objectives_of(ask(0.001, 0.001, 9.0, resumed=[7])) == {"attained": ["jct"], "missed": []}


@pytest.mark.parametrize("overlap", [False, True])
def test_finished_requests_are_released(overlap: bool) -> None:
    """A stop token ends a request while a plan in flight still holds it; an abort may come at any time."""
    world = World("fastserve", 1 + overlap, overlap, lambda: Chaos(1))
    metrics = metrics_of(world)
    stepper = Stepper(world.core())  # tokens are positions
    stepper.add(*(make(number, 5, 30, stop_tokens=frozenset({12 + number})) for number in range(8)))
    for number in range(8):
        stepper.start()
        if number % 3 == 0:
            stepper.core.abort(number, stepper.now)
        stepper.finish()
    stepper.drain()
    metrics.observe(stepper.events)
    reasons = {event.reason for event in stepper.events if isinstance(event, Finished)}
    assert reasons == {FinishReason.STOP, FinishReason.ABORT}
    references = [weakref.ref(event.request) for event in stepper.events if isinstance(event, Arrived)]
    del stepper
    gc.collect()
    assert len(references) == 8
    assert [reference() for reference in references if reference() is not None] == []


def test_a_request_aborted_during_its_swap_out_does_not_count_as_swapped() -> None:
    world = World("fastserve", eviction=lambda: Chaos(3))
    core, metrics = world.core(), metrics_of(world)
    stepper = Stepper(core)
    stepper.add(*(make(number, 10, 20) for number in range(12)))
    aborted = 0
    while core.requests:
        stepper.start()
        moving = [holder for holder in core.kv.holders() if core.kv.blocks_of(holder).moving is Direction.OUT]  # type: ignore[union-attr]
        aborted += sum(core.abort(request.id, stepper.now) for request in moving)
        stepper.finish()
    metrics.observe(stepper.events)
    assert aborted > 1
    assert metrics.snapshot().row("num_requests_swapped") == [0]


def test_swaps_are_counted_by_direction_and_by_whether_they_block() -> None:
    world = World("fastserve", eviction=lambda: Chaos(3))
    done = run(world, load(5, 20))
    metrics = metrics_of(world)
    metrics.observe(done.events)
    expected = {Direction.OUT: [0, 0], Direction.IN: [0, 0]}
    for event in done.events:
        if isinstance(event, Computed):
            for proactive, moves in enumerate((event.result.plan.blocking, event.result.plan.overlapped)):
                for move in moves:
                    expected[move.direction][proactive] += BLOCK_BYTES * len(move.source)
    found = metrics.snapshot()
    assert found.row("swap_out_bytes_total") == expected[Direction.OUT]
    assert found.row("swap_in_bytes_total") == expected[Direction.IN]
    assert all(expected[Direction.OUT])
    assert any(isinstance(event, Preempted) and event.how is Preemption.SWAP for event in done.events)


def test_service_classes_are_counted_separately() -> None:
    targets = {True: Target(jct_s=1e9), False: Target()}
    requests = [changed(request, target=targets[request.is_best_effort]) for request in load(5, 20, best_effort=0.5)]
    done = run(World("fcfs"), requests)
    metrics, facts = metrics_of(World()), list[RequestFacts]()
    metrics.observe(done.events)
    RequestLog(facts.append).observe(done.events)
    found = metrics.snapshot()
    by_name = {metric.name: metric for metric in ENGINE_METRICS if metric.by_class}

    def parts(name: str) -> list[list[float]]:
        return [list(part) for part in by_name[name].per_class(found.row(name))]

    for is_best_effort, service in enumerate(ServiceClass):
        own = [fact for fact in facts if fact.service is service]
        assert len(own) > 4
        assert parts("generation_tokens_total")[is_best_effort] == [sum(fact.output_tokens for fact in own)]
        assert parts("slo_attained_total")[is_best_effort] == [0, 0, len(own) * is_best_effort]
        assert sum(parts("request_success_total")[is_best_effort]) == len(own)
        assert sum(parts("num_preemptions_total")[is_best_effort]) == sum(fact.preemptions for fact in own)
        gaps = sum(fact.output_tokens - 1 for fact in own)
        counts = {"time_to_first_token": len(own), "e2e_request_latency": len(own), "inter_token_latency": gaps}
        for name, count in counts.items():
            assert sum(parts(f"{name}_seconds")[is_best_effort][:-1]) == count
        assert parts("request_queue_time_seconds")[is_best_effort][-1] == pytest.approx(
            sum(fact.queue(0) for fact in own)
        )


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=5, unique=True),
    st.lists(st.tuples(st.floats(0, 120), st.integers(1, 3))),
)
def test_histogram_buckets_include_their_upper_bound(bounds: list[float], values: list[tuple[float, int]]) -> None:
    bounds.sort()
    row: list[float] = [0] * (len(bounds) + 2)
    histogram = Histogram(bounds, row)
    expanded: list[float] = []
    for value, times in values:
        histogram.observe(value, times)
        expanded += [value] * times
    expanded.sort()
    for index, bound in enumerate(bounds):
        assert sum(row[: index + 1]) == sum(value <= bound for value in expanded)
    assert sum(row[:-1]) == len(expanded)
    assert row[-1] == pytest.approx(sum(expanded))
    assert sum(row[:1]) == bisect_left([value > bounds[0] for value in expanded], True)


def test_prefix_hits_count_at_the_first_admission() -> None:
    metrics = metrics_of(World())
    named = partial(NamedPrefix, [1, 2], 16, 16)
    first, resumed = make(0, 40, prefix=named()), make(1, 40, prefix=named(), resumed=[7])
    unprefixed = make(2, 40)
    metrics.observe(Arrived(request, 0.0) for request in (first, resumed, unprefixed))
    metrics.observe(
        [
            Admitted(first, 0.0, 32, 12),
            Admitted(resumed, 0.0, 32, is_first=False),
            Admitted(unprefixed, 0.0),
            Admitted(first, 1.0, 16, is_first=False),
        ]
    )
    metrics.measured({"kv_cached_blocks": [3], "kv_cpu_cached_blocks": [4], "kv_shared_blocks": [2]})
    found = metrics.snapshot()
    assert (found.row("prefix_cache_queries_total"), found.row("prefix_cache_hits_total")) == ([40], [20, 12])
    assert (found.row("kv_cached_blocks"), found.row("kv_cpu_cached_blocks")) == ([3], [4])
    assert found.row("kv_shared_blocks") == [2]


def test_a_snapshot_does_not_change() -> None:
    stepper, metrics = Stepper(World().core()), metrics_of(World())
    stepper.add(make(0))
    stepper.step()
    metrics.observe(stepper.events)
    before = metrics.snapshot()
    kept = [row.copy() for row in before.rows]
    seen = len(stepper.events)
    stepper.drain()
    metrics.observe(stepper.events[seen:])
    assert before.rows == kept
    assert metrics.snapshot().rows != kept
    assert [reason.value for reason in FinishReason] == list(by_label(before, "request_success_total"))


def test_a_stopped_engine_runs_nothing_and_keeps_its_counters() -> None:
    stepper, metrics = Stepper(World().core()), metrics_of(World())
    stepper.add(make(0, 8, 9))
    stepper.step()
    metrics.observe(stepper.events)
    snapshot = metrics.snapshot()
    assert snapshot.summed("num_requests_running") == [1]
    assert snapshot.at_rest().summed("num_requests_running") == [0]
    assert snapshot.at_rest().row("kv_cache_usage_perc") == [0]
    assert snapshot.at_rest().summed("generation_tokens_total") == [1]


def rows_of(world: World, requests: list[Request], name: str) -> list[tuple[list[float], list[Request]]]:
    """Return the row of a metric after the events of each moment, as a server sends it, and the live requests."""
    core, metrics = world.core(), metrics_of(world)
    recipe, found = core.scheduler.policies.measured, list[tuple[list[float], list[Request]]]()

    def observe(events: list[Event]) -> None:
        metrics.observe(events)
        if recipe is not None:
            metrics.measured(recipe.measure(core.trace[-1][0] if core.trace else 0.0))
        found.append((metrics.snapshot().row(name), list(core.requests.values())))

    simulate(Replica(core, SimulatedExecutor(COST)), requests, on_events=observe)
    return found


@pytest.mark.parametrize("weight", [None, 2.0])
def test_each_live_request_has_a_level_that_only_fastserve_counts(weight: float | None) -> None:
    world = World("fastserve", fair_output_weight=weight)
    found = rows_of(world, load(1, 20, priorities=(0, 1)), "queue_requests")
    assert all(sum(row) == len(live) for row, live in found)
    assert max(sum(map(bool, row)) for row, _ in found) > 2
    (demotions,), _ = rows_of(world, load(1, 20), "queue_demotions_total")[-1]
    (promotions,), _ = rows_of(world, load(1, 20), "queue_promotions_total")[-1]
    assert (demotions > 20, promotions > 0) == (True, True)
    assert not any(sum(row) for row, _ in rows_of(World("fcfs"), load(1, 20), "queue_requests"))


def test_each_real_time_request_of_bros_is_in_time_or_late() -> None:
    found = rows_of(World("bros"), load(1, 20, rate=300.0, best_effort=0.3), "deadline_requests")
    assert all(sum(row) == sum(not request.is_best_effort for request in live) for row, live in found)
    assert max(late for (_, late), _ in found) > 0


def test_hosted_requests_are_counted_while_their_reservation_is_nested() -> None:
    requests = load(1, 20, prompts=(1, 20), outputs=(30, 120))
    hosted = [row for row, _ in rows_of(World("econoserve", device_blocks=60), requests, "kv_hosted_requests")]
    assert (max(hosted) > [0], hosted[-1]) == (True, [0])


def test_slack_is_what_a_request_leaves_of_its_objective() -> None:
    requests = [make(number, 8, 9, target=Target(ttft_s=10.0)) for number in range(3)]
    done = run(world := World(), requests)
    metrics = metrics_of(world)
    metrics.observe(done.events)
    found = metrics.snapshot()
    assert count_and_sum(found, "slo_ttft_used_ratio")[0] == 3 == sum(found.row("slo_attained_total"))
    ttft = count_and_sum(found, "time_to_first_token_seconds")[1]
    assert count_and_sum(found, "slo_ttft_used_ratio")[1] == pytest.approx(ttft / 10)
    assert count_and_sum(found, "slo_jct_used_ratio")[0] == 0
