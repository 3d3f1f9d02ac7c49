from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from typer.testing import CliRunner

from skipjoin.cli.plot import plot
from skipjoin.config import ConfigError
from skipjoin.report.bound import parse_bound
from skipjoin.report.plot import KINDS, View, draw, plot_results
from skipjoin.report.plots.curves import _spread
from skipjoin.report.plots.lines import lines_of, maximum_rates
from skipjoin.report.plots.style import COLORS, DASHES, MARKERS, field_label, look
from skipjoin.report.results import DISTRIBUTIONS, Record, ResultsFile
from support.worlds import one_in

# Requests per second up to which a recipe's latency grows slowly.
CAPACITY = {"fcfs": 2.0, "fastserve": 3.0}
RATES = (1.0, 2.0, 3.0, 4.0)
BOUND = parse_bound("normalized_latency_s.mean<=0.5")
SINGLE = [kind for kind in KINDS if kind != "all"]


def make_record(recipe: str, rate: float, seed: int = 0, **changes: Any) -> Record:
    """Return a record whose latency rises by 10 s for each req/s above the capacity."""
    level = 0.1 + seed * 0.01 + 10 * max(0.0, rate - CAPACITY.get(recipe, 1.0))
    record: Record = {"recipe": recipe, "model": "opt-13b", "hardware": "a100-40gb", "driver": "simulator"}
    record["workload"] = {"lengths": "alpaca", "arrivals": "poisson", "rate_rps": rate, "duration_s": 9.0, "seed": seed}
    record |= {"settings": {"max_num_seqs": 64}, "requests": {"submitted": 9}, "duration_s": 9.0}
    record |= {"throughput_rps": rate, "throughput_tps": 100 * rate}
    for name in DISTRIBUTIONS:
        record[name] = {"mean": level, "p50": level, "p95": 2 * level, "p99": 3 * level}
    record["breakdown_s"] = {"queueing": level, "execution": 2.0, "swapping": 0.5, "scheduling": 0.255}
    record["quantiles"] = {name: [level * (1 + p / 100) for p in range(101)] for name in DISTRIBUTIONS}
    times = [float(second) for second in range(9)]
    record["series"] = {"time_s": times, "kv_used": [0.25] * 9, "kv_allocated": [0.5] * 9}
    record["series"] |= {"running": [4] * 9, "waiting": [int(rate * time) for time in times]}
    return record | changes


def make_records(**changes: Any) -> list[Record]:
    return [make_record(recipe, rate, seed, **changes) for recipe in CAPACITY for rate in RATES for seed in (0, 1)]


class Warnings(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


def no_warnings(text: str) -> None:
    raise AssertionError(text)


def labeled_lines(axes: Axes) -> dict[str, Any]:
    return {str(line.get_label()): line for line in axes.get_lines() if not str(line.get_label()).startswith("_")}


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def texts_of(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_the_latency_plot_has_lines_the_bound_and_the_maximum_rates() -> None:
    figure = draw(make_records(), "latency", View(bound=BOUND), no_warnings)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "arrival rate (req/s)"
    assert axes.get_ylabel() == "normalized latency, mean (s/token)"
    assert axes.get_yscale() == "log"
    lines = labeled_lines(axes)
    assert list(lines) == ["fcfs", "fastserve", "bound 0.5"] == legend_of(figure)
    assert set(lines["bound 0.5"].get_ydata()) == {0.5}
    # The means over the seeds are 0.105 at the capacity and 10.105 one req/s later, so 0.5 is reached after 0.0395.
    assert texts_of(axes) == ["2.04", "3.04"]
    ticks = [np.asarray(line.get_xdata())[0] for line in axes.get_lines() if line.get_marker() == "|"]
    assert ticks == pytest.approx([2.0395, 3.0395])
    band = axes.collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == pytest.approx((0.1, 20.11)), "the band spans the minimum and maximum of the seeds"
    data = dict(zip(*lines["fcfs"].get_data(), strict=True))
    assert [data[rate] for rate in RATES] == pytest.approx([0.105, 0.105, 10.105, 20.105])
    marked = lines["fcfs"].get_xdata()[:: lines["fcfs"].get_markevery()]
    assert list(marked) == list(RATES)


def test_a_line_is_straight_between_rates_around_its_tick() -> None:
    figure = draw(make_records(), "latency", View(bound=BOUND), no_warnings)
    line = labeled_lines(figure.axes[0])["fcfs"]
    between = [(x, y) for x, y in zip(*line.get_data(), strict=True) if 2 <= x <= 3]
    assert all(y == pytest.approx(0.105 + 10 * (x - 2)) for x, y in between)
    assert len(between) > 10


def test_a_bound_on_another_field_marks_only_the_rates() -> None:
    figure = draw(make_records(), "latency", View(bound=BOUND, metric="throughput_rps"), no_warnings)
    (axes,) = figure.axes
    assert axes.get_ylabel() == "throughput_rps (req/s)"
    assert axes.get_yscale() == "linear"
    assert list(labeled_lines(axes)) == ["fcfs", "fastserve"]
    assert texts_of(axes) == ["2.04", "3.04"]


def test_maximum_rates_of_bounds_that_always_or_never_hold() -> None:
    records = make_records() + [make_record("orca", rate) for rate in (2.0, 3.0)]
    loose = parse_bound("normalized_latency_s.mean<=15")
    rates = maximum_rates(lines_of(records), loose, no_warnings)
    assert {label: str(rate) for label, rate in rates.items()} == {"fcfs": "3.49", "fastserve": "≥ 4", "orca": "2.49"}
    figure = draw(records, "latency", View(bound=BOUND), no_warnings)
    assert texts_of(figure.axes[0]) == ["2.04", "3.04"], "orca breaks the bound at its lowest rate"


def test_ttft_and_tpot_have_panels_with_mean_and_tail() -> None:
    figure = draw(make_records(), "ttft-tpot", View(bound=parse_bound("tpot_s.p95<=1")), no_warnings)
    ttft, tpot = figure.axes
    assert [axes.get_ylabel() for axes in (ttft, tpot)] == ["TTFT (s)", "TPOT (s/token)"]
    assert set(labeled_lines(ttft)) == {"fcfs, mean", "fcfs, p95", "fastserve, mean", "fastserve, p95"}
    assert set(labeled_lines(tpot)) - set(labeled_lines(ttft)) == {"bound 1"}
    mean, tail = (labeled_lines(ttft)[f"fcfs, {name}"] for name in ("mean", "p95"))
    assert max(tail.get_ydata()) == pytest.approx(2 * max(mean.get_ydata()))
    assert legend_of(figure) == ["fcfs", "fastserve", "mean", "p95", "bound 1"]


def test_the_cdf_has_a_panel_per_metric_at_the_highest_common_rate() -> None:
    records = [*make_records(), make_record("fcfs", 5.0)]
    figure = draw(records, "cdf", View(), no_warnings)
    assert [axes.get_xlabel() for axes in figure.axes] == [
        "normalized latency (s/token)", "TTFT (s)", "TPOT (s/token)", "completion time (s)",
    ]  # fmt: skip
    assert figure.legends[0].get_title().get_text() == "at 4 req/s"
    curve = labeled_lines(figure.axes[0])["fcfs"]
    assert (curve.get_xdata()[0], curve.get_xdata()[-1]) == pytest.approx((20.105, 40.21))
    assert (curve.get_ydata()[0], curve.get_ydata()[-1]) == (0, 1)


def test_missing_metrics_have_no_panel_or_a_warning() -> None:
    records = make_records()
    for record in records:
        record["quantiles"]["tpot_s"] = []
        if record["recipe"] == "fcfs":
            record["quantiles"]["ttft_s"] = []
    warnings = Warnings()
    figure = draw(records, "cdf", View(rate_rps=2.0), warnings)
    assert [len(labeled_lines(axes)) for axes in figure.axes] == [2, 1, 2]
    assert warnings == ["cdf: left out 2 of 2 records of fcfs, rate 2: quantiles.ttft_s is empty"]
    assert legend_of(figure) == ["fcfs", "fastserve"]


def test_the_breakdown_stacks_its_parts_and_labels_the_sum() -> None:
    figure = draw(make_records(), "breakdown", View(rate_rps=1.0), no_warnings)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "time per request, mean (s)"
    assert legend_of(figure) == ["queueing", "execution", "swapping", "scheduling"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["fcfs", "fastserve"]
    bars = [[(bar.get_x(), bar.get_width()) for bar in part] for part in axes.containers]
    assert [part[0] for part in bars] == [
        pytest.approx(bar) for bar in ((0, 0.105), (0.105, 2), (2.105, 0.5), (2.605, 0.255))
    ]
    assert texts_of(axes) == ["2.86", "2.86"]
    assert axes.get_xlim() == pytest.approx((0, 1.1 * 2.86)), "there is space for the label of the longest bar"
    assert len({bar[0].get_hatch() for bar in axes.containers}) == 4


def test_the_kv_plot_has_a_column_per_recipe_and_is_not_clipped() -> None:
    figure = draw(make_records(), "kv", View(), no_warnings)
    shares, counts = figure.axes[:2], figure.axes[2:]
    assert [axes.get_title() for axes in shares] == ["fcfs", "fastserve"]
    assert shares[0].get_ylabel() == "share of KV memory"
    assert [axes.get_xlabel() for axes in counts] == ["time (s)", "time (s)"]
    assert legend_of(figure) == ["KV used", "KV allocated", "running", "waiting"]
    assert all(axes.get_ylim()[0] == 0 and axes.get_ylim()[1] >= 32 for axes in counts)


def test_columns_wrap_into_further_rows() -> None:
    records = [make_record(f"r{number}", 1.0) for number in range(6)]
    figure = draw(records, "kv", View(), no_warnings)
    assert [axes.get_title() for axes in figure.axes if axes.get_title()] == [f"r{number}" for number in range(6)]
    assert sum(axes.axison for axes in figure.axes) == 12


def test_lines_are_labeled_by_the_fields_that_differ() -> None:
    records = make_records() + make_records(hardware="h100-80gb")
    assert [line.label for line in lines_of(records)] == [
        "fcfs, a100-40gb", "fastserve, a100-40gb", "fcfs, h100-80gb", "fastserve, h100-80gb",
    ]  # fmt: skip
    records = make_records() + make_records(settings={"max_num_seqs": 8, "note": None})
    assert [line.label for line in lines_of(records)][::2] == ["fcfs, max_num_seqs=64", "fcfs, max_num_seqs=8"]


def test_settings_that_depend_on_recipe_rate_or_seed_do_not_split_lines() -> None:
    records = make_records()
    for number, record in enumerate(records):
        record["settings"] = {record["recipe"]: 1, "number": number}
    assert [line.label for line in lines_of(records)] == ["fcfs", "fastserve"]


@pytest.mark.parametrize(("kind", "missing"), [("breakdown", "breakdown_s"), ("kv", "series"), ("cdf", "quantiles")])
def test_records_that_lack_a_needed_field_are_omitted_with_a_warning(kind: str, missing: str) -> None:
    records = make_records()
    for record in records:
        if record["recipe"] == "fcfs" and record["workload"]["rate_rps"] > 2:
            record[missing] = None
    warnings = Warnings()
    figure = draw(records, kind, View(), warnings)
    (warning,) = warnings
    assert warning.startswith(f"{kind}: left out 4 of 8 records of fcfs, rate 3, 4: {missing} ")
    assert figure.legends[0].get_title().get_text() == "at 2 req/s", "the highest rate that both recipes still have"
    for record in records:
        record[missing] = None
    with pytest.raises(ConfigError, match=f"{kind}: no record can be used: {missing} "):
        draw(records, kind, View(), no_warnings)


def test_a_recipe_without_the_requested_rate_is_omitted_with_a_warning() -> None:
    warnings = Warnings()
    figure = draw([*make_records(), make_record("orca", 9.0)], "breakdown", View(rate_rps=2), warnings)
    assert len(figure.axes[0].containers[0]) == 2
    assert warnings == ["breakdown: left out orca: not measured at rate 2"]
    with pytest.raises(ConfigError, match="no rate was measured for every line; choose a rate of 1, 2, 3, 4, 9"):
        draw([*make_records(), make_record("orca", 9.0)], "breakdown", View(), no_warnings)


def test_a_replay_without_rate_can_be_plotted_as_a_distribution() -> None:
    records = make_records()[:1]
    records[0]["workload"]["rate_rps"] = None
    figure = draw(records, "cdf", View(), no_warnings)
    assert len(figure.axes) == 4
    assert figure.legends[0].get_title().get_text() == ""
    with pytest.raises(ConfigError, match=r"workload\.rate_rps is null"):
        draw(records, "latency", View(), no_warnings)


@pytest.mark.parametrize(
    ("kind", "view", "message"),
    [
        ("latencies", View(), "kind must be one of latency, .*did you mean latency"),
        ("latency", View(metric="ttft_s.men"), r"no field ttft_s\.men; nearest: ttft_s\.mean"),
        ("cdf", View(bound=parse_bound("recipe<=1")), "recipe is not a number"),
        ("kv", View(rate_rps=7), "rate 7 was not measured; choose one of 1, 2, 3, 4"),
    ],
)
def test_views_that_match_no_record_are_refused(kind: str, view: View, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draw(make_records(), kind, view, no_warnings)
    with pytest.raises(ConfigError, match="hold no records"):
        draw([], "latency", View(), no_warnings)


def test_a_single_record_suffices_for_every_kind(tmp_path: Path) -> None:
    written = plot_results([make_record("fcfs", 1.0)], "all", tmp_path, View(bound=BOUND), no_warnings)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in written)
    assert {path.stem for path in written} == set(SINGLE)


@pytest.mark.parametrize("kind", one_in(3, SINGLE))
def test_plots_are_reproducible_and_ignore_the_users_style(tmp_path: Path, kind: str) -> None:
    view = View(bound=BOUND)
    first = plot_results(make_records(), kind, tmp_path / "first", view, no_warnings)
    with mpl.rc_context({"font.size": 20, "axes.facecolor": "red", "svg.fonttype": "path"}):
        second = plot_results(make_records(), kind, tmp_path / "second", view, no_warnings)
    assert [path.name for path in first] == ["first.png", "first.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    text = first[1].read_text()
    assert "<text" in text, "text must not be converted to paths"
    assert "<dc:date>" not in text


def test_the_suffix_selects_the_format_and_kind_all_adds_prefixes(tmp_path: Path) -> None:
    def names(kind: str, out: str) -> list[str]:
        return [path.name for path in plot_results(records, kind, tmp_path / out, View(), Warnings())]

    records = make_records(series=None, breakdown_s=None)
    assert names("latency", "one.svg") == ["one.svg"]
    assert names("latency", "rate-2.5") == ["rate-2.5.png", "rate-2.5.svg"]
    assert names("all", "run.svg") == ["run-latency.svg", "run-cdf.svg", "run-ttft-tpot.svg"]
    with pytest.raises(ConfigError, match=r"out must end in \.png or \.svg"):
        names("latency", "one.pdf")
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere"):
        names("latency", "nowhere/one.png")


@pytest.mark.parametrize("kind", one_in(2, SINGLE, 1))
def test_all_text_has_a_readable_size(kind: str) -> None:
    figure = draw(make_records(), kind, View(bound=BOUND), no_warnings)
    sizes = [float(text.get_fontsize()) for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text()]
    assert len(sizes) > 5
    assert min(sizes) >= 8


def test_labels_contain_units() -> None:
    assert field_label("jct_s.p99") == "completion time, p99 (s)"
    assert field_label("classes.batch.ttft_s.mean") == "batch: TTFT, mean (s)"
    assert field_label("breakdown_s.queueing") == "breakdown_s.queueing"
    assert field_label("kv.swapped_in_bytes") == "kv.swapped_in_bytes (bytes)"


def test_line_styles_are_distinct() -> None:
    looks = [look(index) for index in range(len(COLORS) * len(MARKERS) * len(DASHES))]
    assert len(set(looks)) == len(looks)
    assert len({(look.marker, look.dash) for look in looks[:40]}) == 40, "they must also differ without color"


@given(positions=st.lists(st.floats(0, 10), min_size=1, max_size=8).map(sorted))
def test_spread_labels_keep_their_order_and_distance(positions: list[float]) -> None:
    spread = _spread(positions, 1.0, 10.0)
    assert spread[-1] <= 10
    assert all(after - before >= 1 - 1e-9 for before, after in pairwise(spread))


def run_plot(*args: object) -> Any:
    app = typer.Typer()
    app.command()(plot)
    return CliRunner().invoke(app, list(map(str, args)))


def test_the_command_prints_the_maximum_rates_and_the_paths(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    file = ResultsFile(path)
    for record in [*make_records(), make_record("orca", 2.0)]:
        file.append(record)
    run = run_plot(path, "--kind", "latency", "--bound", str(BOUND), "--out", tmp_path / "a.png")
    assert run.exit_code == 0, run.output
    assert run.stdout.splitlines() == [
        "largest rate (req/s) with normalized_latency_s.mean<=0.5",
        "fcfs       2.04",
        "fastserve  3.04",
        "orca       none: broken at the lowest rate measured",
        f"wrote {tmp_path / 'a.png'}",
    ]
    run = run_plot(path, "--rate", 2, "--kind", "kv", "--out", tmp_path / "k.svg")
    assert run.stdout == f"wrote {tmp_path / 'k.svg'}\n"


def test_invalid_input_gives_a_one_line_error(tmp_path: Path) -> None:
    for args in ((tmp_path / "no.json",), (tmp_path / "no.json", "--bound", "fast")):
        run = run_plot(*args)
        assert run.exit_code == 2
        assert run.stdout == ""
        assert run.stderr.startswith("error: ")
        assert len(run.stderr.splitlines()) == 1
