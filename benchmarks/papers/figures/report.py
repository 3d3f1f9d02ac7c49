"""The command of every figure: measure, write `result.json`, draw pictures and print tables.

A figure is a folder with a `run.py` that has two functions. `measure` runs the simulator and returns a `Result`. `draw`
returns pictures of a result, which may come from the file.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from matplotlib.figure import Figure

import harness
from papers.figures.runs import DURATION_S, MEASURED, SEEDS, Options, Result, Search, by_rate, mean, pick
from papers.recipes import label_of
from skipjoin.observe.record import Record
from skipjoin.report.bound import MaximumRate, field_value
from skipjoin.report.plots import style
from skipjoin.sim.experiments.system import System
from skipjoin.workload.workload import Synthetic

Row = Sequence[Any]
# A table of the result in a README, between a mark with its title and an end mark.
_TABLE = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- /table -->)", re.DOTALL)
# Parts of a record's workload that the result keeps.
_WORKLOAD = ("lengths", "rate_rps", "seed", "duration_s")
_DOCUMENTS = Path(__file__).resolve().parents[3] / "docs" / "figures"


def table(title: str, columns: Sequence[str], rows: Sequence[Row]) -> Result:
    return {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]}


def ratio_of(one: MaximumRate | None, other: MaximumRate | None) -> str:
    """Return the ratio of two rates, "-" if one is missing. If a rate is a lower bound, the ratio is a bound."""
    if one is None or other is None:
        return "-"
    sign = {(True, False): "≥ ", (False, True): "≤ ", (True, True): "? "}.get((one.at_least, other.at_least), "")
    return f"{sign}{one.rate_rps / other.rate_rps:.2f}x"


def rates_table(title: str, searches: Mapping[str, Search], relative_to: Sequence[str] = ("fcfs", "srpt")) -> Result:
    found = {name: search.rate for name, search in searches.items()}
    rows = [
        (name, "none" if rate is None else str(rate), *(ratio_of(rate, found[other]) for other in relative_to))
        for name, rate in found.items()
    ]
    return table(title, ("recipe", "largest req/s", *(f"to {other}" for other in relative_to)), rows)


_LATENCIES = {
    "s/token": "normalized_latency_s.mean",
    "P95 s/token": "normalized_latency_s.p95",
    "TTFT s": "ttft_s.mean",
    "P95 TTFT s": "ttft_s.p95",
    "JCT s": "jct_s.mean",
    "P99 JCT s": "jct_s.p99",
}


def latencies(title: str, records: Sequence[Record], names: Sequence[str], *, by: str = "recipe") -> Result:
    """Return the table of latencies by rate and name, means over seeds; `by` is the field of a record with the name."""
    rows = [
        (rate, name, *(mean(mine, field) for field in _LATENCIES.values()))
        for rate, some in by_rate(records).items()
        for name in names
        if (mine := pick(some, **{by: name}))
    ]
    return table(title, ("req/s", by, *_LATENCIES), rows)


Column = str | Callable[[Record], float]
_HEADS = {"rate_rps": "req/s", "in_flight": "in flight"}


def compared(title: str, records: Sequence[Record], keys: Sequence[str], columns: Mapping[str, Column]) -> Result:
    """Return a table with a row per combination of the keys' values; figures are means over the other labels."""
    rows = [
        (*key, *(mean_of(some, column) for column in columns.values())) for key, some in grouped(records, keys).items()
    ]
    return table(title, (*heads(keys), *columns), rows)


def heads(keys: Sequence[str]) -> list[str]:
    return [_HEADS.get(key, key) for key in keys]


def grouped(records: Sequence[Record], keys: Sequence[str]) -> dict[tuple[object, ...], list[Record]]:
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        values = (f"{record['workload'][key]:g}" if key == "rate_rps" else record[key] for key in keys)
        groups.setdefault(tuple(values), []).append(record)
    return groups


def mean_of(records: Sequence[Record], column: Column) -> float | None:
    read = column if callable(column) else lambda record: _value(record, column)
    values = [value for record in records if (value := read(record)) is not None]
    return fmean(values) if values else None


def _value(record: Record, field: str) -> float | None:
    place: object = record
    for name in field.split("."):
        place = place.get(name) if isinstance(place, Mapping) else None
    return field_value(record, field) if place is not None else None


def settings_of(
    systems: Sequence[System],
    workloads: Sequence[Synthetic],
    options: Options,
    seeds: int = SEEDS,
    note: str = "",
) -> Result:
    """Return everything that decides a ratio, for the file and the terminal; `note` is an addition in words."""
    groups: dict[str, Result] = {}
    for of in systems:
        name = f"{of.model} on {of.hardware}, cap {of.max_num_seqs}, {of.kv_blocks} blocks"
        name += "" if of.swap_dtype == "auto" else f", {of.swap_dtype} in CPU memory"
        name += f", {of.max_tokens} tokens asked for" if isinstance(of.max_tokens, int) else ""
        name += f", step noise {of.step_noise:g}" if of.step_noise else ""
        recipes = groups.setdefault(name, {"recipes": [], **of.describe()})["recipes"]
        label = label_of(of.recipe)
        recipe = label if of.predictor is None else f"{label} {of.predictor}"
        if recipe not in recipes:
            recipes.append(recipe)
    return {
        "duration_s": options.duration_s,
        "seeds": list(options.seeds(seeds)),
        "lengths": [workload.streams[0].lengths.name for workload in workloads],
        "arrivals": sorted({workload.streams[0].arrivals.name for workload in workloads}),
        **({"decisions": options.decisions} if options.decisions else {}),
        **({"note": note} if note else {}),
        "systems": groups,
    }


_ASKED = {"exact": "what they generate", "room": "the room of the context"}


def shown_settings(settings: Result) -> str:
    """Return the settings as lines; a figure without a workload has one text."""
    if "case" in settings:
        return str(settings["case"])
    lines = [
        f"lengths {', '.join(settings['lengths'])}; arrivals {', '.join(settings['arrivals'])}; "
        f"{settings['duration_s']:g} s; seeds {', '.join(map(str, settings['seeds']))}"
    ]
    lines += [f"decisions charged: {settings['decisions']}"] if "decisions" in settings else []
    lines += [settings["note"]] if "note" in settings else []
    for name, one in settings["systems"].items():
        asked = _ASKED.get(one["max_tokens"], one["max_tokens"])
        parts = (
            ", ".join(one["recipes"]),
            f"{one['max_num_batched_tokens']} tokens per step, KV {one['kv_gib']:g} GiB, host {one['swap_gib']:g} GiB",
            f"blocks of {one['block_size']}, alpha {one['starvation_s']:g} s, requests ask for {asked}",
        )
        lines.append(f"{name}: {', '.join(parts)}")
    return "\n".join(lines)


def main(
    file: str,
    text: str | None,
    measure: Callable[[Options], Result],
    draw: Callable[[Result], Mapping[str, Figure]],
    *,
    keeps: Sequence[str] = (),
    docs: Mapping[str, str] = MappingProxyType({}),
) -> Result:
    """Run the command of a figure: measure, write `result.json`, draw, print the tables and update the README.

    Args:
        keeps: Dotted fields of the records that the picture or another figure reads; the file has no others. Without
            fields it has no records.
        docs: Pictures that documents show, with their names in `docs/figures`. They are written only if the results
            are in the figure's folder.

    Returns:
        The result as the file has it.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="measure one seed and every other rate")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--duration", type=float, default=DURATION_S, help="seconds of arrivals")
    parser.add_argument("--lasting", type=float, help="seconds of arrivals of every run (default: the figure's own)")
    parser.add_argument("--seeds", type=int, help="number of seeds (default: the figure's own)")
    parser.add_argument(
        "--decision-ms",
        type=_decisions,
        dest="decisions",
        help="time that each step is charged for its decision, in milliseconds or 'measured': the mean CPU time of "
        "decisions in a first run (default: the figure's own)",
    )
    parser.add_argument(
        "--out", type=Path, help="folder for results (default: the figure's own, or a scratch folder with --quick)"
    )
    parser.add_argument("--draw", action="store_true", help="draw and print the existing result.json")
    args = parser.parse_args()
    # Without a handler the processes of a sweep would outlive a terminated command.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    home = Path(file).resolve().parent
    out = args.out or (home if not args.quick else Path(tempfile.gettempdir()) / "skipjoin-figures" / home.name)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "result.json"
    if not args.draw:
        options = Options(
            out=out,
            quick=args.quick,
            jobs=args.jobs,
            duration_s=args.duration,
            lasting_s=args.lasting,
            seed_count=args.seeds,
            decisions=args.decisions,
        )
        start = time.monotonic()
        found = measure(options)
        found["records"] = [thin(record, keeps) for record in found.get("records", [])] if keeps else []
        write_result(path, home.name, found, quick=args.quick, seconds=time.monotonic() - start)
    result = json.loads(path.read_text(encoding="utf-8"))
    with style.styled():
        for name, figure in draw(result).items():
            style.save(figure, out / name)
            if name in docs and out == home:
                style.save(figure, _DOCUMENTS / docs[name])
    if out == home:
        fill_readme(home / "README.md", result)
    print(shown(result))
    print(f"wrote {out}", file=sys.stderr)
    return dict(result)


def _decisions(text: str) -> float | str:
    if text == MEASURED:
        return text
    try:
        seconds = float(text) / 1000
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e3:
        raise argparse.ArgumentTypeError(f"must be milliseconds in [0, 1000000) or {MEASURED}, got {text!r}")
    return seconds


def write_result(path: Path, name: str, found: Result, *, quick: bool, seconds: float) -> None:
    """Write the result's file: a header, the figure's own parts, and one record per line."""
    records = found.pop("records", [])
    head: Result = {"figure": name, "quick": quick, **harness.new_record(seconds=round(seconds, 1)), **found}
    parts = [f"{json.dumps(key)}: {_dumped(value)}" for key, value in head.items()]
    lines = ",\n".join(json.dumps(record, allow_nan=False) for record in records)
    parts.append(f'"records": [\n{lines}\n]' if records else '"records": []')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _dumped(value: object) -> str:
    """Return readable JSON, with short lists in one line."""
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(flat) <= 110 or not isinstance(value, dict | list):
        return flat
    if isinstance(value, list):
        return "[\n" + ",\n".join(_dumped(one) for one in value) + "\n]"
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_dumped(one)}" for key, one in value.items()) + "\n}"


def fill_readme(path: Path, result: Result) -> None:
    """Put the result's tables between the marks `<!-- table: TITLE -->` and `<!-- /table -->` of a README."""
    if path.exists():
        tables = {one["title"]: _compact(one) for one in result["tables"]}
        text = path.read_text(encoding="utf-8")
        text = _TABLE.sub(lambda marks: f"{marks[1]}\n{tables[marks[2]]}\n\n{marks[3]}", text)
        path.write_text(text, encoding="utf-8")


def _compact(one: Result) -> str:
    head, *rows = ("|".join(map(_text, row)) for row in (one["columns"], *one["rows"]))
    return "\n".join(f"|{line}|" for line in (head, "|".join(["---"] * len(one["columns"])), *rows))


def thin(record: Record, keeps: Sequence[str]) -> Record:
    """Return what identifies a run (labels, workload, predictor), and the dotted fields `keeps`."""
    kept = {name: value for name, value in record.items() if isinstance(value, str)}
    kept["workload"] = {name: record["workload"][name] for name in _WORKLOAD if name in record["workload"]}
    for field in ("prediction.predictor", *keeps):
        *above, last = field.split(".")
        place = reduce(lambda part, name: part.get(name, {}), above, record)
        if last in place:
            reduce(lambda part, name: part.setdefault(name, {}), above, kept)[last] = place[last]
    return kept


def shown(result: Result) -> str:
    blocks = [f"{result['figure']}{' (quick)' if result['quick'] else ''}\n{shown_settings(result['settings'])}"]
    return "\n\n".join([*blocks, *map(shown_table, result["tables"])]) + "\n"


def shown_table(one: Result) -> str:
    rows = [[_text(value) for value in row] for row in (one["columns"], *one["rows"])]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return f"{one['title']}\n\n" + "\n".join(lines)


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
