"""Predictors of simulated runs: those derived from the truth have their declared error, and those that learn see only
what a server sees."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import correlation, fmean, linear_regression
from typing import Any

import pytest
from typer.testing import CliRunner

from skipjoin.cli import app
from skipjoin.config import ConfigError
from skipjoin.core.request import Request
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.predictors import parse_predictor
from skipjoin.sim.experiments.simulation import run
from skipjoin.workload.request import WorkloadRequest
from skipjoin.workload.traces import Column, Trace, TraceRow
from skipjoin.workload.workload import Replay, Workload, synthetic
from support.simulated import CELL, SYSTEM

SHAREGPT = synthetic("sharegpt", "poisson")
JOBS = SHAREGPT.draw(1.0, None, 0, 4000)
TRUTH = [job.output_tokens for job in JOBS]
KINDS = ("count to five", "tell a long story of the sea")


def predicted(
    text: str, jobs: Sequence[WorkloadRequest] = JOBS, workload: Workload = SHAREGPT, seed: int = 0
) -> list[float]:
    predictor = parse_predictor(text).make(workload, jobs, seed)
    requests = (Request(number, 0.0, [0], 2048) for number in range(len(jobs)))
    return [predictor.forecast(request).forecast.tokens for request in requests]


def logs(lengths: Sequence[float]) -> list[float]:
    return [math.log(length) for length in lengths]


def texts(**columns: Column) -> Replay:
    """Return a trace of two kinds of requests that differ in their prompts."""
    rows = [TraceRow(0.3 * number, 6, (5, 120)[number % 2], f"{KINDS[number % 2]} {number}") for number in range(120)]
    return Replay(Trace("two kinds", tuple(rows), columns))


def prediction(text: str | None, workload: Workload, recipe: str = "alise") -> dict[str, Any]:
    system = replace(SYSTEM, recipe=recipe, predictor=text)
    found: dict[str, Any] = run(Cell(system, workload, Extent(None, None, 0)))["prediction"]
    return found


def test_predictors_from_the_truth_have_their_declared_error() -> None:
    assert predicted("oracle") == predicted("noise:0") == TRUTH
    assert sorted(predicted("shuffled")) == sorted(TRUTH) != predicted("shuffled") != TRUTH
    assert set(predicted("constant:16")) == {16.0}
    errors = [one - other for one, other in zip(logs(predicted("noise:0.8")), logs(TRUTH), strict=True)]
    assert math.sqrt(fmean(error**2 for error in errors)) == pytest.approx(0.8, rel=0.05)


@pytest.mark.parametrize("rho", [0.3, 0.6, 0.8])
def test_a_regression_predictor_is_correlated_and_unbiased(rho: float) -> None:
    expected, truth = logs(predicted(f"regress:{rho}")), logs(TRUTH)
    assert correlation(expected, truth) == pytest.approx(rho, abs=0.04)
    slope, _ = linear_regression(expected, truth)
    assert slope == pytest.approx(1, abs=0.12)  # predictions equal the truth on average


def test_predictions_depend_on_the_seed_only() -> None:
    for text in ("noise:0.8", "regress:0.6", "shuffled"):
        assert predicted(text) == predicted(text) != predicted(text, seed=1)


def test_a_column_of_the_trace_is_a_predictor() -> None:
    workload = texts(
        other=Column(array("d", range(1, 121))), model=Column(array("d"), "line 2 (model): must be a number")
    )
    jobs = workload.draw(None, None, 0)
    assert predicted("column:other", jobs, workload) == list(range(1, 121))
    with pytest.raises(ConfigError, match="no column absent; the columns of numbers are other"):
        predicted("column:absent", jobs, workload)
    with pytest.raises(ConfigError, match="must be a number"):
        predicted("column:model", jobs, workload)
    with pytest.raises(ConfigError, match="column:other needs a trace"):
        predicted("column:other")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "there is no 'nonsense'; choose from learned"),
        ("oracles", "did you mean oracle"),
        ("noise", "predictor noise: its sigma must be a number"),
        ("noise:-1", r"sigma must be in \[0, 10\], got -1"),
        ("regress:1.5", "correlation"),
        ("constant:0", r"tokens must be in \[1, 1e\+09\], got 0"),
        ("constant:nan", "tokens"),
        ("column:", "there is no 'column:'"),
    ],
)
def test_invalid_predictors_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SYSTEM, predictor=text)


def test_forecasters_that_read_prompts_need_texts() -> None:
    cell = replace(CELL, system=replace(SYSTEM, recipe="alise", predictor="learned"))
    with pytest.raises(ConfigError, match="predictor learned reads prompts: it needs a trace with texts"):
        cell.check()
    textless = Replay(Trace("silent.csv", (TraceRow(0.0, 6, 5),)))
    with pytest.raises(ConfigError, match=r"silent\.csv"):
        replace(cell, workload=textless).check()


def test_the_record_reports_the_quality_of_forecasts() -> None:
    exact = prediction("oracle", texts())
    assert exact.pop("execution")["r2_decode"] == pytest.approx(1)
    assert exact == {
        "predictor": "oracle",
        "r_log": 1,
        "mae": 0,
        "within_25": 1,
        "coverage_80": None,
        "sources": {"oracle": 1},
    }
    assert "prediction" not in run(CELL)


def test_the_learned_predictor_learns_from_prompts_and_finished_requests() -> None:
    learned, prior = prediction(None, texts()), prediction("prior", texts())
    assert learned["predictor"] == "learned"
    assert set(learned["sources"]) == {"learned"}
    assert learned["r_log"] > 0.6 > abs(prior["r_log"])
    assert learned["mae"] < 0.8 * prior["mae"]
    assert prediction(None, texts()) == learned


def test_a_trained_state_predicts_from_the_first_request_and_its_file_does_not_change(tmp_path: Path) -> None:
    lines = [
        {"prompt": f"{KINDS[number % 2]} {number}", "output_tokens": (5, 120)[number % 2]} for number in range(200)
    ]
    trace, state = tmp_path / "t.jsonl", tmp_path / "state"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = CliRunner().invoke(app, ["predict", "train", "--trace", str(trace), "--out", str(state)])
    assert made.exit_code == 0, made.output
    before = {file.name: file.read_bytes() for file in state.iterdir()}
    trained, untrained = prediction(f"state:{state}", texts()), prediction("alise", texts())
    assert trained["r_log"] > 0.95
    assert trained["mae"] < 0.7 * untrained["mae"]
    # Lengths of rows that have not finished are hidden: the same prompts with other lengths get the same forecasts.
    other = Replay(Trace("other", tuple(row._replace(output_tokens=7) for row in texts().trace.rows)))
    assert predicted(f"state:{state}", texts().draw(None, None, 0), texts()) == predicted(
        f"state:{state}", other.draw(None, None, 0), other
    )
    assert {file.name: file.read_bytes() for file in state.iterdir()} == before
