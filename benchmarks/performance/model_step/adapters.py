"""Time model steps with adapters on this machine's CPU.

The model is the random Llama of `model_step` in bfloat16, with random adapters of rank 16 of all its layers. Sequences
use them in turn. Steps without adapters and with 1 and 4 of them alternate; `ratio` is the median of the times relative
to steps without.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from skipjoin.model.batch import PackedBatch
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.loader import random_model

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))
from run import BLOCK, SHAPE, segments, steps_of, written_kv

import harness
from support.adapters import write_adapter

RANK, COUNTS = 16, (0, 1, 4)


def shapes() -> dict[str, tuple[int, int]]:
    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    parts = {f"self_attn.{part}_proj": (hidden, hidden) for part in "qkvo"}
    parts |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    layers = range(SHAPE["num_hidden_layers"])
    return {f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in parts.items()}


def measure(model: CausalLM, decodes: int, context: int, prefill: int, repeats: int) -> dict[str, Any]:
    work = segments(decodes, context, prefill)
    kv = written_kv(model, work)
    batches = [
        PackedBatch.build(
            [one._replace(adapter=1 + i * count // len(work) if count else 0) for i, one in enumerate(work)], BLOCK
        )
        for count in COUNTS
    ]
    times: list[list[float]] = [[] for _ in COUNTS]
    for turn in range(repeats + 2):
        for side in harness.in_turn(range(len(COUNTS)), turn):
            times[side].append(1e3 * harness.seconds_of(lambda: model.forward(batches[side], kv)))  # noqa: B023
    plain, *others = [values[2:] for values in times]
    found: dict[str, Any] = {"decodes": decodes, "context": context, "prefill": prefill, "ms": harness.spread(plain)}
    for count, values in zip(COUNTS[1:], others, strict=True):
        found[f"adapters_{min(count, len(work))}"] = {
            "ms": harness.spread(values),
            "ratio": harness.median_ratio(values, plain),
        }
    return found


@torch.inference_mode()
def main() -> None:
    arguments = harness.parser(__doc__, repeats=30).parse_args()
    record = harness.new_record(threads=torch.get_num_threads(), model=SHAPE, block_size=BLOCK, rank=RANK)
    model = random_model(SHAPE, 0, "bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, 1 + max(COUNTS)):
            write_adapter(Path(folder), shapes(), seed=number, rank=RANK, size=0.02)
            model.adapters.load(number, folder)
    record["bytes"] = model.adapters.bytes[1]
    record["steps"] = []
    for decodes, context, prefill in steps_of(model):
        record["steps"].append(measure(model, decodes, context, prefill, arguments.repeats))
        harness.show(record["steps"][-1])
    harness.write_record(record, arguments.out)


if __name__ == "__main__":
    main()
