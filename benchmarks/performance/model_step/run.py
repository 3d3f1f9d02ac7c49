"""Time one model step and its parts on this machine's CPU.

The model is a random-weight Llama of 97.5 million parameters, as in engine_throughput. A decode step of n sequences has
one token each with 96 or 764 tokens of context; a prefill step is one prompt. Times are medians over repeats and
minima.

- `step` is the whole step: batch packing (`build`), forward pass (`forward`) and sampling (`sample`).
- `linears`, `attention` (with rotation) and `norms` are parts of `forward`, each timed alone over all layers.
- `inside` has the milliseconds of these parts within `forward`, measured by the compiled operations themselves, and of
  `between`, which is everything else; `us_per_call` is `between` per compiled operation.
- `floor_ms` is the time to read the weights and the KV once at the memory bandwidth measured before and after;
  `floor_share` is its share of the step.

By default OpenMP threads spin while they wait, which makes every step many times slower where other processes need the
cores. The variable prevents that.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.loader import random_model
from skipjoin.model.ops.base import GATED
from skipjoin.model.ops.cpp_ops import CppOps
from skipjoin.model.sampler import Sampled, Sampler, SampleRow
from skipjoin.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from bandwidth import memory_bandwidth

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
# Number of sequences and the context of each.
DECODES = ((1, 96), (4, 96), (16, 96), (64, 96), (16, 764))
PREFILLS = (64, 512)


def timed(work: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Return the median and minimum milliseconds of `repeats` runs after two warm-up runs."""
    taken = [harness.seconds_of(work) * 1e3 for _ in range(repeats + 2)][2:]
    return {"median_ms": round(statistics.median(taken), 3), "min_ms": round(min(taken), 3)}


def segments(decodes: int, context: int, prefill: int) -> list[Segment]:
    """Return `decodes` sequences with `context` tokens each, or one prompt, with blocks that are not adjacent."""
    if prefill:
        return [Segment(list(range(prefill)), 0, list(range(0, 2 * (prefill // BLOCK), 2)))]
    width = context // BLOCK + 1
    return [Segment([i + 1], context, list(range(i, width * decodes, decodes))) for i in range(decodes)]


class Inside:
    """Times of compiled operations by kind, while one step runs."""

    KINDS = ("linears", "attention", "norms")

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._figures = (ctypes.c_int64 * (2 * len(self.KINDS)))()  # nanoseconds and number of each kind

    def of(self, work: Callable[[], Any]) -> dict[str, float]:
        """Return the milliseconds of each kind, of everything else, and the microseconds of that per operation."""
        ctypes.memset(self._figures, 0, ctypes.sizeof(self._figures))
        self._library.skipjoin_measure(self._figures)
        total = harness.seconds_of(work) * 1e3
        self._library.skipjoin_measure(None)
        found = {kind: self._figures[2 * i] / 1e6 for i, kind in enumerate(self.KINDS)}
        found["between"] = total - sum(found.values())
        return found | {"us_per_call": 1e3 * found["between"] / sum(self._figures[1::2])}


class Parts:
    """The work of one step by kind, in the shapes of the model."""

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
                ops.linear(matrix(2 * inner, hidden), None, GATED),
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


def step_of(model: CausalLM, work: list[Segment], kv: PagedKV) -> Callable[[], list[Sampled]]:
    """Return a function that packs, computes and samples these segments greedily."""
    sampler = Sampler(model.config.vocab_size)
    row = SampleRow(sampler.start(SamplingParams(temperature=0), 0, (), (2,)), 0)

    def step() -> list[Sampled]:
        logits = model.forward(PackedBatch.build(work, BLOCK), kv)
        return sampler.sample(logits, [row] * len(logits)).report.read()

    return step


def written_kv(model: CausalLM, work: list[Segment]) -> PagedKV:
    """Return a cache whose pages have all been written: unwritten ones share one page of zeros, which is cached."""
    kv = PagedKV(max(max(one.blocks) for one in work) + 1, BLOCK, model.config, model.dtype, "cpu")
    for layer in kv.tensor:
        layer.normal_()
    return kv


@torch.inference_mode()
def measure(model: CausalLM, decodes: int, context: int, prefill: int, repeats: int) -> dict[str, Any]:
    work = segments(decodes, context, prefill)
    kv = written_kv(model, work)
    batch = PackedBatch.build(work, BLOCK)
    sampler = Sampler(model.config.vocab_size)
    greedy = SamplingParams(temperature=0)
    rows = [SampleRow(sampler.start(greedy, 0, (), (2,)), 0)] * batch.num_rows
    logits = model.forward(batch, kv)
    parts = Parts(model, batch, kv)

    def sample(logits: torch.Tensor) -> list[Sampled]:
        return sampler.sample(logits, rows).report.read()

    names: dict[str, Callable[[], Any]] = {
        "step": step_of(model, work, kv),
        "build": lambda: PackedBatch.build(work, BLOCK),
        "forward": lambda: model.forward(batch, kv),
        "sample": lambda: sample(logits),
        "linears": parts.linears,
        "attention": parts.attention,
        "norms": parts.norms,
    }
    before = memory_bandwidth() if decodes else 0.0
    inside = Inside(model.ops.library) if isinstance(model.ops, CppOps) else None
    found: dict[str, Any] = {"decodes": decodes, "context": context, "prefill": prefill}
    found |= {name: timed(work, repeats) for name, work in names.items()}
    if inside is not None:
        found["inside"] = harness.medians([inside.of(names["forward"]) for _ in range(repeats)])
    if decodes:
        bandwidth = max(before, memory_bandwidth())
        embeddings = model.config.vocab_size * model.config.hidden_size * model.dtype.itemsize  # few rows are read
        kv_bytes = decodes * context * PagedKV.bytes_per_block(model.config, 1, model.dtype)
        floor_ms = 1e3 * (model.weight_bytes - embeddings + kv_bytes) / bandwidth
        share = {name: round(floor_ms / found["step"][name], 3) for name in ("median_ms", "min_ms")}
        found |= {"gb_per_s": round(bandwidth / 1e9, 1), "floor_ms": round(floor_ms, 3), "floor_share": share}
    return found


def main() -> None:
    parser = harness.parser(__doc__, repeats=30)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--attention", nargs="+", default=["auto"], help="one or more of auto, cpp, torch")
    arguments = parser.parse_args()
    record = harness.new_record(threads=torch.get_num_threads(), model=SHAPE, block_size=BLOCK, results=[])
    for dtype in arguments.dtype:
        for attention in arguments.attention:
            model = random_model(SHAPE, 0, dtype, attention=attention)
            for decodes, context, prefill in [*((n, c, 0) for n, c in DECODES), *((0, 0, n) for n in PREFILLS)]:
                repeats = max(arguments.repeats // (4 if prefill > 64 else 1), 3)
                found = measure(model, decodes, context, prefill, repeats)
                record["results"].append({"dtype": dtype, "operations": model.ops.name, "path": model.ops.path} | found)
                shape = f"prefill {prefill}" if prefill else f"decode {decodes} at {context}"
                label = f"{dtype} {model.ops.name} {shape}"
                times = ((n, v) for n, v in found.items() if isinstance(v, dict) and "median_ms" in v)
                cells = (f"{n} {v['median_ms']:.2f} ({v['min_ms']:.2f})" for n, v in times)
                harness.show(f"{label:28}", "  ".join(cells), found.get("inside", ""))
    harness.write_record(record, arguments.out)


if __name__ == "__main__":
    main()
