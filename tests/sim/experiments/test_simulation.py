from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from skipjoin.config import ConfigError
from skipjoin.config.profile import write_profile
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event, Finished
from skipjoin.core.step import StepShape
from skipjoin.observe.record import Slo
from skipjoin.report.results import ResultsFile, load_results
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.simulation import run
from skipjoin.workload.traces import read_trace
from skipjoin.workload.workload import Replay, with_best_effort
from support.profiles import KEY, PROFILE
from support.recipes import SPELLED
from support.simulated import CELL, COST, SYSTEM, WORKLOAD, repeatable
from support.worlds import checkered, combinations, each_recipe, exhaustive


def test_another_seed_gives_another_record() -> None:
    assert repeatable(run(CELL)) != repeatable(run(replace(CELL, extent=replace(CELL.extent, seed=4))))


def test_records_round_trip_through_results_files(tmp_path) -> None:
    file = ResultsFile(tmp_path / "results.json")
    records = [run(replace(CELL, system=replace(SYSTEM, recipe=recipe))) for recipe in ("fcfs", "srpt")]
    for record in records:
        file.append(record)
    assert load_results([tmp_path / "results.json"]) == records


def test_requests_stop_at_their_true_length_below_max_tokens() -> None:
    asked = replace(CELL, system=replace(SYSTEM, max_tokens=500))
    lengths: list[tuple[int, int]] = []

    def collect(events: list[Event]) -> None:
        lengths.extend(
            (len(e.request.progress.output), e.request.max_tokens)
            for e in events
            if isinstance(e, Finished) and e.reason
        )

    record = run(asked, on_events=collect)
    assert sorted(length for length, _ in lengths) == sorted(job.output_tokens for job in CELL.jobs())
    assert {max_tokens for _, max_tokens in lengths} == {500}
    assert record["requests"]["finished"] == len(CELL.jobs())
    # On-demand recipes ignore `max_tokens`; recipes that reserve the maximum do not.
    assert record["jct_s"] == run(CELL)["jct_s"]
    orca = replace(SYSTEM, recipe=SPELLED["orca"])
    exact, fixed = (run(replace(CELL, system=replace(orca, max_tokens=tokens))) for tokens in ("exact", 500))
    assert fixed["jct_s"]["mean"] > exact["jct_s"]["mean"]
    assert run(replace(CELL, system=orca))["jct_s"]["mean"] > fixed["jct_s"]["mean"]


def test_the_oracle_recipe_knows_true_lengths() -> None:
    # With few slots, knowing lengths pays, and `max_tokens` does not mislead the oracle.
    busy = Cell(replace(SYSTEM, max_num_seqs=2, max_tokens=500), WORKLOAD, Extent(12.0, 12.0, 0))
    means = {
        recipe: run(replace(busy, system=replace(busy.system, recipe=recipe)))["jct_s"]["mean"]
        for recipe in ("fcfs", "srpt")
    }
    assert means["srpt"] < 0.7 * means["fcfs"]


def test_requests_that_cannot_fit_are_rejected_and_counted() -> None:
    record = run(replace(CELL, system=replace(SYSTEM, max_model_len=100)))
    counts = record["requests"]
    long = sum(job.prompt_tokens + job.output_tokens > 100 for job in CELL.jobs())
    assert (counts["rejected"], counts["submitted"]) == (long, len(CELL.jobs()))
    assert counts["finished"] == counts["submitted"] - long


def test_a_run_that_ends_early_counts_every_request() -> None:
    cut = replace(CELL, extent=replace(CELL.extent, until_s=7.0))
    record = run(cut)
    counts = record["requests"]
    arrived = sum(job.at <= 7.0 for job in CELL.jobs())
    assert counts["submitted"] == arrived
    assert counts["unfinished"] > 0
    assert record["duration_s"] == 7.0
    # An unfinished request counts as if it reached its true length now, whatever its `max_tokens`.
    asked = [run(replace(cut, system=replace(SYSTEM, max_tokens=tokens))) for tokens in ("exact", 500)]
    for unfinished in asked:
        assert unfinished["normalized_latency_s"] == record["normalized_latency_s"]


def test_trace_rows_have_their_own_deadlines_and_objectives(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    lines = ["arrival_s,prompt_tokens,output_tokens,deadline_s,priority,class,ttft_s"]
    lines += ["0,50,100,0.001,,,", "0,50,100,,9,,1e-3", "0,50,100,,1,,60", "0,50,100,,5,best-effort,"]
    file.write_text("\n".join(lines))
    order: list[int] = []

    def collect(events: list[Event]) -> None:
        order.extend(event.request.id for event in events if isinstance(event, Finished))

    cell = Cell(replace(SYSTEM, max_num_seqs=1), Replay(read_trace(file)), Extent(None, None, 0), Slo(tpot_s=100.0))
    record = run(cell, on_events=collect)
    assert order == [0, 2, 1, 3]
    assert (record["requests"]["finished"], record["requests"]["unfinished"]) == (3, 1)
    assert record["services"]["best-effort"]["requests"]["finished"] == 1
    # Of the three real-time requests, one missed its TTFT objective and another its deadline.
    slo = record["slo"]
    assert (slo["ttft_attained"], slo["tpot_attained"], slo["all_attained"]) == (0.666667, 0.666667, 0.333333)


def test_scaled_objectives_are_relative_to_a_light_load() -> None:
    loose, tight = (run(replace(CELL, slo_scale=scale))["slo"] for scale in (100.0, 1.0))
    assert loose["ttft_s"] == pytest.approx(100 * tight["ttft_s"])
    assert loose["all_attained"] > tight["all_attained"]
    fixed = run(replace(CELL, slo=Slo(jct_s=0.5)))["slo"]
    assert 0 < fixed["jct_attained"] < 1


@pytest.mark.parametrize(("recipe", "predictor"), [("alise", "constant:32"), ("fcfs", None)])
def test_scaled_objectives_use_forecasts_in_policies_and_the_truth_in_records(
    recipe: str, predictor: str | None
) -> None:
    system = replace(SYSTEM, recipe=recipe, predictor=predictor, max_num_seqs=4)
    finished: list[Finished] = []
    cell = replace(CELL, system=system, slo=Slo(jct_scale=1.5))
    record = run(
        cell, on_events=lambda events: finished.extend(event for event in events if isinstance(event, Finished))
    )
    jobs, slo = cell.jobs(), record["slo"]
    prompt = round(fmean(job.prompt_tokens for job in jobs))
    prefill_s = COST.step(StepShape(prefill=prompt, attention=prompt * (prompt + 1) // 2))
    decode_s = COST.step(StepShape(decodes=1, context=prompt))

    def bound_s(tokens: int) -> float:
        return 1.5 * (prefill_s + decode_s * tokens)

    expected = bound_s(32) if predictor else math.inf
    (found,) = {event.request.progress.target.jct_s for event in finished}
    assert found == pytest.approx(expected)
    attained = sum(
        event.now - event.request.arrival <= bound_s(len(event.request.progress.output)) for event in finished
    )
    assert 0 < attained < len(finished) == len(jobs)
    assert slo["jct_attained"] == slo["all_attained"] == pytest.approx(attained / len(jobs), rel=1e-5)
    assert slo["goodput_rps"] == pytest.approx(attained / record["duration_s"], rel=1e-4)
    assert (slo["jct_s"], slo["jct_scale"]) == (None, 1.5)


def test_service_classes_are_reported_separately_and_prioritized() -> None:
    classes = run(
        Cell(replace(SYSTEM, max_num_seqs=2), with_best_effort(WORKLOAD, 0.5), Extent(12.0, 12.0, 0)),
    )["classes"]
    assert sorted(classes) == ["best-effort", "real-time"]
    assert classes["real-time"]["ttft_s"]["mean"] < 0.5 * classes["best-effort"]["ttft_s"]["mean"]


def test_replicas_share_the_load() -> None:
    busy = Cell(replace(SYSTEM, max_num_seqs=4), WORKLOAD, Extent(12.0, 6.0, 0))
    one = run(busy)
    for rule in ("round-robin", "least-work"):
        four = run(replace(busy, system=replace(busy.system, replicas=4, dispatch=rule)))
        assert four["requests"] == one["requests"]
        assert four["jct_s"]["mean"] < 0.5 * one["jct_s"]["mean"]
        assert four["settings"]["dispatch"] == rule


@pytest.mark.parametrize(("recipe", "until_s"), checkered(["fcfs", "alise"], [math.inf, 4.0]))
def test_shards_give_the_record_of_the_whole(monkeypatch: pytest.MonkeyPatch, recipe: str, until_s: float) -> None:
    """The number of shards does not divide that of the replicas, and some requests are rejected."""
    system = replace(
        SYSTEM, recipe=SPELLED[recipe], replicas=7, max_num_seqs=3, max_model_len=230, predictor="noise:0.5"
    )
    cell = Cell(system, with_best_effort(WORKLOAD, 0.5), Extent(40.0, 5.0, 0, until_s=until_s), slo_scale=3.0)
    whole = run(cell)
    assert cell.shards == 1
    assert whole["requests"]["rejected"]
    monkeypatch.setattr("skipjoin.sim.experiments.cell.REPLICAS_PER_SHARD", 3)
    assert cell.shards == 3
    shares: list[float] = []
    assert repeatable(run(cell, on_share=shares.append)) == repeatable(whole)
    assert shares == sorted(shares)
    assert 0 < shares[-1] <= 1


@pytest.mark.exhaustive  # test_virtual_clock.py has the rules, and tests above the shards
def test_dispatch_rules_choose_within_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is small if a shard has many replicas; here there are four."""
    system = replace(SYSTEM, replicas=12, max_num_seqs=4, dispatch="least-work")
    cell = Cell(system, WORKLOAD, Extent(100.0, 3.0, 0))
    whole = run(cell)
    monkeypatch.setattr("skipjoin.sim.experiments.cell.REPLICAS_PER_SHARD", 4)
    parts = run(cell)
    assert parts["requests"] == whole["requests"]
    turns = run(replace(cell, system=replace(system, dispatch="round-robin")))
    assert parts["jct_s"]["mean"] < turns["jct_s"]["mean"]
    assert parts["jct_s"]["mean"] == pytest.approx(whole["jct_s"]["mean"], rel=0.1)


def approximate(value: Any) -> Any:
    """Return the value with numbers replaced by approximations to the digits that a record keeps."""
    if isinstance(value, dict):
        return {name: approximate(part) for name, part in value.items()}
    return pytest.approx(value, rel=1e-5, abs=1e-9) if isinstance(value, list | float) else value


@pytest.mark.parametrize(
    ("recipe", "rate_rps", "until_s"),
    [
        pytest.param(*values, marks=marks)
        for values, marks in combinations(
            ["econoserve", "fcfs", "orca", "sarathi"], [2.0, 10.0, 30.0], [math.inf, 5.0], parts=2
        )
    ],
)
def test_batched_simulation_of_steps_gives_the_record_of_single_steps(
    monkeypatch: pytest.MonkeyPatch, recipe: str, rate_rps: float, until_s: float
) -> None:
    """The rates are a light load, where most steps are batched, one with some evictions, and overload."""
    single = run(cramped(recipe, rate_rps, until_s), on_events=lambda events: None)
    batched: list[int] = []
    decode = EngineCore.decode

    def watched(core: EngineCore, since: float, ends: Sequence[float]) -> None:
        decode(core, since, ends)
        core.kv.check()
        batched.append(len(ends))

    monkeypatch.setattr(EngineCore, "decode", watched)
    assert repeatable(run(cramped(recipe, rate_rps, until_s))) == approximate(repeatable(single))
    assert rate_rps > 2.0 or sum(batched) > 0.3 * single["steps"]


@pytest.mark.parametrize("recipe", each_recipe(parts=4))
def test_batched_simulation_of_steps_changes_no_recipe(recipe: str) -> None:
    cell = cramped(recipe, 10.0, math.inf)
    assert repeatable(run(cell)) == approximate(repeatable(run(cell, on_events=lambda events: None)))


def cramped(recipe: str, rate_rps: float, until_s: float) -> Cell:
    system = replace(
        SYSTEM,
        recipe=SPELLED[recipe],
        kv_blocks=120,
        cpu_blocks=60,
        max_model_len=500,
        max_tokens=300,
        predictor="oracle",
    )
    return Cell(system, WORKLOAD, Extent(rate_rps, 5.5, 1, until_s=until_s))


def test_pipeline_stages_overlap() -> None:
    # Two stages hold two batches of two and serve more than one device with batches of two.
    busy = Cell(replace(SYSTEM, max_num_seqs=2), WORKLOAD, Extent(12.0, 6.0, 0))
    piped = replace(busy, system=replace(busy.system, stages=2))
    assert run(piped)["throughput_rps"] > 1.5 * run(busy)["throughput_rps"]


def test_scheduling_time_is_part_of_the_record() -> None:
    slow = run(replace(CELL, system=replace(SYSTEM, decision_s=0.005)))
    assert slow["breakdown_s"]["scheduling"] > 0
    assert run(CELL)["breakdown_s"]["scheduling"] == 0
    parts = slow["breakdown_s"]
    assert sum(parts.values()) == pytest.approx(slow["jct_s"]["mean"], rel=1e-4)


def test_a_trace_is_replayed_with_scaled_rate(tmp_path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n5,10,3\n6,20,1\n7.5,30,2\n")
    record = run(Cell(SYSTEM, Replay(read_trace(path), 2.0), Extent(None, None, 0)))
    assert record["requests"]["finished"] == 3
    assert record["workload"]["arrivals"] == "trace"
    assert 1.25 < record["duration_s"] < 1.5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("replicas", 0),
        ("kv_blocks", 0),
        ("max_tokens", 0),
        ("max_tokens", "all"),
        ("decision_s", -1.0),
        ("cpu_blocks", -1),
        ("dispatch", "random"),
        ("slo_s", float("nan")),
        ("recipe", "lifo"),
    ],
)
def test_errors_name_the_setting_out_of_bounds(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(SYSTEM, **{field: value})


def test_a_run_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request arrives"):
        Cell(SYSTEM, WORKLOAD, Extent(0.001, 1.0, 0)).check()


GIB = 1 << 30


def settings_of(machine: Machine, **settings: Any) -> dict[str, Any]:
    (system,) = machine.systems("fastserve", **settings)
    return system.describe()


def test_the_record_reports_the_size_of_the_cpu_tier() -> None:
    described = replace(SYSTEM, cpu_blocks=250, block_bytes=GIB // 100).describe()
    assert (described["cpu_blocks"], described["swap_gib"]) == (250, 2.5)
    assert run(CELL)["settings"]["cpu_blocks"] == 0


@pytest.mark.parametrize(
    ("hardware", "gib"),
    [
        ("a100-40gb", 72),
        ("a100-80gb", 128),
        ("v100-32gb", 32),
        ("h100-80gb", 128),
        ("h200-141gb", 128),
        ("a100-40gb:tp4pp2", 8 * 72),
        ("a100-40gb:tp8pp2", 16 * 72),
    ],
)
def test_the_default_cpu_tier_is_half_of_the_ram_per_gpu(hardware: str, gib: int) -> None:
    described = settings_of(Machine(hardware=hardware, model="opt-13b", kv_gib=1.0))
    # A block has 16 tokens of OPT-13B, with 4 x 40 layers x 5120 bytes each.
    block_bytes = 16 * 4 * 40 * 5120
    assert described["cpu_blocks"] == gib * GIB // block_bytes
    assert described["swap_gib"] == pytest.approx(gib, abs=block_bytes / GIB)


def test_the_cpu_tier_has_the_requested_size() -> None:
    described = [settings_of(Machine(hardware="a100-40gb", model="opt-13b", swap_gib=gib)) for gib in (0, 8.0)]
    assert [settings["cpu_blocks"] for settings in described] == [0, 8 * GIB // (16 * 4 * 40 * 5120)]
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"swap_gib must be in \[0, 1e\+06\], got"):
            settings_of(Machine(hardware="a100-40gb", model="opt-13b", swap_gib=wrong))


@pytest.mark.parametrize(("block_size", "ratio"), [(16, 0.625), exhaustive(32, 0.5625)])
def test_int8_kv_takes_less_of_the_cpu_tier_and_the_link(block_size: int, ratio: float) -> None:
    machine = Machine(hardware="a100-40gb", model="opt-13b", kv_gib=4, swap_gib=8, block_size=block_size)
    (plain,), (small,) = (
        replace(machine, swap_dtype=name).systems("fastserve", max_num_seqs=24) for name in ("auto", "int8")
    )
    assert small.cpu_blocks == pytest.approx(plain.cpu_blocks / ratio, abs=2)
    assert small.kv_blocks == plain.kv_blocks
    seconds = [system.cost.transfer(101) - system.cost.transfer(1) for system in (small, plain)]
    assert seconds[0] == pytest.approx(ratio * seconds[1])
    records = [run(Cell(system, WORKLOAD, Extent(20.0, 8.0, 3))) for system in (small, plain)]
    assert [record["settings"]["swap_dtype"] for record in records] == ["int8", "auto"]
    assert records[0]["settings"]["swap_gib"] == pytest.approx(8, abs=0.02)


def test_int8_kv_of_both_tiers_takes_half_of_the_memory_and_the_time() -> None:
    machine = Machine(hardware="a100-40gb", model="opt-13b", kv_gib=4, swap_gib=8)
    (plain,), (small,) = (replace(machine, kv_cache_dtype=name).systems("fastserve") for name in ("auto", "int8"))
    ratio = (128 + 4) / 256  # a head has 128 codes and a scale
    for one, other in ((small.kv_blocks, plain.kv_blocks), (small.cpu_blocks, plain.cpu_blocks)):
        assert one == pytest.approx(other / ratio, abs=2)
    assert small.moved_bytes == small.block_bytes == ratio * plain.block_bytes
    long, short = StepShape(0, 0, 4, 9000), StepShape(0, 0, 4, 1000)
    seconds = [system.cost.step(long) - system.cost.step(short) for system in (small, plain)]
    assert seconds[0] == pytest.approx(ratio * seconds[1])
    assert [system.describe().get("kv_cache_dtype") for system in (small, plain)] == ["int8", None]
    with pytest.raises(ConfigError, match="swap_dtype must be auto with kv_cache_dtype int8"):
        replace(machine, kv_cache_dtype="int8", swap_dtype="int8")


def test_int8_kv_needs_a_cpu_tier() -> None:
    for settings, text in (
        ({"swap_gib": 0.0}, "swap_gib must be above 0, got 0"),
        ({"swap_gib": 1e-6}, "cpu_blocks must be above 0, got 0"),
    ):
        with pytest.raises(ConfigError, match=f"swap_dtype int8 is for KV in CPU memory: {text}"):
            settings_of(Machine(hardware="a100-40gb", model="opt-13b", swap_dtype="int8", **settings))


def test_the_default_cpu_tier_of_a_profile_equals_its_kv_pool(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(PROFILE, path)
    described = settings_of(Machine(hardware=str(path), kv_gib=0.5))
    assert described["cpu_blocks"] == described["kv_blocks"] == GIB // 2 // 65536
    described = settings_of(Machine(hardware=str(path), kv_gib=0.5, swap_gib=0.25))
    assert described["cpu_blocks"] == described["kv_blocks"] // 2
    for name in ("swap_dtype", "kv_cache_dtype"):
        with pytest.raises(ConfigError, match=f"was measured with {name} auto, not int8"):
            settings_of(Machine(hardware=str(path), kv_gib=0.5, **{name: "int8"}))
    write_profile(replace(PROFILE, key=replace(KEY, swap_dtype="int8"), cpu_bytes_per_block=32768), path)
    described = settings_of(Machine(hardware=str(path), kv_gib=0.5, swap_dtype="int8"))
    assert described["cpu_blocks"] == 2 * described["kv_blocks"]
    with pytest.raises(ConfigError, match=r"kv_gib must be in \(0,"):
        settings_of(Machine(hardware=str(path), kv_gib=float("inf")))


def test_the_starvation_threshold_follows_step_times_or_the_objective() -> None:
    machine = Machine(hardware="a100-40gb", model="opt-13b")
    assert settings_of(machine)["starvation_s"] == pytest.approx(25.5, rel=0.05)
    assert settings_of(replace(machine, model="opt-2.7b"))["starvation_s"] == pytest.approx(8, rel=0.05)
    assert settings_of(machine, slo_s=1.5)["starvation_s"] == 150.0
    assert settings_of(machine, slo_s=1.5, recipe_params={"starvation_s": 4.0})["starvation_s"] == 4.0


def test_a_limited_link_slows_simulated_swaps() -> None:
    machine = Machine(hardware="a100-40gb:tp2", model="opt-13b", swap_bandwidth_gbps=8.0)
    (system,) = machine.systems("fastserve")
    # Each of two GPUs moves its half at 1 GB/s.
    assert system.cost.transfer(1) - system.cost.transfer(0) == pytest.approx(system.block_bytes / 2e9)
    (fast,) = replace(machine, swap_bandwidth_gbps=1e6).systems("fastserve")
    assert fast.cost.transfer(1) == replace(machine, swap_bandwidth_gbps=None).systems("fastserve")[0].cost.transfer(1)


def test_plans_in_flight_hide_the_time_of_decisions() -> None:
    slow = replace(SYSTEM, decision_s=0.005)
    ahead = replace(slow, pipeline_depth=2)
    one, two = (run(replace(CELL, system=system)) for system in (slow, ahead))
    assert two["throughput_tps"] > one["throughput_tps"]
    assert two["settings"]["pipeline_depth"] == 2
    assert "pipeline_depth" not in one["settings"]
    with pytest.raises(ConfigError, match="pipeline_depth must be 1 with several stages"):
        replace(SYSTEM, stages=2, pipeline_depth=2)


def test_recipes_use_their_parameters_and_records_report_them() -> None:
    machine = Machine(hardware="a100-40gb", model="opt-13b", kv_gib=4)
    given = {"starvation_s": 4.0, "chunk_tokens": 64}
    first, second = machine.systems("sarathi,fastserve", recipe_params=given)
    records = [run(replace(CELL, system=system, extent=Extent(8.0, 1.0, 3))) for system in (first, second)]
    assert records[0]["recipe_params"] == {"chunk_tokens": 64}
    assert records[1]["recipe_params"].items() >= {"starvation_s": 4.0, "quantum_s": None, "paced": True}.items()
    with pytest.raises(ConfigError, match="starvation_s needs recipe fastserve: fcfs has no parameters; sarathi"):
        machine.systems("fcfs,sarathi", recipe_params=given)
    with pytest.raises(ConfigError, match="starvation_bound_s needs max_live_requests"):
        machine.systems("fastserve", recipe_params={"starvation_bound_s": 60.0})
