from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from skipjoin.cli import app
from skipjoin.config import ConfigError
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.simulation import run
from skipjoin.workload.workload import synthetic
from support.simulated import CELL, SYSTEM, WORKLOAD, repeatable
from support.worlds import one_in

# Requests have 62.5 bytes of KV per token: a mean prompt of 104 tokens takes 52 ms.
SPLIT = replace(SYSTEM, replicas=4, prefill_replicas=2, cpu_blocks=300, network_gbps=0.001)
BYTES_PER_S = 125e3


@pytest.mark.parametrize("recipe", one_in(4, ["fcfs", "sarathi", "alise", "econoserve"]))
def test_each_prompt_is_computed_once_and_sent_over_the_link(recipe: str) -> None:
    cell = replace(CELL, system=replace(SPLIT, recipe=recipe))
    record, jobs = run(cell), cell.jobs()
    prompts = sum(job.prompt_tokens for job in jobs)
    assert record["requests"]["finished"] == len(jobs)
    roles, transfer = record["roles"], record["transfer"]
    assert (roles["prefill"]["prompt_tokens"], roles["decode"]["prompt_tokens"]) == (prompts, 0)
    assert roles["decode"]["kv"]["recomputed_tokens"] == 0
    assert transfer["requests"] == len(jobs)
    assert transfer["bytes"] == pytest.approx(62.5 * prompts, abs=1)
    assert transfer["seconds_mean"] * len(jobs) == pytest.approx(transfer["bytes"] / BYTES_PER_S, rel=0.01)
    assert repeatable(run(cell)) == repeatable(record)
    # The times on both replicas and on the network add up to the latency of a request.
    breakdown, mean = record["breakdown_s"], record["jct_s"]["mean"]
    assert sum(breakdown.values()) == pytest.approx(mean, rel=1e-4)
    assert sum(record["wait_s"].values()) + breakdown["execution"] == pytest.approx(mean, rel=1e-3)
    assert record["wait_s"]["kv_in_transit"] >= transfer["seconds_mean"] * (1 - 1e-4)
    # The first token comes from the prefill replica, so the network delays only the others.
    fast = run(replace(cell, system=replace(cell.system, network_gbps=100.0)))
    assert record["ttft_s"] == pytest.approx(fast["ttft_s"], rel=0.05)
    assert record["tpot_s"]["mean"] > fast["tpot_s"]["mean"]


def test_a_split_run_that_ends_early_counts_every_request() -> None:
    # This link is so slow that few requests get through.
    cell = replace(CELL, system=replace(SPLIT, network_gbps=1e-5), extent=replace(CELL.extent, until_s=7.0))
    record = run(cell)
    counts = record["requests"]
    assert counts["submitted"] == sum(job.at <= 7.0 for job in cell.jobs())
    assert counts["finished"] < counts["submitted"] / 2
    assert sum(record["breakdown_s"].values()) == pytest.approx(record["jct_s"]["mean"], rel=1e-4)
    waits = sum(record["wait_s"].values())
    assert waits + record["breakdown_s"]["execution"] == pytest.approx(record["jct_s"]["mean"], rel=0.02)


def test_batched_simulation_of_decode_steps_changes_no_figure() -> None:
    # Decode replicas are short of KV, so requests wait for it and are swapped.
    system = replace(SPLIT, recipe="fcfs", kv_blocks=40, prefill=replace(SYSTEM, kv_blocks=100))
    cell = Cell(system, WORKLOAD, Extent(16.0, 12.0, 3))
    batched, single = run(cell), run(cell, on_events=lambda events: None)
    assert batched["roles"]["decode"]["kv"]["preemptions"]["swap"] > 0
    for name in ("requests", "transfer", "wait_s", "jct_s", "ttft_s", "tpot_s", "steps", "batch_mean"):
        assert batched[name] == pytest.approx(single[name], rel=1e-4), name
    for role, part in batched["roles"].items():
        assert part["kv"]["used_mean"] == pytest.approx(single["roles"][role]["kv"]["used_mean"], rel=1e-4)


@pytest.mark.exhaustive  # test_sweep.py has shards in processes
def test_shards_of_large_splits_have_replicas_of_both_roles() -> None:
    system = replace(SPLIT, recipe="fcfs", replicas=100, prefill_replicas=30, network_gbps=None)
    cell = Cell(system, WORKLOAD, Extent(200.0, 1.0, 3))
    record = run(cell)
    assert cell.shards == 2
    assert record["requests"]["finished"] == len(cell.jobs())
    roles = record["roles"]
    assert (roles["prefill"]["replicas"], roles["decode"]["replicas"]) == (30, 70)
    assert roles["prefill"]["prompt_tokens"] == sum(job.prompt_tokens for job in cell.jobs())
    assert roles["decode"]["prompt_tokens"] == 0
    assert record["transfer"]["requests"] == len(cell.jobs())


def test_requests_of_one_token_are_not_transferred() -> None:
    record = run(Cell(SPLIT, synthetic("uniform:8-200,1-1", "poisson"), CELL.extent))
    assert record["requests"]["finished"] == record["requests"]["submitted"]
    assert record["transfer"]["requests"] == record["roles"]["decode"]["steps"] == 0


def test_forecasts_are_made_once_and_learn_from_whole_outputs() -> None:
    record = run(replace(CELL, system=replace(SPLIT, recipe="alise", predictor="oracle")))
    assert record["prediction"]["mae"] == 0
    assert record["prediction"]["r_log"] == 1


def test_prefill_replicas_may_have_other_hardware() -> None:
    machine = Machine(model="opt-13b", kv_gib=4)
    settings: dict[str, Any] = {"replicas": 2, "prefill_replicas": 1}
    (same,), (other,) = (
        built.systems("fcfs", **settings) for built in (machine, replace(machine, prefill_hardware="h100-80gb"))
    )
    records = [run(Cell(system, WORKLOAD, Extent(8.0, 10.0, 3))) for system in (same, other)]
    assert records[1]["ttft_s"]["mean"] < 0.8 * records[0]["ttft_s"]["mean"]
    assert records[1]["tpot_s"]["mean"] == pytest.approx(records[0]["tpot_s"]["mean"], rel=0.05)
    assert records[1]["settings"]["prefill_hardware"] == records[1]["roles"]["prefill"]["hardware"] == "h100-80gb"
    assert records[1]["hardware"] == records[1]["roles"]["decode"]["hardware"] == "a100-40gb"


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"prefill_replicas": 4}, "prefill_replicas must be below replicas, 4, got 4"),
        ({"prefill_replicas": -1}, "prefill_replicas must be at least 0"),
        ({"prefill_replicas": 0}, "network_gbps needs prefill_replicas"),
        ({"prefill_replicas": 0, "network_gbps": None, "prefill": SYSTEM}, "prefill_hardware needs prefill_replicas"),
        ({"network_gbps": 0.0}, r"network_gbps must be in \(0, 1e\+06\], got 0"),
        ({"network_gbps": float("nan")}, "network_gbps must be in"),
        ({"cpu_blocks": 0}, "prefill_replicas needs a CPU pool"),
        ({"prefill": replace(SYSTEM, block_size=32)}, "prefill_hardware must have the KV blocks of hardware"),
    ],
)
def test_invalid_splits_are_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        replace(SPLIT, **settings)


def test_the_command_reports_both_roles() -> None:
    options = "simulate --model opt-13b --kv-gib 4 --recipes fcfs --rates 2 --duration 5 --jobs 1 --replicas 3"
    shown = CliRunner().invoke(app, [*options.split(), "--prefill-replicas", "1", "--prefill-hardware", "h100-80gb"])
    assert shown.exit_code == 0, shown.output
    assert "1 prefill" in shown.output
    assert "2 decode" in shown.output
    for more, error in (
        (["--prefill-replicas", "3"], "must be below replicas, 3, got 3"),
        (["--prefill-replicas", "1", "--find-min-replicas", "ttft_s.mean<=1"], "exclude each other"),
    ):
        refused = CliRunner().invoke(app, [*options.split(), *more])
        assert refused.exit_code != 0
        assert error in refused.output


def test_prompts_that_do_not_fit_a_prefill_replica_are_rejected() -> None:
    record = run(replace(CELL, system=replace(SPLIT, prefill=replace(SYSTEM, kv_blocks=6))))
    long = sum(job.prompt_tokens >= 96 for job in CELL.jobs())
    assert 0 < record["requests"]["rejected"] == long
    assert record["requests"]["unfinished"] == 0
