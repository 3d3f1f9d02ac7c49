from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from papers.econoserve import setting
from papers.econoserve.watch import Watch, watched
from papers.engine_runs import count_other_texts, tabulated, write_trace
from papers.figures.report import fill_readme, thin
from papers.figures.runs import Options
from skipjoin.core.request import Target
from skipjoin.workload.request import WorkloadRequest
from skipjoin.workload.traces import read_trace
from support.figures import BENCHMARKS, figure_module, run_figure

FOLDER = BENCHMARKS / "papers" / "econoserve"
run, module_of = partial(run_figure, "econoserve"), partial(figure_module, "econoserve")


@pytest.mark.exhaustive  # a result of the paper
def test_forecasts_fail_at_the_rate_of_the_paper(tmp_path: Path) -> None:
    trace = setting.SHAREGPT
    options = Options(out=tmp_path, jobs=1)
    cells = setting.loaded(setting.system(setting.SYNCED, trace), trace, [0.2], options)
    (record,) = watched([({"variant": "a name"}, cells[0])], options)
    assert (record["variant"], record["load"]) == ("a name", 0.2)
    assert 0.15 < record["watch"]["outgrown"] < 0.4  # 26.8 %, minus those that fit into the last block
    assert record["watch"]["failed"] == 0
    assert sum(record["watch"]["ends"].values()) == record["steps"]


def test_engine_runs_are_compared_with_their_first_entry(tmp_path: Path) -> None:
    job = WorkloadRequest(0.5, 4, 9, "default", 0)
    write_trace(tmp_path / "trace.jsonl", [job], lambda job: Target(ttft_s=0.25))
    (row,) = read_trace(tmp_path / "trace.jsonl").rows
    assert (row.arrival_s, row.output_tokens, row.options.target.ttft_s) == (0.5, 9, 0.25)
    assert len(row.prompt.split()) == 4
    times = {name: dict.fromkeys(("mean", "p50", "p95"), 0.1) for name in ("ttft_s", "tpot_s", "jct_s")}
    rows = [
        {"entry": name, "seed": seed, "met": {"all": met, "ttft": 1.0}, **times, "best_effort_rps": rate, "lost_kv": 1}
        for seed in (0, 1)
        for name, met, rate in (("fcfs", 0.25, 4.0), ("bros", 0.5 + seed / 4, 3.0 + seed))
    ]
    texts = {(seed, name): ["same", name] for seed in (0, 1) for name in ("fcfs", "bros")}
    count_other_texts(rows, texts, "fcfs")
    found = tabulated([*rows, {"entry": "vllm", "seed": 0, "failed": "it did not start"}])
    shown = dict(zip(found["columns"], found["rows"][1], strict=True))
    assert [row[0] for row in found["rows"]] == ["fcfs", "bros"]
    assert shown["objectives met"] == "0.625 (0.5 to 0.75)"
    assert shown["to fcfs"] == "0.875 (0.75 to 1)"
    assert (shown["lost KV"], shown["other texts"]) == (2, 2)


def test_watching_no_requests_yields_figures() -> None:
    figures = Watch(10, 32).figures()
    assert figures["over"] is None
    assert figures["max_reserved"] == 0


@pytest.mark.exhaustive  # test_benchmarks_fastserve.py runs the same harness
def test_short_runs_tabulate_every_variant(tmp_path: Path) -> None:
    result = run("figure13", tmp_path, "--quick", "--duration", "3", "--jobs", "1")
    found = {row[2] for row in result["tables"][0]["rows"] if row[1] == "sharegpt"}
    assert {"econoserve-d", "econoserve-sd", "econoserve-sdo", "econoserve", "econoserve, oracle", "fcfs"} <= found
    assert all(record["slo"]["jct_scale"] == 2 for record in result["records"])


def test_failed_checks_are_reported() -> None:
    result = json.loads((FOLDER / "checks" / "result.json").read_text(encoding="utf-8"))
    found = {record["variant"]: record for record in result["records"]}
    rows = module_of("checks").checks(found)
    assert {(row[0], row[3] == "yes") for row in result["tables"][0]["rows"]} == {(row[0], row[3]) for row in rows}
    found["mixed, econoserve"]["watch"]["max_reserved"] = 0.9
    assert not module_of("checks").checks(found)[0][3]


def test_tables_replace_marked_sections_of_readmes(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- table: New -->\nold\n<!-- /table -->\nafter\n")
    tables = [{"title": title, "columns": ["a"], "rows": [[value]]} for title, value in (("Other", 2.5), ("New", 1.5))]
    fill_readme(path, {"tables": tables})
    wanted = "before\n<!-- table: New -->\n\n|a|\n|---|\n|1.5|\n\n<!-- /table -->\nafter\n"
    assert path.read_text() == wanted
    with pytest.raises(KeyError, match="New"):
        fill_readme(path, {"tables": tables[:1]})


def test_records_keep_labels_and_named_fields() -> None:
    record = {"variant": "fcfs", "steps": 9, "kv": {"used": 1, "free": 2}, "workload": {"seed": 3, "limit": None}}
    kept = {"variant": "fcfs", "workload": {"seed": 3}, "kv": {"used": 1}}
    assert thin(record, ("kv.used", "watch.over")) == kept
