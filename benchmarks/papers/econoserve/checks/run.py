"""Check properties of EconoServe's policies.

OPT-13B on one A100 with 12 GiB of KV in overload. A reservation is the number of blocks that a request may hold. All
reservations together exceed the pool only if some are nested in others.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

from papers.econoserve.setting import OPT_13B, SHAREGPT, SLO, said, system
from papers.econoserve.watch import watched
from papers.figures.pictures import bars
from papers.figures.report import main, table
from papers.figures.runs import Options, Result, pick, poisson
from papers.figures.variants import Variant
from skipjoin.observe.record import Record
from skipjoin.options import Value
from skipjoin.report.plots import style
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.machines import Machine
from skipjoin.workload.workload import Synthetic, synthetic

# Half long and half short outputs; rates exceed the capacity.
MIXED = synthetic("fixed:64,960", "poisson", ["name=short,share=0.5,lengths=fixed:16,100,arrivals=poisson"])
ALIKE, PROMPTS, SPREAD = map(poisson, ("fixed:64,256", "fixed:128,32", "uniform:16-512,16-900"))
_S = 60.0
# What the checks read.
KEPT = (
    *("watch.max_reserved", "watch.hosted", "watch.vacated", "watch.synced", "watch.forwards", "watch.first"),
    *("requests.finished", "requests.unfinished", "jct_s.mean", "normalized_latency_s.mean", "throughput_tps"),
    *("kv.swapped_out_bytes", "kv.swapped_in_bytes", "kv.preemptions", "kv.allocated_mean", "kv.used_mean"),
    *("groups.mean_size", "forward.target", "slo.jct_attained"),
)
CASES: dict[str, tuple[str, str | None, dict[str, Value], Synthetic, float]] = {
    "mixed, econoserve": ("econoserve", "oracle", {}, MIXED, 5.0),
    "mixed, econoserve-sdo": ("econoserve-sdo", "oracle", {}, MIXED, 5.0),
    "mixed, econoserve-sd": ("econoserve-sd", "oracle", {}, MIXED, 5.0),
    "noise, econoserve": ("econoserve", "noise:0.5", {}, poisson("sharegpt"), 5.0),
    "alike, econoserve-sdo": ("econoserve-sdo", "oracle", {}, ALIKE, 8.0),
    "spread, econoserve-sdo": ("econoserve-sdo", "oracle", {"length_range": 1}, SPREAD, 4.0),
    "prompts, econoserve-sdo": ("econoserve-sdo", "oracle", {"reserve": 0.3}, PROMPTS, 80.0),
    "no padding, econoserve": ("econoserve", "oracle", {"padding": 0.0}, poisson("sharegpt"), 5.0),
    "fcfs": ("fcfs", None, {}, poisson("sharegpt"), 5.0),
    "short forecasts, econoserve": ("econoserve", "noise:0.5", {"padding": 0.0}, poisson("sharegpt"), 5.0),
    "short forecasts, econoserve-sdo": ("econoserve-sdo", "noise:0.5", {"padding": 0.0}, poisson("sharegpt"), 5.0),
    "econoserve": ("econoserve", "oracle", {}, poisson("sharegpt"), 5.0),
    "econoserve-sdo": ("econoserve-sdo", "oracle", {}, poisson("sharegpt"), 5.0),
    "econoserve-sd": ("econoserve-sd", "oracle", {}, poisson("sharegpt"), 5.0),
    "econoserve, longest first": ("econoserve", "oracle", {"order": "longest"}, poisson("sharegpt"), 5.0),
    "econoserve-sdo, longest first": ("econoserve-sdo", "oracle", {"order": "longest"}, poisson("sharegpt"), 5.0),
}
# A case without padding, and the same with blocks that waste no slots.
UNPADDED, EXACT = "no padding, econoserve", "no padding, blocks of one token"
# Share of the KV that generations reserve which nested halves can use at most (section 3.2).
IDEAL_USE = 0.75


def measure(options: Options) -> Result:
    asked = [({"variant": name}, _cell(*case)) for name, case in CASES.items()]
    asked.append(({"variant": EXACT}, _cell(*CASES[UNPADDED], machine=replace(OPT_13B, block_size=1))))
    records = watched(asked, options)
    found = {record["variant"]: record for record in records}
    rows = [(name, _shown(value), target, "yes" if holds else "no") for name, value, target, holds in checks(found)]
    return {
        "settings": said([cell.system for _, cell in asked], options, note=f"Every run lasts {_S:g} s."),
        "tables": [table("Checks", ("check", "value", "target", "holds"), rows)],
        "records": records,
    }


def _cell(
    recipe: str,
    predictor: str | None,
    params: dict[str, Value],
    workload: Synthetic,
    rate: float,
    *,
    machine: Machine = OPT_13B,
) -> Cell:
    of = system(Variant(recipe, recipe, predictor), SHAREGPT, machine, **params)
    return Cell(of, workload, Extent(rate, _S, 0), SLO)


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def checks(found: Mapping[str, Record]) -> list[tuple[str, object, str, bool]]:
    """Return name, value, target and outcome of each check; `found` has the records by case."""
    return [*nesting(found), *forecasts(found), *objectives(found)]


def nesting(found: Mapping[str, Record]) -> list[tuple[str, object, str, bool]]:
    """Check nested reservations, groups and forward sizes."""
    mixed, plain = found["mixed, econoserve"], found["mixed, econoserve-sdo"]
    reserved = mixed["watch"]["max_reserved"], plain["watch"]["max_reserved"]
    moved = mixed["kv"]["swapped_out_bytes"] + mixed["kv"]["swapped_in_bytes"]
    share = mixed["watch"]["hosted"] / mixed["requests"]["finished"]
    ratio = mixed["jct_s"]["mean"] / plain["jct_s"]["mean"]
    per_token = _per_token(mixed, plain)
    on_sharegpt = _per_token(found["econoserve"], found["econoserve-sdo"])
    unordered = _per_token(mixed, found["mixed, econoserve-sd"])
    noisy, alike = found["noise, econoserve"], found["alike, econoserve-sdo"]["watch"]
    size = found["spread, econoserve-sdo"]["groups"]["mean_size"]
    forward = _reached(found["prompts, econoserve-sdo"])
    return [
        ("1 reservations at one time to the pool, econoserve", reserved[0], "above 1", reserved[0] > 1),
        ("1 the same, econoserve-sdo", reserved[1], "at most 1", reserved[1] <= 1),
        ("1 swapped bytes", moved, "0", moved == 0),
        ("1 hosted, share of requests", share, "at least 0.2", share >= 0.2),
        ("1 mean JCT to econoserve-sdo", ratio, "at most 0.75", ratio <= 0.75),
        ("1 mean s/token to econoserve-sdo", per_token, "at most 0.75", per_token <= 0.75),
        ("1 the same, econoserve-sd, which does not order", unordered, "at most 0.75", unordered <= 0.75),
        ("1 the same, econoserve-sdo, ShareGPT", on_sharegpt, "at most 0.75", on_sharegpt <= 0.75),
        ("2 vacated with noise:0.5", noisy["watch"]["vacated"], "above 0", noisy["watch"]["vacated"] > 0),
        ("2 unfinished", noisy["requests"]["unfinished"], "0", noisy["requests"]["unfinished"] == 0),
        ("3 groups that end with one step, equal lengths", alike["synced"], "1", alike["synced"] == 1),
        ("3 mean size of groups, uniform lengths", size, "below 1.5", size < 1.5),
        ("4 steps at 0.9 of target while prompts fit the reserve", forward, "at least 0.9", forward >= 0.9),
    ]


def _per_token(one: Record, other: Record) -> float:
    return float(one["normalized_latency_s"]["mean"] / other["normalized_latency_s"]["mean"])


def _reached(record: Record) -> float:
    """Return the share of plans at 0.9 of the target, of those while a prompt waits that fits the reserve."""
    plans = {int(tokens): count for tokens, count in record["watch"]["forwards"].items()}
    near = sum(count for tokens, count in plans.items() if tokens >= 0.9 * record["forward"]["target"])
    return near / max(1, sum(plans.values()))


def forecasts(found: Mapping[str, Record]) -> list[tuple[str, object, str, bool]]:
    """Check the effects of right and wrong forecasts."""
    exact, other = (_lost(found[name]) for name in ("no padding, econoserve", "fcfs"))
    first, nested = (_first(found[f"short forecasts, {name}"]) for name in ("econoserve-sdo", "econoserve"))
    return [
        ("5 dropped and swapped, lengths known, no padding", exact, "0", exact == 0),
        ("5 the same, fcfs", other, "above 0", other > 0),
        ("5 first uses, forecasts too short", " ".join(first), "reserve pause", first[:2] == ["reserve", "pause"]),
        (
            "5 the same where reservations nest: nested reservations that overrun lose it",
            " ".join(nested),
            "reserve first",
            nested[0] == "reserve",
        ),
    ]


def _first(record: Record) -> list[str]:
    """Return the ways to handle reservations that are too small, in the order of their first use."""
    first = record["watch"]["first"]
    return sorted((way for way in first if way != "more"), key=first.__getitem__)


def _lost(record: Record) -> int:
    kinds = record["kv"]["preemptions"]
    return int(kinds["swap"] + kinds["drop"])


def objectives(found: Mapping[str, Record]) -> list[tuple[str, object, str, bool]]:
    """Check attainment, KV and throughput in overload."""
    met = {name: record["slo"]["jct_attained"] for name, record in found.items()}
    kv = found["econoserve"]["kv"]
    use = found[EXACT]["kv"]["used_mean"] / found[EXACT]["kv"]["allocated_mean"]
    ratio = found["econoserve"]["throughput_tps"] / found["fcfs"]["throughput_tps"]
    rise = met["econoserve-sdo"] - met["econoserve-sd"]
    rows: list[tuple[str, object, str, bool]] = [
        ("6 attainment, econoserve-sdo less econoserve-sd", rise, "above 0", rise > 0),
        ("6 KV allocated", kv["allocated_mean"], "at least 0.9", kv["allocated_mean"] >= 0.9),
        ("6 KV used", kv["used_mean"], "at most 0.65", kv["used_mean"] <= 0.65),
        ("6 the same without padding", found[UNPADDED]["kv"]["used_mean"], "printed", True),
        ("6 the same in blocks of one token, to the allocated KV", use, f"at most {IDEAL_USE:g}", use <= IDEAL_USE),
        ("6 tokens/s to fcfs, until the last request ends", ratio, "below 1: fcfs is ahead", ratio < 1),
    ]
    for name in ("fcfs", "econoserve-sd", "econoserve-sdo", "econoserve"):
        rows.append((f"6 attainment, {name}", met[name], "printed", True))
    for name in ("econoserve-sdo, longest first", "econoserve, longest first"):
        rows.append((f"6 attainment, {name}", met[name], "printed", True))
    return rows


def draw(result: Result) -> Mapping[str, Figure]:
    names: Sequence[str] = ("fcfs", "econoserve-sd", "econoserve-sdo", "econoserve")
    records = [pick(result["records"], variant=name)[0] for name in names]
    figure = style.new_figure(style.NARROW_IN, 2.8)
    axes = figure.add_subplot()
    series = {
        "attainment": [record["slo"]["jct_attained"] for record in records],
        "KV used": [record["kv"]["used_mean"] for record in records],
        "KV allocated": [record["kv"]["allocated_mean"] for record in records],
    }
    bars(axes, list(names), series, dict(zip(series, style.COLORS, strict=False)))
    axes.set_ylim(0, 1.05)
    style.legend(figure, *axes.get_legend_handles_labels())
    return {"checks.png": figure}


if __name__ == "__main__":
    main(__file__, __doc__, measure, draw, keeps=KEPT)
