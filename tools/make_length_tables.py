"""Write the tables of request lengths in src/skipjoin/workload/tables from files of measured lengths.

    python tools/make_length_tables.py TRACES [--out FOLDER]

TRACES is a folder with the CSV files of `SOURCES`, which have the columns prompt_tokens and output_tokens. A table has
quantiles and a few moments, and no rows of the file.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Pair = tuple[int, int]

DEFAULT_OUT = Path(__file__).resolve().parents[1] / "src" / "skipjoin" / "workload" / "tables"
EQUAL_BINS = 40
# The last bin is split further, because a few very long prompts are much of the load.
TAIL_EDGES = (0.985, 0.993, 0.997, 0.999, 1.0)
PROMPT_KNOTS = 9
OUTPUT_LEVELS = (
    *(0.0, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65),
    *(0.7, 0.75, 0.8, 0.84, 0.88, 0.91, 0.94, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995, 0.998, 0.999, 1.0),
)
METHOD = (
    "Rows sorted by prompt tokens (equal prompts stay in file order) and cut at the shares `upto`. Per bin: prompt "
    f"tokens at {PROMPT_KNOTS} equally spaced ranks, and output tokens of the bin's rows at `output_levels`."
)


@dataclass(frozen=True)
class Source:
    """The origin of a table and published figures of the same data."""

    file: str
    source: str
    license: str
    published: dict[str, Any]
    caveat: str


SOURCES = {
    "sharegpt": Source(
        "sharegpt_v3_le2048.csv",
        "First question and answer of each conversation in ShareGPT_V3 (ShareGPT_Vicuna_unfiltered), as token counts "
        "of efeslab/Nanoflow @d6b381e5 datasets/traces/sharegpt.csv: LLaMA tokenizer with BOS; prompt >= 4, "
        "output >= 4, prompt + output <= 2048; 50,000 of the 54,158 rows left, drawn at random.",
        "Apache-2.0 (Nanoflow); the conversations are texts of ShareGPT users. Only quantiles of lengths are here.",
        {"prompt": 161.31, "output": 337.99, "where": "EconoServe table 2"},
        "Means 3 to 4 % below the published ones. BROS table 2 gives other ShareGPT lengths (222.76 / 234.51).",
    ),
    "alpaca": Source(
        "alpaca.csv",
        "tatsu-lab/stanford_alpaca, instruction with input and the answer of text-davinci-003, GPT-2 BPE (= OPT) with "
        "BOS on both sides; 50,000 of the 52,002 rows, drawn at random.",
        "CC BY-NC 4.0 (Alpaca DATA_LICENSE). Only quantiles of lengths are here.",
        {"prompt": 19.31, "output": 58.41, "where": "EconoServe table 2"},
        "",
    ),
    "lmsys": Source(
        "lmsys_chat_1m_first_turn.csv",
        "First turn of LMSYS-Chat-1M conversations, as token counts of efeslab/Nanoflow @d6b381e5 "
        "datasets/traces/lmsys.csv: LLaMA tokenizer with BOS; 50,000 of 100,000 rows, drawn at random.",
        "Apache-2.0 (Nanoflow); the text of LMSYS-Chat-1M has a license of its own. Only quantiles of lengths are "
        "here.",
        {"prompt": 90.5, "output": 237.04, "where": "BROS table 2 (RT-LMSYS-CHAT-1M)"},
        "The measured mean output is 12 % below the published one; BROS does not say which rows or tokenizer it "
        "used. `lmsys*1,1.14` has the published mean.",
    ),
    "bookcorpus": Source(
        "cal_bookcorpus_surrogate_1952_681.csv",
        "A SURROGATE, not BookCorpus: pairs of ShareGPT with whole histories (microsoft/sarathi-serve @72339db5 "
        "sharegpt_8k_filtered_stats_llama2_tokenizer.csv), reweighted by maximum entropy; 10,000 rows.",
        "Apache-2.0 (Sarathi-Serve). Only quantiles of lengths are here.",
        {"prompt": 1952.11, "output": 681.2, "where": "EconoServe table 2"},
        "The two means are calibrated to the published ones; the shape is ShareGPT's, not BookCorpus's.",
    ),
}


def read_pairs(path: Path) -> list[Pair]:
    with path.open(newline="", encoding="utf-8") as file:
        return [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]


def make_table(pairs: Sequence[Pair], source: Source) -> dict[str, Any]:
    """Return the table of the pairs as JSON data."""
    ranked = sorted(pairs, key=lambda pair: pair[0])
    prompts = [prompt for prompt, _ in ranked]
    edges = [0.0, *(index / EQUAL_BINS for index in range(1, EQUAL_BINS)), *TAIL_EDGES]
    bins = []
    for low, high in pairwise(edges):
        outputs = sorted(output for _, output in ranked[round(low * len(ranked)) : round(high * len(ranked))])
        levels = [low + (high - low) * knot / (PROMPT_KNOTS - 1) for knot in range(PROMPT_KNOTS)]
        bins.append(
            {
                "upto": round(high, 6),
                "prompt": [quantile(prompts, level) for level in levels],
                "output": [quantile(outputs, level) for level in OUTPUT_LEVELS],
            }
        )
    return {
        "source": source.source,
        "license": source.license,
        "caveat": source.caveat,
        "published": source.published,
        "rows": len(pairs),
        "measured": moments(pairs),
        "method": METHOD,
        "output_levels": list(OUTPUT_LEVELS),
        "bins": bins,
    }


def quantile(ranked: Sequence[int], level: float) -> int:
    """Return the quantile of sorted values."""
    return ranked[min(int(level * len(ranked) + 1e-9), len(ranked) - 1)]


def moments(pairs: Sequence[Pair]) -> dict[str, Any]:
    prompts, outputs = [prompt for prompt, _ in pairs], [output for _, output in pairs]
    return {
        "prompt": marginal(prompts),
        "output": marginal(outputs),
        "correlation": round(statistics.correlation(prompts, outputs), 4),
        "rank_correlation": round(statistics.correlation(average_ranks(prompts), average_ranks(outputs)), 4),
    }


def marginal(values: Sequence[int]) -> dict[str, float]:
    """Return mean, standard deviation and quantiles of one length."""
    ranked = sorted(values)
    spread = {"mean": round(statistics.fmean(values), 3), "std": round(statistics.pstdev(values), 3)}
    return spread | {f"p{percent}": quantile(ranked, percent / 100) for percent in (5, 25, 50, 75, 95, 99)}


def average_ranks(values: Sequence[int]) -> list[float]:
    """Return the rank of each value, with the mean rank for equal values."""
    total: dict[int, int] = {}
    for value in values:
        total[value] = total.get(value, 0) + 1
    ranks: dict[int, float] = {}
    below = 0
    for value in sorted(total):
        ranks[value] = below + (total[value] - 1) / 2
        below += total[value]
    return [ranks[value] for value in values]


def as_text(table: dict[str, Any]) -> str:
    """Return JSON with one line per entry and per bin."""
    entries = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items() if key != "bins"]
    bins = ",\n".join(f"    {json.dumps(row, separators=(',', ':'))}" for row in table["bins"])
    return "{\n" + ",\n".join([*entries, f'  "bins": [\n{bins}\n  ]']) + "\n}\n"


def main() -> None:
    """Write every table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, help="the folder with the files of measured lengths")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="the folder to write to")
    options = parser.parse_args()
    for name, source in SOURCES.items():
        table = make_table(read_pairs(options.traces / source.file), source)
        (options.out / f"{name}.json").write_text(as_text(table), encoding="utf-8")
        print(name, table["rows"], table["measured"])


if __name__ == "__main__":
    main()
