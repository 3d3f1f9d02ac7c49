from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path

import pytest

from papers.alise import setting
from papers.figures import report, runs, variants
from skipjoin.sim.experiments.simulation import run as simulate
from support.figures import figure_module, run_figure

run, module_of = partial(run_figure, "alise"), partial(figure_module, "alise")


def test_regression_reports_its_fit(tmp_path: Path) -> None:
    result = run("figure05", tmp_path)
    qualities = [row[4:] for row in result["tables"][1]["rows"]]
    assert len(qualities) == 3
    assert all(0.98 < prefill < 1 and decode > 0.999 for prefill, decode in qualities)
    assert (tmp_path / "times.png").stat().st_size > 0


@pytest.mark.exhaustive  # test_benchmarks_fastserve.py runs the same harness
def test_short_runs_contain_every_variant_and_its_settings(tmp_path: Path) -> None:
    result = run("correlation", tmp_path, "--quick", "--duration", "5", "--jobs", "1")
    assert result["settings"]["duration_s"] == 2
    (system,) = result["settings"]["systems"].values()
    assert system["max_tokens"] == "room"
    assert system["kv_gib"] == pytest.approx(11, abs=0.02)
    assert {"fcfs", "fastserve", "alise regress:0.6", "alise prior"} <= set(system["recipes"])
    assert [row[1] for row in result["tables"][0]["rows"]][-2:] == ["fastserve", "fcfs"]
    by_rho = [record["prediction"]["r_log"] for record in result["records"] if record["variant"] == "alise regress:1"]
    assert by_rho == [pytest.approx(1)]


def test_int8_on_both_tiers_adds_blocks_in_proportion_to_their_size() -> None:
    int8 = module_of("int8")
    whole, host, both = (int8.system(setting.NEAR_TRUE, kv) for kv in int8.KV)
    assert host.kv_blocks == whole.kv_blocks
    assert host.cpu_blocks == pytest.approx(1.6 * whole.cpu_blocks, rel=0.01)
    # A row of 128 numbers takes 132 bytes instead of 256.
    assert both.kv_blocks == pytest.approx(1.94 * whole.kv_blocks, rel=0.01)
    assert both.cpu_blocks == pytest.approx(1.94 * whole.cpu_blocks, rel=0.01)
    assert both.describe()["kv_gib"] == pytest.approx(whole.describe()["kv_gib"], rel=0.01)


def test_rates_rise_until_the_mean_over_seeds_breaks_the_bound(tmp_path: Path) -> None:
    options = runs.Options(out=tmp_path, seed_count=2, lasting_s=30.0)
    extent = variants.lasting(options, 0.1)
    (system,) = [variant.on(setting.A100) for variant in variants.plain("orca-exact")]
    found = runs.cells(system, runs.poisson("sharegpt"), [1.0, 2.0], extent, seeds=options.seeds(1))
    assert [(cell.extent.rate_rps, cell.extent.seed, cell.extent.duration_s) for cell in found] == [
        (1.0, 0, 30.0), (1.0, 1, 30.0), (2.0, 0, 30.0), (2.0, 1, 30.0)
    ]  # fmt: skip
    plan = runs.Rising(found, setting.BOUND)
    due, tried = list(plan.first()), []
    while due:
        cell = due.pop(0)
        tried.append(cell.extent.rate_rps)
        # The mean breaks the bound above 3 requests per second; the first seed alone would at once.
        seconds = 0.3 * (cell.extent.seed == 0) + 0.15 * (cell.extent.rate_rps > 3)
        workload = {"rate_rps": cell.extent.rate_rps, "seed": cell.extent.seed}
        record = {"recipe": "fcfs", "workload": workload, "quantiles": {"jct_s": [1.0]}}
        due += plan.then(cell, record | {"normalized_latency_s": {"mean": seconds}})
    assert tried == [1.0, 1.0, 2.0, 2.0, 2.6, 2.6, 3.38, 3.38]


def test_missing_texts_name_the_environment_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SKIPJOIN_TRACES", raising=False)
    with pytest.raises(SystemExit, match="SKIPJOIN_TRACES must name the folder"):
        module_of("texts").measure(runs.Options(out=tmp_path))


def test_rows_of_texts_are_used_once_per_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts = module_of("texts")
    rows = "\n".join(json.dumps({"prompt": f"prompt {number}", "output": "an answer"}) for number in range(30))
    monkeypatch.setenv("SKIPJOIN_TRACES", str(tmp_path))
    (tmp_path / "alpaca_text.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    monkeypatch.setitem(texts.RATES, "alpaca_text", (2.0,))
    with pytest.raises(SystemExit, match="has 30 rows, too few"):
        texts.curves_of("alpaca_text", runs.Options(out=tmp_path, duration_s=100.0))
    plans = dict(texts.curves_of("alpaca_text", runs.Options(out=tmp_path, duration_s=20.0)))
    (cell,) = plans["alise learned"].first()
    record = runs.slim(simulate(cell))
    assert record["prediction"]["predictor"] == "learned"
    assert record["longest_jct_s"] >= record["jct_s"]["p99"]
    table = report.latencies("a run", [{"variant": "alise learned", **record}], ["alise learned"], by="variant")
    assert table["rows"][0][2] == record["normalized_latency_s"]["mean"]
