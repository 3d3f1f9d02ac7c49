"""ALISE table 2: how well output lengths are predicted from prompts, and what a prediction takes.

    SKIPJOIN_TRACES=FOLDER python benchmarks/papers/alise/table2/run.py [--only sharegpt_text]

Runs `skipjoin predict evaluate` on three sets of texts, which are not in the repository: each forecaster learns from
one part of a set and is measured on the other. For Vicuna-7B's answers the oracle is a second run of the same prompts.
Of `alpaca_text` the first 12,000 rows are used. About five minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from machine import describe_machine
from papers.figures.report import shown_table, table

HOME = Path(__file__).resolve().parent
SKIPJOIN = Path(sys.executable).with_name("skipjoin")
# By name: what `predict evaluate` is told besides the trace.
SETS = {
    "sharegpt_text": (),
    "alpaca_vicuna7b_lengths": ("--second-run", "len_t05"),
    "alpaca_text": ("--rows", "12000"),
}
COLUMNS = ("r", "r_log", "mae", "within_25", "accuracy", "pairwise", "coverage", "milliseconds")


def evaluate(name: str, folder: Path) -> dict[str, Any]:
    """The figures of one set."""
    with tempfile.TemporaryDirectory(prefix="skipjoin-bench-") as scratch:
        out = Path(scratch) / "record.json"
        trace = folder / f"{name}.jsonl.gz"
        command = [SKIPJOIN, "predict", "evaluate", "--trace", trace, "--json", out, *SETS[name]]
        subprocess.run([str(part) for part in command], stdout=sys.stderr, check=True)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(SETS), help="one of the sets")
    parser.add_argument("--out", type=Path, default=HOME / "result.json")
    args = parser.parse_args()
    if "SKIPJOIN_TRACES" not in os.environ:
        parser.error("SKIPJOIN_TRACES must name the folder of the traces with texts, which the repository lacks")
    folder = Path(os.environ["SKIPJOIN_TRACES"])
    result = {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "sets": [evaluate(name, folder) for name in ([args.only] if args.only else SETS)],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for found in result["sets"]:
        rows = [[one["name"], *(one[column] for column in COLUMNS)] for one in found["forecasters"]]
        title = f"{found['trace']}: {found['train']} rows to learn from, {found['test']} measured"
        print(shown_table(table(title, ("forecaster", *COLUMNS), rows)) + "\n")


if __name__ == "__main__":
    main()
