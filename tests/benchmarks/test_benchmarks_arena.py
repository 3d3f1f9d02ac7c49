from __future__ import annotations

import json
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from pathlib import Path

import pytest

from arena import lockstep, programs, prompts
from arena import run as arena
from arena.engine import EngineCell
from arena.figures import GOALS, OURS, PAPERS, PROMPT_GOALS, RIVALS, ratios, summary, with_rivals
from arena.grid import FIRST, HELD_OUT, PROFILED, SYSTEMS, TEXTS, TRACES, ArenaCell, covering, full, quick
from arena.lockstep import FIELDS, TimedEngine, race
from arena.picture import draw
from skipjoin.config import EngineConfig
from skipjoin.report.plots import style
from skipjoin.workload.workload import synthetic
from support.figures import BENCHMARKS


def test_cells_are_distinct_and_the_held_out_ones_are_not_tuned_on() -> None:
    tuned, final = list(full(final=False)), list(full(final=True))
    names = [cell.name for cell in (*tuned, *final)]
    assert len(set(names)) == len(names)
    assert all(cell.is_final for cell in final)
    assert not any(cell.is_final for cell in (*tuned, *quick()))
    assert {cell.lengths for cell in final} >= set(HELD_OUT)
    assert all({cell.system for cell in half} == set(SYSTEMS) for half in (tuned, final))


def test_each_pair_of_levels_is_in_a_cell() -> None:
    factors = ("abcd", (0, 1, 2), (0.5, 1.5), "xyz")
    rows = list(covering(factors, [("a", 0, 0.5, "x")]))
    assert rows[0] == ("a", 0, 0.5, "x")
    for one, other in combinations(range(len(factors)), 2):
        assert {(row[one], row[other]) for row in rows} == set(product(factors[one], factors[other]))
    assert len(rows) < 20, "the product has 72"


def figures(mean: float, throughput: float = 1.0) -> dict[str, float]:
    return {"mean": mean, "p95": 2 * mean, "ttft_p95": 0.1 * mean, "throughput": throughput, "longest_jct": 9.0}


def test_ours_is_compared_with_the_best_of_the_others_in_each_cell() -> None:
    one = {"fcfs": figures(1.0), "alise": figures(0.5), OURS: figures(0.4, throughput=0.8), "ltr": figures(0.1)}
    other = {"fcfs": figures(0.5), "alise": figures(1.0), OURS: figures(1.0)}
    found = ratios(one)
    assert (found["mean"], found["throughput"]) == (0.8, 1.25)
    assert ratios(one, (*PAPERS, *RIVALS))["mean"] == pytest.approx(4.0)
    assert with_rivals({"a": {"recipes": one}}) == {}
    cells = {"a": {"recipes": one}, "b": {"recipes": other}, "incomplete": {"recipes": {OURS: figures(9.0)}}}
    mean = summary(cells)["mean"]
    assert (mean["cells"], mean["worst"], mean["worst_cell"]) == (2, 2.0, "b")
    assert mean["mean"] == pytest.approx((0.8 * 2.0) ** 0.5, abs=1e-3)


@pytest.mark.parametrize("recipe", RIVALS)
def test_rivals_finish_all_requests(recipe: str) -> None:
    cell = ArenaCell("two-kinds", FIRST, 2.0, 0, duration_s=3.0)
    found = arena.simulate(cell, recipe, 20.0)
    assert 0 < found["mean"] <= found["longest_jct"] < 100


@pytest.mark.exhaustive  # test_benchmarks_fastserve.py keeps records, and tests above compute summaries
def test_an_interrupted_run_continues_and_draws_all_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "record.json"
    cells = [ArenaCell(name, FIRST, 1.3, 0, duration_s=6.0) for name in ("equal", "sharegpt")]
    monkeypatch.setattr(arena, "capacity", float)  # a run must not measure what the record has
    record = {"capacities": {cell.saturated().name: 5.0 for cell in cells}, "cells": {}}
    out.write_text(json.dumps(record))
    arena.Arena(out, 1).run(cells[:1], PAPERS[:1])
    begun = json.loads(out.read_text())["cells"]
    again = arena.Arena(out, 1)
    again.run(cells, (*PAPERS[:1], OURS))
    kept = json.loads(out.read_text())
    assert kept["cells"][cells[0].name]["recipes"]["fcfs"] == begun[cells[0].name]["recipes"]["fcfs"]
    assert set(kept["summary"]) == set(GOALS)
    assert kept["summary"]["mean"]["cells"] == 2
    style.save(draw(again.cells), tmp_path / "cells.png")
    assert (tmp_path / "cells.png").stat().st_size > 0


def test_the_record_agrees_with_its_cells() -> None:
    record = json.loads((BENCHMARKS / "arena" / "result.json").read_text())
    assert record["summary"] == summary(record["cells"])
    known = {cell.name for cell in full(final=False)}
    # The others depend on files that are not in the repository.
    others = set(record["cells"]) - known
    assert all(name.startswith(TEXTS) or PROFILED in name for name in others)


def test_prompt_cells_are_distinct_and_skip_missing_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TRACES, raising=False)
    found = [*prompts.cells(final=False), *prompts.cells(final=True)]
    assert {cell.lengths for cell in found} == set(prompts.LENGTHS)
    assert len({cell.name for cell in found}) == len(found) == 4 * len(prompts.LENGTHS)
    assert not {cell.seed for cell in prompts.cells(final=False)} & {cell.seed for cell in prompts.cells(final=True)}
    monkeypatch.setenv(TRACES, "/missing")
    assert {cell.lengths for cell in prompts.cells(final=True)} == {*prompts.LENGTHS, *prompts.TRACED}


@pytest.mark.parametrize("recipe", prompts.OTHERS)
def test_recipes_serve_cached_prefixes(recipe: str) -> None:
    (cell,) = (cell for cell in prompts.cells(final=False) if cell.lengths == "agents" and cell.load == 0.9)
    found = arena.simulate(replace(cell, duration_s=3.0), recipe, 4.0)
    assert 0 < found["ttft_mean"] <= found["longest_jct"] < 60


def test_the_record_of_prompts_agrees_with_its_cells() -> None:
    record = json.loads((BENCHMARKS / "arena" / "prompts.json").read_text())
    assert record["summary"] == summary(record["cells"], (*PAPERS, "hrrn"), metrics=PROMPT_GOALS)
    assert all({OURS, *prompts.OTHERS} <= cell["recipes"].keys() for cell in record["cells"].values())


def test_engines_take_turns_by_their_own_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "EngineConfig", partial(EngineConfig, profile="off"))
    cell = EngineCell((), kv_gib=0.01, seqs=4)
    jobs = synthetic("uniform:5-20,3-8", "poisson").draw(200.0, 0.2, 0)
    with ExitStack() as stack:
        engines = [
            stack.enter_context(closing(TimedEngine(Path("tally"), name, cell))) for name in ("fcfs", "adaptive")
        ]
        for engine in engines:
            engine.start(jobs, background=1)
        race(engines)
        for engine in engines:
            assert len(engine.ends) == len(jobs)
            assert jobs[-1].at < max(engine.ends) <= engine.now
            assert list(figures := engine.figures(0.2)) == list(FIELDS)
            assert all(value > 0 for name, value in figures.items() if name != "throughput_rps")


def test_programs_compare_means_over_seeds_with_the_best_order_of_calls() -> None:
    cells = list(programs.cells(["agents"], programs.LOADS, 3, 60))
    assert len({(cell.name, cell.seed) for cell in cells}) == len(cells) == 18
    runs = {"fcfs": (8.0, 100), "fastserve": (9.0, 90), "per-call": (6.0, 60), "hrrn": (7.0, 80), "adaptive": (4.0, 10)}
    found = {
        recipe: [{"mean": mean * factor, "recomputed_tokens": again * factor} for factor in (0.5, 1.5)]
        for recipe, (mean, again) in runs.items()
    }
    expected = {"fcfs_over_ours": 2.0, "ours_over_best": 0.667, "recomputed_to_fcfs": 0.1}
    assert programs.summary({"cell": found, "incomplete": {"fcfs": found["fcfs"]}}) == {"cell": expected}
