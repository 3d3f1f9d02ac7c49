"""Time one model step and its parts on this machine's CPU, for a model that fits the last-level cache and one that does
not (`--shapes`, those of random_model.py, or folders and files of real models).

A decode step of n sequences has one token each, with 96, 764 or 4,000 tokens of context; a prefill step is one prompt.
Times are medians over repeats and minima.

- `step` is the whole step: batch packing (`build`), forward pass (`forward`) and sampling (`sample`).
- `inside` has the milliseconds of operations within `forward` by kind, measured by the compiled operations themselves,
  and of `between`, which is everything else; `us_per_call` is `between` per compiled operation. `heads` are norms and
  rotation of queries and keys.
- `reads_gb_per_s` are bytes of weights per second of products, and of KV per second of attention.
- `gflops` are floating-point operations per second of the products of a prompt.
- `floor_ms` is the time to read the weights and the KV once, or to compute a prompt's products, at the rates measured
  in the same run with a matrix larger than the caches (`rates`); `floor_share` is its share of the step.
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
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model, random_model
from skipjoin.model.ops.cpp_ops import CppOps
from skipjoin.model.sampler import Sampled, Sampler, SampleRow
from skipjoin.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from bandwidth import memory_bandwidth, product_rates
from random_model import SHAPES

SHAPE = SHAPES["small"]
BLOCK = 16
# Number of sequences and the context of each.
DECODES = ((1, 96), (4, 96), (16, 96), (64, 96), (16, 764), (1, 4000), (4, 4000))
PREFILLS = (64, 512, 896)
PRODUCTS = ("qkv", "output", "mlp", "head")


def steps_of(model: CausalLM) -> list[tuple[int, int, int]]:
    """Return the sequences, context and prompt tokens of the steps whose positions the model has."""
    longest = model.config.max_positions
    decodes = [(n, context, 0) for n, context in DECODES if context < longest]
    return [*decodes, *((0, 0, n) for n in PREFILLS if n <= longest)]


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

    # In the order of `Kind` in calls.inc.cpp. The head is the only product outside of layers.
    KINDS = ("head", "attention", "norms", "heads", "kv_write", "qkv", "output", "mlp")

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


def step_of(model: CausalLM, work: list[Segment], kv: PagedKV) -> Callable[[], list[Sampled]]:
    """Return a function that packs, computes and samples these segments greedily."""
    sampler = Sampler(model.config.vocab_size)
    row = SampleRow(sampler.start(SamplingParams(temperature=0), 0, (), (2,)), 0)

    def step() -> list[Sampled]:
        logits = model.logits(model.wanted_rows(PackedBatch.build(work, BLOCK), kv))
        return sampler.sample(logits, [row] * len(logits)).report.read()

    return step


def written_kv(model: CausalLM, work: list[Segment]) -> PagedKV:
    """Return a cache whose pages have all been written: unwritten ones share one page of zeros, which is cached."""
    kv = PagedKV(max(max(one.blocks) for one in work) + 1, BLOCK, model.config, model.dtype, "cpu")
    for layer in kv.tensor:
        layer.normal_()
    return kv


@torch.inference_mode()
def measure(model: CausalLM, work: tuple[int, int, int], rates: dict[str, float], repeats: int) -> dict[str, Any]:
    decodes, context, prefill = work
    parts = segments(decodes, context, prefill)
    kv = written_kv(model, parts)
    batch = PackedBatch.build(parts, BLOCK)
    sampler = Sampler(model.config.vocab_size)
    rows = [SampleRow(sampler.start(SamplingParams(temperature=0), 0, (), (2,)), 0)] * batch.num_rows
    logits = model.logits(model.wanted_rows(batch, kv))

    def sample() -> list[Sampled]:
        return sampler.sample(logits, rows).report.read()

    names: dict[str, Callable[[], Any]] = {
        "step": step_of(model, parts, kv),
        "build": lambda: PackedBatch.build(parts, BLOCK),
        "forward": lambda: model.logits(model.wanted_rows(batch, kv)),
        "sample": sample,
    }
    found: dict[str, Any] = {"decodes": decodes, "context": context, "prefill": prefill}
    found |= {name: timed(call, repeats) for name, call in names.items()}
    kv_bytes = decodes * context * PagedKV.bytes_per_block(model.config, 1, model.dtype)
    operations = 2 * prefill * (model.parameters - model.config.vocab_size * model.config.hidden_size)
    if isinstance(model.ops, CppOps):
        inside = Inside(model.ops.library)
        found["inside"] = harness.medians([inside.of(names["forward"]) for _ in range(repeats)])
        products = sum(found["inside"][kind] for kind in PRODUCTS)
        if prefill:
            found["gflops"] = round(operations / products / 1e6, 1)
        else:
            seen = {"weights": (model.weight_bytes, products), "kv": (kv_bytes, found["inside"]["attention"])}
            found["reads_gb_per_s"] = {name: round(size / ms / 1e6, 1) for name, (size, ms) in seen.items()}
    rate = rates["operations_per_s" if prefill else "bytes_per_s"]
    if rate:
        floor_ms = 1e3 * (operations if prefill else model.weight_bytes + kv_bytes) / rate
        share = {name: round(floor_ms / found["step"][name], 3) for name in ("median_ms", "min_ms")}
        found |= {"floor_ms": round(floor_ms, 3), "floor_share": share}
    return found


def main() -> None:
    parser = harness.parser(__doc__, repeats=30)
    parser.add_argument("--shapes", nargs="+", default=["small", "qwen3-0.6b"], help="shapes, folders or files")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--attention", nargs="+", default=["auto"], help="one or more of auto, cpp, torch")
    arguments = parser.parse_args()
    threads = torch.get_num_threads()
    record = harness.new_record(threads=threads, block_size=BLOCK, results=[])
    for shape in arguments.shapes:
        for dtype in arguments.dtype:
            torch.set_num_threads(threads)  # of which a model leaves torch one
            rates = {"bytes_per_s": memory_bandwidth(), "operations_per_s": product_rates()[1]}
            if dtype != "bfloat16":
                rates["operations_per_s"] = 0.0  # measured for bfloat16 only
            for attention in arguments.attention:
                if shape in SHAPES:
                    model = random_model(SHAPES[shape], 0, dtype, attention=attention)
                else:
                    model = load_model(shape, LoadSpec(dtype=dtype, attention=attention))
                model.ops.use_threads(threads)
                named = {"shape": shape, "dtype": dtype, "operations": model.ops.name, "path": model.ops.path}
                named |= {"weight_bytes": model.weight_bytes, "rates": {k: round(v / 1e9, 1) for k, v in rates.items()}}
                for work in steps_of(model):
                    repeats = max(arguments.repeats // (4 if work[2] > 64 else 1), 3)
                    with model.ops.step():
                        found = measure(model, work, rates, repeats)
                    record["results"].append(named | found)
                    text = f"prefill {work[2]}" if work[2] else f"decode {work[0]} at {work[1]}"
                    times = ((n, v) for n, v in found.items() if isinstance(v, dict) and "median_ms" in v)
                    cells = (f"{n} {v['median_ms']:.2f} ({v['min_ms']:.2f})" for n, v in times if n != "floor_share")
                    harness.show(f"{shape} {dtype} {text:20}", "  ".join(cells), found.get("inside", ""))
                    harness.write_record(record, arguments.out)
                del model


if __name__ == "__main__":
    main()
