"""ALISE table 2: accuracy and cost of predicting output lengths from prompts.

The script runs `skipjoin predict evaluate` on three sets of texts, which are not in the repository. Each forecaster
learns from one part of a set and is measured on the other. "trained" are those of `skipjoin predict train`, with hashed
tokens and with the sentence encoder. For Vicuna-7B's answers the oracle is a second run of the same prompts. Of
`alpaca_text` the first 12,000 rows are used. The proxy is a fine-tuned BERT, on prompts of its own; its time is that of
a BERT of the same size with random weights. It takes about fifteen minutes on two cores.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from time import process_time
from typing import Any

import torch
from transformers import BertConfig, BertModel

sys.path.insert(0, str(Path(__file__).parents[3]))
import harness
from papers.alise import parts
from papers.figures.report import shown_table, table
from skipjoin.core.forecast import Forecast
from skipjoin.forecast.encode import HashedTokens
from skipjoin.forecast.evaluate import Evaluation, Sample

# Options of `predict evaluate` for each set.
SETS = {
    "sharegpt_text": (),
    "alpaca_vicuna7b_lengths": ("--second-run", "len_t05"),
    "alpaca_text": (),
}
# Rows that are used; the others use all.
ROWS = {"alpaca_text": 12_000}
# Classes that SSJF's BERT predicted for prompts of LMSYS-Chat-1M, with the lengths of Vicuna-13B's answers.
PROXY = "ssjf_lmsys_vicuna13b_predictions.csv"
# Prompts on which BERT is timed.
TIMED = 200
COLUMNS = ("r", "r_log", "mae", "within_25", "accuracy", "pairwise", "coverage", "milliseconds")


def evaluate(name: str, encoders: Sequence[str], into: Path) -> dict[str, Any]:
    """Return the figures of one set, with those of forecasters that were trained on its training part."""
    trace, rows = parts.folder() / f"{name}.jsonl.gz", ROWS.get(name)
    training, _ = parts.write_parts(name, into, rows)
    options = (*SETS[name], *(() if rows is None else ("--rows", rows)))
    found: dict[str, Any] = {}
    for encoder in encoders:
        state = into / f"{name}-{encoder}"
        trained = parts.train(training, encoder, state)
        one = harness.records_of("predict", "evaluate", "--trace", trace, "--state", state, *options, option="--json")
        mine = next(row for row in one["forecasters"] if row["name"] == "trained")
        mine |= {"name": f"alise, trained, {encoder}", "trained": {"rows": trained["rows"], **chosen(trained)}}
        found = found or one | {"forecasters": [row for row in one["forecasters"] if row is not mine]}
        found["forecasters"].append(mine)
    return found


def chosen(trained: dict[str, Any]) -> dict[str, Any]:
    """Return what the held-out rows chose, and the shares of their pairs that it and the prior put in order."""
    return {**trained["chosen"], "held_out_order": trained["order"], "prior_order": trained["prior_order"]}


def proxy() -> dict[str, Any]:
    """Return the figures of a BERT that was fine-tuned to five classes, by the predictions that its authors published.

    The first half of the file gives each class its mean length, and the other half is measured.
    """
    with (parts.folder() / PROXY).open(encoding="utf-8") as file:
        rows = [(int(row["pred_multi_cls"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    first, rest = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    means = {one: fmean(tokens for found, tokens in first if found == one) for one, _ in first}
    train, test = ([Sample((), tokens) for _, tokens in part] for part in (first, rest))
    evaluation = Evaluation(train, test, HashedTokens(), 1, 2048)
    forecasts = [Forecast(means[one], "proxy") for one, _ in rest]
    found = evaluation.figures("proxy, fine-tuned BERT", forecasts, milliseconds=bert_milliseconds())
    return {"trace": PROXY, "train": len(first), "test": len(rest), "forecasters": [asdict(found)]}


def bert_milliseconds() -> float:
    """Return the median CPU time of BERT's forward pass, for prompts of LMSYS-Chat-1M one at a time.

    The weights are random, which does not change the time.
    """
    with (parts.folder() / "lmsys_chat_1m_first_turn.csv").open(encoding="utf-8") as file:
        lengths = [int(row["prompt_tokens"]) for row in islice(csv.DictReader(file), TIMED)]
    model = BertModel(BertConfig()).eval()
    prompts = [torch.randint(model.config.vocab_size, (1, min(length, 512))) for length in lengths]
    with torch.inference_mode():
        model(prompts[0])
        return 1e3 * median(harness.seconds_of(partial(model, one), process_time) for one in prompts)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", choices=tuple(SETS), help="one of the sets, without BERT")
    parser.add_argument("--encoders", nargs="*", choices=parts.ENCODERS, default=parts.ENCODERS)
    args = parser.parse_args()
    with harness.scratch() as into:
        first = [] if args.only else [proxy()]
        sets = [*first, *(evaluate(name, args.encoders, into) for name in ([args.only] if args.only else SETS))]
    result = harness.new_record(sets=sets)
    harness.write_record(result, args.out)
    for found in result["sets"]:
        rows = [[one["name"], *(one[column] for column in COLUMNS)] for one in found["forecasters"]]
        title = f"{found['trace']}: {found['train']} training rows, {found['test']} test rows"
        harness.show(shown_table(table(title, ("forecaster", *COLUMNS), rows)) + "\n")


if __name__ == "__main__":
    main()
