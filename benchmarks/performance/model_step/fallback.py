"""Measure what transformers' modeling code costs: steps of the same model, with its family and through transformers.

`CausalLM.forward` runs the model of `random_model.py` in bfloat16 in turns: a prompt of 512 tokens, and decodes of 1,
16 and 64 sequences with a context of `--context` tokens. Figures are milliseconds, and `ratio` the median over turns.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import harness
from random_model import add_shape, prompt_of, scratch_model
from skipjoin.model import family
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.loader import load_model
from skipjoin.system.container import usable_cpus

BLOCK, PROMPT, DECODES = 16, 512, (1, 16, 64)
# Runs of a step, of which the fastest counts.
RUNS = 5


def steps(context: int) -> dict[str, list[Segment]]:
    def segment(number: int, start: int, end: int) -> Segment:
        width = end // BLOCK
        return Segment(prompt_of(number, end)[start:], start, range(number * width, (number + 1) * width))

    decodes = {f"decode {n}": [segment(number, context - 1, context) for number in range(n)] for n in DECODES}
    return {f"prompt {PROMPT}": [segment(0, 0, PROMPT)], **decodes}


def milliseconds(model: CausalLM, kv: PagedKV, segments: list[Segment]) -> float:
    def run() -> None:
        with model.ops.step():
            model.forward(PackedBatch.build(segments, BLOCK), kv)

    return 1e3 * min(harness.seconds_of(run) for _ in range(RUNS))


def main() -> None:
    parser = harness.parser(__doc__, repeats=7, threads=usable_cpus())
    add_shape(parser)
    parser.add_argument("--context", type=int, default=128, help="tokens of each decoded sequence")
    args = parser.parse_args()
    record = harness.new_record(shape=args.shape, context=args.context, threads=args.threads, results={})
    with scratch_model(torch.bfloat16, args.shape) as folder:
        models = {"native": load_model(folder)}
        family._families.pop(models["native"].config.family)
        models["transformers"] = load_model(folder)
    for model in models.values():
        model.ops.use_threads(args.threads)
    blocks = max(PROMPT, max(DECODES) * args.context) // BLOCK
    pools = {name: PagedKV(blocks, BLOCK, model.config, model.dtype, "cpu") for name, model in models.items()}
    for step, segments in steps(args.context).items():
        times: dict[str, list[float]] = {name: [] for name in models}
        for turn in range(args.repeats):
            for name in harness.in_turn(models, turn):
                times[name].append(milliseconds(models[name], pools[name], segments))
        found: dict[str, Any] = {name: harness.spread(each, 2) for name, each in times.items()}
        found["ratio"] = harness.median_ratio(times["transformers"], times["native"], 2)
        harness.show(step, found)
        record["results"][step] = found
    harness.write_record(record, args.out)


if __name__ == "__main__":
    main()
