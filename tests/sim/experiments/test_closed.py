from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from skipjoin.cli import app
from skipjoin.config import ConfigError
from skipjoin.core.request import ServiceClass, Target
from skipjoin.observe.record import Slo
from skipjoin.observe.requests import RequestFacts
from skipjoin.sim.experiments import submissions
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.simulation import Run, run
from skipjoin.workload.streams import ClosedMode, parse_closed
from skipjoin.workload.workload import with_closed
from support.recipes import SPELLED
from support.simulated import SYSTEM, WORKLOAD, repeatable
from support.worlds import checkered

_, REFILL = ClosedMode
SIZE, DURATION_S = 6, 6.5
STREAM = parse_closed(f"name=be,lengths=uniform:8-200,4-64,size={SIZE},class=best-effort")
SYSTEMS = {
    "one replica": SYSTEM,
    "three replicas": replace(SYSTEM, replicas=3, dispatch="least-work"),
    "prefill apart": replace(SYSTEM, replicas=3, prefill_replicas=1, cpu_blocks=300),
    "forecasts": replace(SYSTEM, recipe="alise", predictor="regress:0.5"),
}


def cell(
    system: Any = SYSTEM, *, rate_rps: float = 4.0, seed: int = 3, until_s: float = math.inf, **stream: Any
) -> Cell:
    closed = replace(STREAM, **stream)
    return Cell(system, with_closed(WORKLOAD, [closed]), Extent(rate_rps, DURATION_S, seed, until_s=until_s))


def closed_facts(one: Cell) -> list[RequestFacts]:
    simulated = Run(one)
    facts = [fact for shard in range(one.shards) for fact in simulated.shard(shard).facts if fact.stream == "be"]
    return sorted(facts, key=lambda fact: (fact.arrival, fact.id))


def test_slots_are_checkpointed_only_with_shared_blocks_and_short_kv() -> None:
    def kv(recipe: str, blocks: int) -> dict[str, Any]:
        system = replace(SYSTEM, recipe=recipe, kv_blocks=blocks, cpu_blocks=3 * blocks)
        found: dict[str, Any] = run(cell(system, rate_rps=8.0))["kv"]
        return found

    shared, large, unshared = kv("bros", 60), kv("bros", 600), kv("bros[eviction=partial]", 60)
    assert min(shared["shared_blocks_mean"], shared["checkpointed_slots"], shared["restores"]) > 0
    slot_bytes = SYSTEM.block_bytes / SYSTEM.block_size
    assert shared["checkpointed_bytes"] == pytest.approx(shared["checkpointed_slots"] * slot_bytes, abs=0.5)
    for without in (large, unshared):
        assert without["shared_blocks_mean"] == without["checkpointed_bytes"] == without["restores"] == 0
    assert large["swapped_out_bytes"] == 0 < unshared["swapped_out_bytes"]


@pytest.mark.parametrize(("system", "mode"), checkered([*SYSTEMS], [*ClosedMode]))
def test_jobs_are_submitted_when_others_finish(system: str, mode: ClosedMode) -> None:
    facts = closed_facts(cell(SYSTEMS[system], mode=mode))
    assert all(fact.is_complete and fact.service is ServiceClass.BEST_EFFORT for fact in facts)
    assert {fact.arrival for fact in facts[:SIZE]} == {0.0}
    assert all(fact.arrival < DURATION_S for fact in facts)
    ends = Counter(fact.ended for fact in facts)
    if mode is REFILL:
        # Each finished job is replaced until the duration ends, so the number in flight is constant.
        assert Counter(fact.arrival for fact in facts[SIZE:]) == Counter(
            {time: count for time, count in ends.items() if time is not None and time < DURATION_S}
        )
    else:
        batches = [facts[first : first + SIZE] for first in range(0, len(facts), SIZE)]
        assert len(batches) > 2
        assert len(batches[-1]) == SIZE
        for before, after in pairwise(batches):
            assert {fact.arrival for fact in after} == {max(fact.ended or 0.0 for fact in before)}


def test_the_lengths_of_a_job_depend_on_its_number_and_seed_only() -> None:
    def lengths(one: Cell) -> list[tuple[int, int]]:
        return [(fact.prompt_tokens, fact.output_limit) for fact in sorted(closed_facts(one), key=lambda fact: fact.id)]

    expected = [(job.prompt_tokens, job.output_tokens) for job, _ in zip(STREAM.jobs(3, 0), range(500), strict=False)]
    for tried in (cell(), cell(replace(SYSTEM, recipe=SPELLED["orca"]), mode=REFILL), cell(rate_rps=12.0, size=20)):
        found = lengths(tried)
        assert found == expected[: len(found)]
    assert lengths(cell(seed=4))[:SIZE] != expected[:SIZE]


@pytest.mark.parametrize(("recipe", "mode"), checkered(["fcfs", "fastserve", "econoserve"], [*ClosedMode]))
def test_the_same_arguments_give_the_same_record(recipe: str, mode: ClosedMode) -> None:
    one = cell(replace(SYSTEM, recipe=recipe), mode=mode)
    record = run(one)
    assert repeatable(run(one)) == repeatable(record)
    # Batched simulation of steps ends where a job is submitted.
    single = run(one, on_events=lambda events: None)
    assert single["services"]["best-effort"]["requests"] == record["services"]["best-effort"]["requests"]
    assert single["jct_s"]["mean"] == pytest.approx(record["jct_s"]["mean"], rel=1e-4)
    assert (
        record["workload"]["closed"][0].items() >= {"size": SIZE, "mode": mode.value, "service": "best-effort"}.items()
    )


@pytest.mark.exhaustive  # test_simulation.py has shards of open streams
def test_shards_share_the_size_and_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    one = cell(replace(SYSTEM, replicas=7), mode=REFILL, size=20)
    monkeypatch.setattr("skipjoin.sim.experiments.cell.REPLICAS_PER_SHARD", 3)
    assert one.shards == 3
    facts = closed_facts(one)
    assert sum(fact.arrival == 0 for fact in facts) == 20
    later = sum(1 for fact in facts if fact.arrival > 0)
    assert later == sum(1 for fact in facts if (fact.ended or 0.0) < DURATION_S)
    assert run(one)["classes"]["be"]["requests"]["finished"] == len(facts)
    with pytest.raises(ConfigError, match="mode=batch needs one shard, at most 3 replicas"):
        cell(replace(SYSTEM, replicas=7)).check()


def test_records_report_both_service_classes() -> None:
    """Real-time requests run first and have objectives; the throughput of the others counts within the duration."""
    system = replace(SYSTEM, recipe="fcfs", max_num_seqs=4)
    slo = Slo(ttft_s=0.4, tpot_s=0.05)
    one = replace(cell(system, mode=REFILL), slo=slo)
    facts = Run(one).shard(0).facts
    assert {(fact.service, fact.target) for fact in facts} == {
        (ServiceClass.REAL_TIME, Target(ttft_s=0.4, tpot_s=0.05)),
        (ServiceClass.BEST_EFFORT, Target()),
    }
    record = run(one)
    chat, batch = (record["services"][name] for name in ("real-time", "best-effort"))
    assert record["classes"]["default"] == {"service": "real-time", **chat}
    assert chat["ttft_s"]["mean"] < 0.2 * batch["ttft_s"]["mean"]
    attained = [fact.ttft(0.0) <= 0.4 for fact in facts if fact.service is ServiceClass.REAL_TIME]
    assert (
        record["slo"]["ttft_attained"]
        == chat["slo"]["ttft_attained"]
        == pytest.approx(sum(attained) / len(attained), rel=1e-5)
    )
    assert batch["slo"]["ttft_attained"] is batch["slo"]["goodput_rps"] is None
    done = [fact for fact in facts if fact.stream == "be" and (fact.ended or 0.0) <= DURATION_S]
    assert batch["window"] == {
        "duration_s": DURATION_S,
        "finished": len(done),
        "throughput_rps": pytest.approx(len(done) / DURATION_S, rel=1e-5),
        "throughput_tps": pytest.approx(sum(fact.output_tokens for fact in done) / DURATION_S, rel=1e-5),
    }
    # Without service classes the stream's jobs queue with the others.
    unclassified = run(replace(one, workload=with_closed(WORKLOAD, [replace(STREAM, service=ServiceClass.REAL_TIME)])))
    assert unclassified["classes"]["default"]["ttft_s"]["mean"] > 2 * chat["ttft_s"]["mean"]
    assert "services" not in unclassified


def test_a_run_that_ends_early_counts_requests_in_flight() -> None:
    record = run(cell(mode=REFILL, until_s=5.0))
    counts = record["classes"]["be"]["requests"]
    assert counts["unfinished"] == SIZE
    assert counts["submitted"] == counts["finished"] + SIZE
    window = record["classes"]["be"]["window"]
    assert (window["duration_s"], window["finished"]) == (5.0, counts["finished"])
    assert window["throughput_rps"] == record["classes"]["be"]["throughput_rps"]


def test_jobs_that_do_not_fit_are_rejected_and_replaced() -> None:
    one = cell(replace(SYSTEM, max_model_len=150), mode=REFILL)
    record = run(one)
    counts = record["services"]["best-effort"]["requests"]
    assert 0 < counts["rejected"] < counts["finished"]
    assert sum(fact.arrival == 0 for fact in closed_facts(one)) == SIZE
    with pytest.raises(ConfigError, match="closed stream be: none of 256 jobs fits into the context or the KV"):
        run(cell(replace(SYSTEM, max_model_len=11)))


def test_a_closed_stream_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submissions, "MAX_REQUESTS", 500)
    one = cell(rate_rps=1e-6, mode=REFILL)
    endless = replace(one, extent=replace(one.extent, duration_s=1e9))
    with pytest.raises(ConfigError, match="closed stream be: more than 500 requests before the end: choose a shorter"):
        run(endless)


def test_a_closed_stream_can_run_alone() -> None:
    alone = cell(rate_rps=1e-6)
    alone.check()
    record = run(alone)
    assert record["requests"] == record["services"]["best-effort"]["requests"]
    assert record["requests"]["finished"] > SIZE


def test_the_command_reports_each_stream(tmp_path: Path) -> None:
    """The closed stream takes its lengths from a trace."""
    file = tmp_path / "rows.csv"
    file.write_text("prompt_tokens,output_tokens\n64,8\n32,4\n")
    options = f"simulate --model opt-13b --kv-gib 4 --rates 2 --jobs 1 --trace {file} --slo-ttft 0.4"
    options += " --recipes fastserve"
    closed = f"name=be,lengths=trace:{file},size=3,class=best-effort"
    shown = CliRunner().invoke(app, [*options.split(), "--duration", "3", "--closed", closed])
    assert shown.exit_code == 0, shown.output
    assert re.search(r"fastserve +2 +be +best-effort", shown.output)
    assert re.search(r"fastserve +2 +default +real-time", shown.output)
    refused = CliRunner().invoke(app, [*options.split(), "--requests", "3", "--closed", closed])
    assert refused.exit_code != 0
    assert "a closed stream needs duration_s" in refused.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("be", "closed must consist of KEY=VALUE fields, got 'be'"),
        ("name=be,size=8", "closed needs lengths="),
        ("name=be,lengths=alpaca", "closed needs size="),
        ("name=be,lengths=alpaca,size=8,share=0.5", "closed: there is no 'share'"),
        ("name=be,lengths=alpaca,size=0", "closed: size must be an integer in [1, 1000000], got 0"),
        ("name=be,lengths=alpaca,size=1.5", "closed: size must be an integer, got '1.5'"),
        (
            "name=be,lengths=alpaca,size=8,class=besteffort",
            "class: there is no 'besteffort'; did you mean best-effort?",
        ),
        ("name=be,lengths=alpaca,size=8,mode=open", "closed: mode: there is no 'open'; choose from batch, refill"),
        ("name=be,lengths=trace:/no/file.csv,size=8", "/no/file.csv: No such file"),
    ],
)
def test_errors_of_closed_streams_name_the_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_closed(text)
    assert message in str(caught.value)


def test_a_closed_stream_that_contradicts_the_workload_is_refused() -> None:
    with pytest.raises(ConfigError, match="'default' is named twice"):
        with_closed(WORKLOAD, [replace(STREAM, name="default")])
    with pytest.raises(ConfigError, match="a closed stream needs duration_s"):
        replace(cell(), extent=Extent(4.0, None, 0, limit=10)).check()
    for predictor, message in (("column:x", "needs a trace"), ("learned", "and no closed streams")):
        with pytest.raises(ConfigError, match=message):
            cell(replace(SYSTEM, recipe="alise", predictor=predictor)).check()
