"""What the benchmark scripts share: options, timing, statistics, turns, records and calls of `skipjoin`.

A script adds this folder to its path and says only what it measures.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import IO, Any, TypeVar

from machine import describe_machine

SKIPJOIN = Path(sys.executable).with_name("skipjoin")
ROOT = Path(__file__).resolve().parents[1]
# Pause between two runs of a comparison.
PAUSE_S = 2.0
T = TypeVar("T")
Record = dict[str, Any]


def parser(text: str | None, **counts: int) -> argparse.ArgumentParser:
    """Return a parser with `--out` and one integer option for each of `counts`, such as `repeats=3`."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in counts.items():
        made.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    made.add_argument("--out", type=Path, help="file that receives the record as JSON")
    return made


def words(text: str) -> list[str]:
    """Split a comma-separated option."""
    return [word.strip() for word in text.split(",") if word.strip()]


def some_of(what: str, known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return an argparse type for a comma-separated choice of `known`; `what` names it in the error."""
    names = list(known)

    def parse(text: str) -> list[str]:
        if unknown := [word for word in words(text) if word not in names]:
            raise argparse.ArgumentTypeError(f"{what} must be of {', '.join(names)}, got {', '.join(unknown)}")
        return words(text)

    return parse


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    work()
    return clock() - begin


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()}


def quartiles(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
    return {"median": round(middle, digits), "p25": round(low, digits), "p75": round(high, digits)}


def spreads(runs: Sequence[Mapping[str, float]], digits: int = 3) -> dict[str, dict[str, float]]:
    return {name: spread([run[name] for run in runs], digits) for name in runs[0]}


def medians(runs: Sequence[Mapping[str, float]], digits: int = 3) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), digits) for name in runs[0]}


def median_ratio(ones: Iterable[float], others: Iterable[float], digits: int = 3) -> float:
    """Return the median of the ratios of the turns that both have: a drift of the machine affects both sides."""
    return round(statistics.median(one / other for one, other in zip(ones, others, strict=False)), digits)


def in_turn(entries: Iterable[T], turn: int) -> list[T]:
    """Return the entries in order, reversed in every second turn, so that a drift favors none of them."""
    return list(entries)[:: -1 if turn % 2 else 1]


def turns(names: Collection[str], seeds: Iterable[int]) -> Iterator[tuple[int, str]]:
    for turn, seed in enumerate(seeds):
        for name in in_turn(names, turn):
            time.sleep(PAUSE_S)
            yield seed, name


def new_record(**fields: Any) -> Record:
    """Return a record that begins with the date, the command and the machine as they are now."""
    return {"date": date.today().isoformat(), "command": command(), "machine": describe_machine(), **fields}


def command() -> str:
    """Return the command line of this script, without folders outside the repository."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    arguments = [Path(one).name if one.startswith("/") else one for one in sys.argv[1:]]
    return shlex.join(["python", str(name), *arguments])


def read_record(out: Path | None) -> Record:
    return dict(json.loads(out.read_text(encoding="utf-8"))) if out is not None and out.exists() else {}


def write_record(record: Record, out: Path | None) -> None:
    """Write a record whole or not at all. Does nothing without a file."""
    if out is not None:
        partial = out.with_name(f"{out.name}.tmp")
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        partial.replace(out)


def report(record: Record, out: Path | None) -> None:
    print(json.dumps(record, indent=1), flush=True)
    write_record(record, out)


def show(*values: object) -> None:
    print(*(json.dumps(value) if isinstance(value, dict | list) else value for value in values), flush=True)


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="skipjoin-bench-") as folder:
        yield Path(folder)


def run_skipjoin(*arguments: object, timeout_s: float | None = None, log: IO[str] | None = None) -> None:
    """Run a `skipjoin` command with its output on standard error, or in `log`.

    Raises:
        RuntimeError: The command fails or takes longer than `timeout_s`.
    """
    try:
        subprocess.run([str(part) for part in (SKIPJOIN, *arguments)], stdout=log or sys.stderr, stderr=log,
                       timeout=timeout_s, check=True)  # fmt: skip
    except subprocess.SubprocessError as error:
        raise RuntimeError(f"skipjoin {arguments[0]}: {error}") from error


def records_of(*arguments: object, timeout_s: float | None = None, option: str = "--out") -> Any:
    """Run a `skipjoin` command and return the JSON that it writes to the file of `option`."""
    with scratch() as folder:
        out = folder / "records.json"
        run_skipjoin(*arguments, option, out, timeout_s=timeout_s)
        return json.loads(out.read_text(encoding="utf-8"))


def source_at(commit: str, folder: str, into: Path) -> Path:
    """Extract a folder of this repository as of a commit, and return its place below `into`."""
    archive = subprocess.run(["git", "archive", commit, folder], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(into)], input=archive, check=True)
    return into / folder
