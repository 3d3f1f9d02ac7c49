"""Figures 6 and 9, and the throughput of table 2, with forecasters that were trained on texts.

The forecasters are those of `table2`. That of ALISE is trained on one part of `sharegpt_text`, with hashed tokens and
with the sentence encoder, and the other part is replayed. The proxy is the fine-tuned BERT of SSJF, which published
its classes for prompts of LMSYS-Chat-1M without their lengths; prompts have the lengths of `lmsys_chat_1m_first_turn`.
Its forecast is the mean length of the class in the first half of the file, and the other half is replayed. OPT-2.7B,
6.7B and 13B on a V100 with 32 GB, the last with three seeds. No run uses a row twice. Rates are read off the curves at
a mean of 0.2 s per token.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[3]))
from matplotlib.figure import Figure

import harness
from papers.alise import parts
from papers.alise.setting import BOUND, V100
from papers.figures.panels import Panels
from papers.figures.report import latencies, main, settings_of, table
from papers.figures.runs import Kept, Options, Result, by_rate, cells, grid, mean, pick, run_plans
from papers.figures.variants import Variant, lasting, named, plain
from skipjoin.workload.arrivals import parse_arrivals
from skipjoin.workload.traces import read_trace
from skipjoin.workload.workload import Replay

TEXTS, PROXY = "sharegpt_text", "ssjf_lmsys"
MODELS = ("opt-2.7b", "opt-6.7b", "opt-13b")
BASES = ("fcfs", "fastserve", "alise-oracle")
TRAINED = tuple(f"alise trained {encoder}" for encoder in parts.ENCODERS)
BERT = "alise proxy"
# Variants by trace.
NAMES = {TEXTS: (*BASES, *TRAINED), PROXY: (*BASES, BERT)}
# Rates around those at the bound. The last of OPT-13B on ShareGPT is that of figure 9.
RATES = {
    ("opt-2.7b", TEXTS): (5.0, 8.0, 12.0),
    ("opt-6.7b", TEXTS): (2.0, 3.0, 4.0),
    ("opt-13b", TEXTS): (0.3, 0.4, 0.6, 2.0),
    ("opt-2.7b", PROXY): (18.0, 30.0, 48.0),
    ("opt-6.7b", PROXY): (8.0, 12.0, 18.0),
    ("opt-13b", PROXY): (1.6, 2.2, 3.0, 4.2),
}
# Durations in multiples of 300 s, so that the rows suffice.
LASTING = {"opt-2.7b": 0.22, "opt-6.7b": 0.7, "opt-13b": 2.0}
SEEDS = {"opt-2.7b": 1, "opt-6.7b": 1, "opt-13b": 3}
RATIOS = {TEXTS: [(name, "fcfs") for name in TRAINED], PROXY: [(BERT, "fcfs")]}


def panels(trace: str) -> Panels:
    return Panels(MODELS, (f"trace:{_file(trace)}",), NAMES[trace], by="variant")


def _file(trace: str) -> str:
    return f"{trace}.jsonl" if trace == TEXTS else f"{trace}.csv"


def write_proxy(into: Path) -> None:
    """Write the second half of the proxy's predictions, with lengths of prompts and forecasts in tokens."""
    with (parts.folder() / "ssjf_lmsys_vicuna13b_predictions.csv").open(encoding="utf-8") as file:
        rows = [(int(row["pred_multi_cls"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    with (parts.folder() / "lmsys_chat_1m_first_turn.csv").open(encoding="utf-8") as file:
        prompts = [int(row["prompt_tokens"]) for row in csv.DictReader(file)]
    first, rest = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    means = {one: fmean(tokens for found, tokens in first if found == one) for one, _ in first}
    lines = [f"{prompt},{tokens},{means[one]:.1f}\n" for prompt, (one, tokens) in zip(prompts, rest, strict=False)]
    text = "prompt_tokens,output_tokens,expected_tokens\n" + "".join(lines)
    (into / _file(PROXY)).write_text(text, encoding="utf-8")


def variants(trace: str, into: Path) -> list[Variant]:
    states = [Variant(f"alise trained {one}", "alise", f"state:{into / one}") for one in parts.ENCODERS]
    mine = states if trace == TEXTS else [Variant(BERT, "alise", "column:expected_tokens")]
    return [*plain(*BASES), *mine]


def measure(options: Options) -> Result:
    with harness.scratch() as into:
        training, _ = parts.write_parts(TEXTS, into)
        found = {encoder: parts.train(training, encoder, into / encoder) for encoder in parts.ENCODERS}
        write_proxy(into)
        plans = [pair for (model, trace) in RATES for pair in curves_of(model, trace, into, options)]
        run_plans("trained", [plan for _, plan in plans], options)
        records = [_without_folder(record) for record in named(plans)]
    extents = "; ".join(
        f"{model} {lasting(options, times).duration_s:g} s, {len(options.seeds(SEEDS[model]))} seeds"
        for model, times in LASTING.items()
    )
    systems = [variant.on(V100[model]) for model in MODELS for variant in plain(*BASES)]
    settings = settings_of(systems, [], options, note=f"Durations: {extents}.")
    return {
        "settings": settings | {"lengths": [_file(trace) for trace in NAMES], "arrivals": ["poisson"]},
        "trained": found,
        "tables": [
            *(
                panels(trace).read_off(records, BOUND, RATIOS[trace]) | {"title": f"Largest rates: {trace}"}
                for trace in NAMES
            ),
            figure_9(records),
            *(
                latencies(f"Latencies: {model}, {trace}", mine, NAMES[trace], by="variant")
                for model, trace in RATES
                for mine in [pick(records, model=model, lengths=f"trace:{_file(trace)}")]
            ),
        ],
        "records": records,
    }


def figure_9(records: list[Result]) -> Result:
    """Return the mean latencies of OPT-13B on ShareGPT at the last rate, relative to `fcfs`."""
    rate, found = max(by_rate(pick(records, model="opt-13b", lengths=f"trace:{_file(TEXTS)}")).items())
    seconds = {name: mean(pick(found, variant=name), "jct_s.mean") for name in NAMES[TEXTS]}
    rows = [(name, value, value / seconds["fcfs"]) for name, value in seconds.items()]
    return table(f"Mean latency at {rate:g} req/s", ("variant", "s", "to fcfs"), rows)


def curves_of(model: str, trace: str, into: Path, options: Options) -> list[tuple[str, Kept]]:
    """Return the plans of a panel with the names of their variants."""
    of = Replay(read_trace(into / _file(trace)), arrivals=parse_arrivals("poisson"))
    extent, rates = lasting(options, LASTING[model]), options.some(RATES[model, trace])
    if max(rates) * extent.duration_s > len(of.trace.rows):
        sys.exit(f"trained: {trace} has {len(of.trace.rows)} rows, too few for {max(rates) * extent.duration_s:.0f}")
    return [
        (variant.name, grid(cells(variant.on(V100[model]), of, rates, extent, seeds=options.seeds(SEEDS[model]))))
        for variant in variants(trace, into)
    ]


def _without_folder(record: Result) -> Result:
    predictor = record.get("prediction", {}).get("predictor", "")
    if predictor.startswith("state:"):
        record["prediction"]["predictor"] = f"state:{Path(predictor.removeprefix('state:')).name}"
    return record


def draw(result: Result) -> Mapping[str, Figure]:
    return {
        f"{trace}.png": panels(trace).draw(result["records"], "normalized_latency_s.mean", 0.2, (0.01, 10))
        for trace in NAMES
    }


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        measure,
        draw,
        keeps=("normalized_latency_s.mean", "jct_s.mean", "prediction.r_log", "settings.kv_blocks"),
    )
