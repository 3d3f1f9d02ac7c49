"""ALISE table 2: accuracy and cost of predicting output lengths from prompts.

    SKIPJOIN_TRACES=FOLDER python benchmarks/papers/alise/table2/run.py [--only sharegpt_text]

The script runs `skipjoin predict evaluate` on three sets of texts, which are not in the repository. Each forecaster
learns from one part of a set and is measured on the other. For Vicuna-7B's answers the oracle is a second run of the
same prompts. Of `alpaca_text` the first 12,000 rows are used. It takes about five minutes on two cores.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
import harness
from papers.figures.report import shown_table, table

# Options of `predict evaluate` for each set.
SETS = {
    "sharegpt_text": (),
    "alpaca_vicuna7b_lengths": ("--second-run", "len_t05"),
    "alpaca_text": ("--rows", "12000"),
}
COLUMNS = ("r", "r_log", "mae", "within_25", "accuracy", "pairwise", "coverage", "milliseconds")


def evaluate(name: str, folder: Path) -> dict[str, Any]:
    """Return the figures of one set."""
    trace = folder / f"{name}.jsonl.gz"
    found: dict[str, Any] = harness.records_of("predict", "evaluate", "--trace", trace, *SETS[name], option="--json")
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", choices=tuple(SETS), help="one of the sets")
    args = parser.parse_args()
    if "SKIPJOIN_TRACES" not in os.environ:
        parser.error("SKIPJOIN_TRACES must name the folder of the traces with texts, which are not in the repository")
    folder = Path(os.environ["SKIPJOIN_TRACES"])
    result = harness.new_record(sets=[evaluate(name, folder) for name in ([args.only] if args.only else SETS)])
    harness.write_record(result, args.out)
    for found in result["sets"]:
        rows = [[one["name"], *(one[column] for column in COLUMNS)] for one in found["forecasters"]]
        title = f"{found['trace']}: {found['train']} training rows, {found['test']} test rows"
        harness.show(shown_table(table(title, ("forecaster", *COLUMNS), rows)) + "\n")


if __name__ == "__main__":
    main()
