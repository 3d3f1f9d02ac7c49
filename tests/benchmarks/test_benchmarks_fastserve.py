from __future__ import annotations

import random
import statistics
from functools import partial
from pathlib import Path

import pytest

from papers.fastserve import panels, setting
from papers.figures import report, runs
from papers.figures.shapes import Spread, held
from skipjoin.report.bound import MaximumRate
from skipjoin.sim.experiments.simulation import run as simulate
from support.figures import BENCHMARKS, figure_module, run_figure
from support.worlds import exhaustive

FOLDER = BENCHMARKS / "papers" / "fastserve"
run, module_of = partial(run_figure, "fastserve"), partial(figure_module, "fastserve")


def test_worked_example_has_the_papers_averages_and_is_reproducible(tmp_path: Path) -> None:
    result = run("figure07", tmp_path)
    averages = {row[0]: float(row[1]) for row in result["tables"][0]["rows"]}
    assert averages == {"FCFS": 4.33, "MLFQ": 5.0, "skip-join MLFQ": 3.33, "SRPT": 3.0}
    assert result["quick"] is False
    assert result["machine"]["cores"]
    picture = tmp_path / "timelines.png"
    first = picture.read_bytes()
    picture.unlink()
    run("figure07", tmp_path, "--draw")
    assert picture.read_bytes() == first


def test_only_the_first_iteration_grows_with_the_prompt() -> None:
    rows = module_of("figure05").measure(runs.Options(out=FOLDER))["tables"][0]["rows"]
    firsts, seconds = ([row[place] for row in rows] for place in (1, 2))
    assert firsts == sorted(firsts)
    assert firsts[-1] > 5 * firsts[0]
    assert seconds[-1] < 1.1 * seconds[0]


def test_short_runs_of_figure_15_contain_settings_records_and_ratios(tmp_path: Path) -> None:
    result = run("figure15", tmp_path, "--quick", "--duration", "1", "--jobs", "1")
    assert result["quick"] is True
    assert result["settings"]["duration_s"] == 1
    assert result["settings"]["seeds"] == [0]
    (system,) = result["settings"]["systems"].values()
    wanted = {"max_num_seqs": 256, "block_size": 16, "max_tokens": "exact"}
    assert wanted.items() <= system.items()
    assert system["kv_gib"] == pytest.approx(11, abs=0.02)
    assert system["swap_gib"] == pytest.approx(128, abs=0.02)
    assert system["starvation_s"] > 0
    assert not any({"series", "quantiles"} & set(record) for record in result["records"])
    rows = result["tables"][0]["rows"]
    assert {row[0] for row in rows} >= {2.6}
    assert all(row[3] == row[5] == 1 for row in rows if row[1] == "fastserve")
    for row in result["tables"][1]["rows"]:
        # The record's parts add up to the latency, except for CPU time, which is zero here.
        assert sum(row[1:4]) == pytest.approx(row[4], rel=0.01)
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "kv-modes.png", "breakdown.png"}


@pytest.mark.exhaustive  # the test above and the one below run the parts
def test_figure_11_derives_rates_from_its_curves_and_plots_each(monkeypatch: pytest.MonkeyPatch) -> None:
    figure11 = module_of("figure11")
    for key, rates in figure11.RATES.items():
        monkeypatch.setitem(figure11.RATES, key, rates[:1])
    plans = figure11.curves_of(runs.Options(out=FOLDER, quick=True, duration_s=1.0))
    records = []
    for plan in plans:
        (cell,) = plan.first()
        records.append(runs.slim(simulate(cell)))
    table = panels.read_off(records, setting.MEAN_BOUND)
    assert [row[:2] for row in table["rows"]][:2] == [["opt-13b", "sharegpt"], ["opt-66b", "sharegpt"]]
    column = table["columns"].index("fcfs")
    assert table["rows"][0][column] == "≥ 1.5"  # the bound holds at the only measured rate
    axes = panels.draw_panels(records, "normalized_latency_s.mean", 0.3).axes
    assert len(axes) == 6
    assert {line.get_label() for line in axes[0].lines} == {*setting.RECIPES, "bound 0.3"}


def test_searches_keep_their_records_and_find_the_rate() -> None:
    options = runs.Options(out=FOLDER, quick=True, jobs=1, duration_s=20.0)
    of = setting.system("fcfs", batch_cap=1)
    search = runs.Search(runs.cells(of, runs.poisson("uniform:8-64,4-16"), [4.0], options), "jct_s.mean<=1")
    runs.run_plans("a search", [search], options)
    tried = dict(search.tried())
    holds = max(rate for rate, value in tried.items() if value <= 1)
    breaks = min(rate for rate, value in tried.items() if value > 1)
    assert holds <= search.rate.rate_rps <= breaks <= 1.02 * holds


@pytest.mark.parametrize("cv", [0.0, *map(exhaustive, (0.5, 1.0)), 2.0])
def test_output_lengths_have_the_named_mean_and_variation(cv: float) -> None:
    lengths = Spread("outputs", 128, 128.0, cv, 8, 1800)
    chance = random.Random("outputs")
    drawn = [lengths.draw(chance) for _ in range(20_000)]
    outputs = [output for _, output in drawn]
    assert {prompt for prompt, _ in drawn} == {128}
    assert statistics.fmean(outputs) == pytest.approx(128, rel=0.03)
    assert statistics.pstdev(outputs) / statistics.fmean(outputs) == pytest.approx(cv, abs=0.05)
    assert min(outputs) >= 8
    assert max(outputs) <= 1800


def test_equal_lengths_keep_the_other_side() -> None:
    whole = [held("sharegpt", prompt=False, output=False).draw(1.0, None, 0, 50)]
    prompts = [held("sharegpt", prompt=True, output=False).draw(1.0, None, 0, 50)]
    for before, after in zip(whole[0], prompts[0], strict=True):
        assert after.output_tokens == before.output_tokens
        assert after.at == before.at
    assert len({job.prompt_tokens for job in prompts[0]}) == 1
    assert len({job.prompt_tokens for job in whole[0]}) > 10


def test_ratios_are_marked_as_bounds() -> None:
    known, bound = MaximumRate(4.0, at_least=False), MaximumRate(2.0, at_least=True)
    assert report.ratio_of(known, MaximumRate(2.0, at_least=False)) == "2.00x"
    assert report.ratio_of(known, bound) == "≤ 2.00x"
    assert report.ratio_of(bound, known) == "≥ 0.50x"
    assert report.ratio_of(None, known) == "-"


def test_regions_count_wins_ties_and_losses() -> None:
    regions = module_of("regions")
    rows = [
        (11.0, 16, 1.0, load, 1.0, ratio, 1.0, ratio, 1.0) for load in (0.9, 2.0) for ratio in (0.5, 1.01, 3.0, 2.0)
    ]
    summary = {(row[0], row[1]): row[2:] for row in regions.summary(rows)["rows"]}
    assert summary == {(1.0, "below 1"): [2, 1, 1, 0.5, 3.0], (1.0, "above 1"): [2, 1, 1, 0.5, 3.0]}


def test_promotions_differ_in_the_parameters_that_they_name() -> None:
    systems = module_of("choices").promotions()
    usual = systems["first-queue", "1", "0.05"]
    threshold_s = setting.system("fastserve").describe()["starvation_s"]
    assert usual.describe()["starvation_s"] == pytest.approx(threshold_s, rel=1e-3)
    assert usual.recipe.endswith("share=0.05]")
    assert "promotion=one-quantum" in systems["one-quantum", "4", "0.2"].recipe
    assert "paced=false" in systems["one-quantum", "1", "unlimited"].recipe


def test_delays_of_swapping_are_a_share_of_all_latencies() -> None:
    link = module_of("link")

    def row(recipe: str, seed: int, mean_s: float) -> dict[str, object]:
        latency = {"jct_s": {"mean": mean_s}, "normalized_latency_s": {"mean": mean_s / 50}}
        measured = {**latency, "requests": {"finished": 10}, "swap_delay_s": mean_s}
        return {"recipe": recipe, "seed": seed, "load": 1.4, "measured": measured}

    rows = [row("fastserve", 0, 4.0), row("fastserve", 1, 6.0), row("fastserve-reactive", 0, 10.0)]
    first, second = link.summary(rows, "measured")
    assert (first["runs"], first["jct_s"], first["delay_share"]) == (2, 5.0, 0.1)
    assert second["to_proactive"] == {"jct_s": 2.0, "normalized_latency_s": 2.0}
