"""One simulated run: what its record says, and that nothing but its arguments decides it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skipjoin.bench.results import ResultsFile, load_results
from skipjoin.bench.simulation import Cell, Extent, run
from skipjoin.bench.trace import read_trace
from skipjoin.bench.workload import Replay, with_best_effort
from skipjoin.config import ConfigError
from skipjoin.core.events import Event, Finished
from skipjoin.observe.record import Slo
from skipjoin.recipes import RECIPES
from support.simulated import CELL, SYSTEM, WORKLOAD


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_the_same_arguments_give_the_same_record(recipe: str) -> None:
    cell = replace(CELL, system=replace(SYSTEM, recipe=recipe))
    record = run(cell)
    assert record == run(cell)
    assert record != run(replace(cell, extent=replace(cell.extent, seed=4)))
    counts = record["requests"]
    assert counts["submitted"] == counts["finished"] == len(cell.jobs())
    assert record["recipe"] == recipe
    # Nothing else takes time: what steps did not do for requests, they waited.
    parts = record["breakdown_s"]
    assert sum(parts.values()) == pytest.approx(record["jct_s"]["mean"], rel=1e-4)
    assert record["settings"]["kv_blocks"] == 300


def test_a_record_is_one_that_results_files_take(tmp_path) -> None:
    file = ResultsFile(tmp_path / "results.json")
    records = [run(replace(CELL, system=replace(SYSTEM, recipe=recipe))) for recipe in ("fcfs", "srpt")]
    for record in records:
        file.append(record)
    assert load_results([tmp_path / "results.json"]) == records


def test_requests_stop_at_their_length_though_they_asked_for_more() -> None:
    asked = replace(CELL, system=replace(SYSTEM, max_tokens=500))
    lengths: list[tuple[int, int]] = []

    def note(events: list[Event]) -> None:
        lengths.extend(
            (len(e.request.output), e.request.max_tokens) for e in events if isinstance(e, Finished) and e.reason
        )

    record = run(asked, on_events=note)
    assert sorted(length for length, _ in lengths) == sorted(job.output_tokens for job in CELL.jobs())
    assert {most for _, most in lengths} == {500}
    assert record["requests"]["finished"] == len(CELL.jobs())
    # On-demand recipes do not look at what is asked for; a reservation of the maximum does.
    assert record["jct_s"] == run(CELL)["jct_s"]
    orca = replace(SYSTEM, recipe="orca")
    exact, most = (run(replace(CELL, system=replace(orca, max_tokens=tokens))) for tokens in (None, 500))
    assert most["jct_s"]["mean"] > exact["jct_s"]["mean"]


def test_the_oracle_sees_what_others_do_not() -> None:
    # With room for few, knowing lengths pays, and what a request asks for does not mislead the oracle.
    busy = Cell(replace(SYSTEM, max_num_seqs=2, max_tokens=500), WORKLOAD, Extent(12.0, 20.0, 0))
    means = {
        recipe: run(replace(busy, system=replace(busy.system, recipe=recipe)))["jct_s"]["mean"]
        for recipe in ("fcfs", "srpt")
    }
    assert means["srpt"] < 0.7 * means["fcfs"]


def test_requests_that_cannot_fit_are_refused_and_counted() -> None:
    record = run(replace(CELL, system=replace(SYSTEM, max_model_len=100)))
    counts = record["requests"]
    long = sum(job.prompt_tokens + job.output_tokens > 100 for job in CELL.jobs())
    assert (counts["rejected"], counts["submitted"]) == (long, len(CELL.jobs()))
    assert counts["finished"] == counts["submitted"] - long


def test_a_run_that_is_cut_short_counts_everybody() -> None:
    cut = replace(CELL, extent=replace(CELL.extent, until_s=10.0))
    record = run(cut)
    counts = record["requests"]
    arrived = sum(job.at <= 10.0 for job in CELL.jobs())
    assert counts["submitted"] == arrived
    assert counts["unfinished"] > 0
    assert record["duration_s"] == 10.0


def test_objectives_follow_the_light_load() -> None:
    loose, tight = (run(replace(CELL, slo_scale=scale))["slo"] for scale in (100.0, 1.0))
    assert loose["ttft_s"] == pytest.approx(100 * tight["ttft_s"])
    assert loose["all_attained"] > tight["all_attained"]
    fixed = run(replace(CELL, slo=Slo(jct_s=0.5)))["slo"]
    assert 0 < fixed["jct_attained"] < 1


def test_classes_are_told_apart_and_priorities_count() -> None:
    classes = run(
        Cell(replace(SYSTEM, max_num_seqs=2), with_best_effort(WORKLOAD, 0.5), Extent(12.0, 20.0, 0)),
    )["classes"]
    assert sorted(classes) == ["best-effort", "interactive"]
    assert classes["interactive"]["ttft_s"]["mean"] < 0.5 * classes["best-effort"]["ttft_s"]["mean"]


def test_replicas_share_the_load() -> None:
    busy = Cell(replace(SYSTEM, max_num_seqs=4), WORKLOAD, Extent(12.0, 20.0, 0))
    one = run(busy)
    for rule in ("round-robin", "least-work"):
        four = run(replace(busy, system=replace(busy.system, replicas=4, dispatch=rule)))
        assert four["requests"] == one["requests"]
        assert four["jct_s"]["mean"] < 0.5 * one["jct_s"]["mean"]
        assert four["settings"]["dispatch"] == rule


def test_pipeline_stages_overlap() -> None:
    # Two stages hold two batches of two: more gets done than by one device with batches of two.
    busy = Cell(replace(SYSTEM, max_num_seqs=2), WORKLOAD, Extent(12.0, 20.0, 0))
    piped = replace(busy, system=replace(busy.system, stages=2))
    assert run(piped)["throughput_rps"] > 1.5 * run(busy)["throughput_rps"]


def test_decisions_may_cost_time() -> None:
    slow = run(replace(CELL, system=replace(SYSTEM, decision_s=0.005)))
    assert slow["breakdown_s"]["scheduling"] > 0
    assert run(CELL)["breakdown_s"]["scheduling"] == 0
    parts = slow["breakdown_s"]
    assert sum(parts.values()) == pytest.approx(slow["jct_s"]["mean"], rel=1e-4)


def test_a_trace_is_played_as_it_is(tmp_path) -> None:
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
        ("decision_s", -1.0),
        ("starvation_s", float("nan")),
        ("dispatch", "random"),
    ],
)
def test_settings_out_of_bounds_are_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        replace(SYSTEM, **{field: value})


def test_a_run_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request arrives"):
        Cell(SYSTEM, WORKLOAD, Extent(0.001, 1.0, 0)).check()
