"""Time one model step and its parts on this machine's CPU. Writes JSON; prints a table.

    OMP_WAIT_POLICY=passive python benchmarks/performance/model_step/run.py [--out FILE] [--repeats N]
        [--dtype bfloat16 float32] [--attention auto torch]

The model has random weights in the shape that the other engines were measured on: a Llama of 97.5 million
parameters. A decode step of n sequences has one token each with 96 tokens of context, or with 764; a prefill step is
one prompt. `step` is the whole: packing the batch, the forward pass, choosing tokens. `build`, `forward` and `sample`
are its parts; `linears`, `attention` (with rotation) and `norms` are parts of `forward`, each timed on its own over all
layers. `floor_ms` is what reading the weights and that KV once takes at the memory bandwidth measured in the same run,
just before and after, and `floor_share` its share of the step. Medians over repeats, and the smallest, because a shared
machine only ever adds. Where other processes want the same cores, OpenMP's default of spinning while it waits makes
every step many times slower: hence the variable.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.loader import random_model
from skipjoin.model.sampler import Sampled, Sampler, SampleRow
from skipjoin.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2]))
from bandwidth import memory_bandwidth
from machine import describe_machine

SHAPE = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
}
BLOCK = 16
# Sequences and the context of each.
DECODES = ((1, 96), (4, 96), (16, 96), (64, 96), (16, 764))
PREFILLS = (64, 512)


def timed(work: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Milliseconds: median and smallest of `repeats` runs after two that warm up."""
    for _ in range(2):
        work()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        taken.append((time.perf_counter() - begin) * 1e3)
    return {"median_ms": round(statistics.median(taken), 3), "min_ms": round(min(taken), 3)}


def segments(decodes: int, context: int, prefill: int) -> list[Segment]:
    """`decodes` sequences with `context` tokens each, or one prompt; tables of blocks far apart."""
    if prefill:
        return [Segment(list(range(prefill)), 0, list(range(0, 2 * (prefill // BLOCK), 2)))]
    width = context // BLOCK + 1
    return [Segment([i + 1], context, list(range(i, width * decodes, decodes))) for i in range(decodes)]


class Parts:
    """The work of one step split by kind, in the shapes that the model has."""

    def __init__(self, model: CausalLM, batch: PackedBatch, kv: PagedKV) -> None:
        config, ops = model.config, model.ops
        self.model, self.batch, self.kv = model, batch, kv
        hidden, inner = config.hidden_size, config.intermediate_size

        def matrix(out: int, width: int) -> torch.Tensor:
            return torch.randn(out, width).mul_(0.02).to(model.dtype)

        self.layers = [
            (
                ops.linear(matrix(3 * hidden, hidden), None),
                ops.linear(matrix(hidden, hidden), None),
                ops.gated_linear(matrix(2 * inner, hidden), None),
                ops.linear(matrix(hidden, inner), None),
            )
            for _ in range(config.num_layers)
        ]
        self.output = ops.linear(matrix(config.vocab_size, hidden), None)
        self.x = torch.randn(batch.num_tokens, hidden).to(model.dtype)
        self.inner = torch.randn(batch.num_tokens, inner).to(model.dtype)
        self.norm = ops.rms_norm(torch.ones(hidden, dtype=model.dtype), 1e-5)
        self.qkv = torch.randn(batch.num_tokens, 3 * config.num_heads, config.head_dim).to(model.dtype)
        self.cos_sin = torch.rand(config.max_positions, config.head_dim)

    def linears(self) -> None:
        for qkv, out, gate_up, down in self.layers:
            qkv(self.x)
            out.add_to(self.x, self.x)
            gate_up(self.x)
            down.add_to(self.inner, self.x)
        self.output(self.x[: self.batch.num_rows])
        self.x.fill_(0.5)

    def attention(self) -> None:
        heads = self.model.config.num_heads
        query, key, value = self.qkv.split(heads, dim=1)
        for layer in range(len(self.layers)):
            self.model.attention.attend(
                query, key, value, self.kv, self.batch, layer=layer, scale=0.125, cos_sin=self.cos_sin
            )

    def norms(self) -> None:
        for _ in self.layers:
            self.norm(self.x)
            self.norm(self.x)


@torch.inference_mode()
def measure(model: CausalLM, decodes: int, context: int, prefill: int, repeats: int) -> dict[str, Any]:
    """All timings of one shape."""
    work = segments(decodes, context, prefill)
    blocks = max(max(s.blocks) for s in work) + 1
    kv = PagedKV(blocks, BLOCK, model.config, model.dtype, "cpu")
    batch = PackedBatch.build(work, BLOCK)
    sampler = Sampler(model.config.vocab_size)
    greedy = SamplingParams(temperature=0)
    rows = [SampleRow(sampler.start(greedy, 0, (), (2,)), 0)] * batch.num_rows
    logits = model.forward(batch, kv)
    parts = Parts(model, batch, kv)

    def sample(logits: torch.Tensor) -> list[Sampled]:
        return sampler.sample(logits, rows).report.read()

    names: dict[str, Callable[[], Any]] = {
        "step": lambda: sample(model.forward(PackedBatch.build(work, BLOCK), kv)),
        "build": lambda: PackedBatch.build(work, BLOCK),
        "forward": lambda: model.forward(batch, kv),
        "sample": lambda: sample(logits),
        "linears": parts.linears,
        "attention": parts.attention,
        "norms": parts.norms,
    }
    before = memory_bandwidth() if decodes else 0.0
    found: dict[str, Any] = {"decodes": decodes, "context": context, "prefill": prefill}
    found |= {name: timed(work, repeats) for name, work in names.items()}
    if decodes:
        bandwidth = max(before, memory_bandwidth())
        embeddings = model.config.vocab_size * model.config.hidden_size * model.dtype.itemsize  # of which few are read
        kv_bytes = decodes * context * PagedKV.bytes_per_block(model.config, 1, model.dtype)
        floor_ms = 1e3 * (model.weight_bytes - embeddings + kv_bytes) / bandwidth
        share = {name: round(floor_ms / found["step"][name], 3) for name in ("median_ms", "min_ms")}
        found |= {"gb_per_s": round(bandwidth / 1e9, 1), "floor_ms": round(floor_ms, 3), "floor_share": share}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the JSON here instead of printing it")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--attention", nargs="+", default=["auto"], help="auto, cpp, torch: each in turn")
    arguments = parser.parse_args()
    results = []
    for dtype in arguments.dtype:
        for attention in arguments.attention:
            model = random_model(SHAPE, 0, dtype, attention=attention)
            for decodes, context, prefill in [*((n, c, 0) for n, c in DECODES), *((0, 0, n) for n in PREFILLS)]:
                repeats = max(arguments.repeats // (4 if prefill > 64 else 1), 3)
                found = measure(model, decodes, context, prefill, repeats)
                results.append({"dtype": dtype, "operations": model.ops.name, "path": model.ops.path} | found)
                shape = f"prefill {prefill}" if prefill else f"decode {decodes} at {context}"
                label = f"{dtype} {model.ops.name} {shape}"
                times = ((n, v) for n, v in found.items() if isinstance(v, dict))
                cells = (f"{n} {v['median_ms']:.2f} ({v['min_ms']:.2f})" for n, v in times)
                print(f"{label:28}", "  ".join(cells), flush=True)
    record = {
        "machine": describe_machine() | {"threads": torch.get_num_threads()},
        "model": SHAPE,
        "block_size": BLOCK,
        "results": results,
    }
    text = json.dumps(record, indent=1)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
