from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from papers.bros import setting
from papers.figures.runs import Options, grid
from skipjoin.sim.experiments.simulation import run as simulate
from support.figures import BENCHMARKS, figure_module, run_figure

FOLDER = BENCHMARKS / "papers" / "bros"
run, module_of = partial(run_figure, "bros"), partial(figure_module, "bros")


@pytest.fixture(autouse=True)
def _built_in_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKIPJOIN_TRACES", raising=False)
    setting.lengths.cache_clear()


@pytest.mark.parametrize(("dataset", "published"), [("sharegpt", (222.76, 234.51)), ("lmsys", (90.50, 237.04))])
def test_built_in_lengths_have_the_means_of_the_paper(dataset: str, published: tuple[float, float]) -> None:
    assert setting.lengths(dataset).mean() == pytest.approx(published, rel=0.02)


def test_only_class_blind_systems_ignore_classes(tmp_path: Path) -> None:
    options = Options(out=tmp_path, duration_s=5.0)
    for variant in (setting.BLIND, setting.FCFS):
        (cell,) = setting.SHAREGPT.cells(variant, setting.system(variant), [4.0], options, seeds=1)
        plan, record = grid([cell]), simulate(cell)
        plan.then(cell, record)
        assert ("services" in record) is (variant is setting.FCFS)
        (kept,) = setting.records_of({(variant.name,): plan}, "variant")
        assert kept["best_effort"]["requests"]["finished"] == 128
        assert kept["real_time"]["requests"]["submitted"] == len(cell.jobs())
        assert 0 <= kept["real_time"]["slo"]["ttft_attained"] <= 1


def test_failed_checks_are_reported_and_fail_the_command() -> None:
    checks = module_of("checks")
    result = json.loads((FOLDER / "checks" / "result.json").read_text(encoding="utf-8"))
    held = checks.checks(result["records"])
    assert [row[-1] for row in held["rows"]] == [row[-1] for row in result["tables"][0]["rows"]]
    assert "no" not in {row[-1] for row in held["rows"]}
    for record in result["records"]:
        if record["variant"] == "bros-swap":
            record["real_time"]["slo"]["ttft_attained"] = 0.94
    assert {row[1] for row in checks.checks(result["records"])["rows"] if row[-1] == "no"} == {"bros-swap"}


@pytest.mark.exhaustive  # those of FastServe and EconoServe run by the same code
def test_short_runs_compare_every_variant_with_the_class_blind_one(tmp_path: Path) -> None:
    result = run("figure13", tmp_path, "--quick", "--lasting", "2", "--jobs", "1")
    assert {row[1] for row in result["tables"][0]["rows"]} == {"bros-recompute", "bros-swap", "bros", "bros-unshared"}
    found = setting.changes(result["records"], "bros", setting.TTFT_KEPT, "bros-recompute")
    assert len(found) == len(setting.DATASETS)
