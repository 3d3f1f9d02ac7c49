"""Time compiled attention on this machine's CPU, alone or in turns with that of another commit.

    python benchmarks/performance/model_step/attention.py [--against COMMIT] [--threads N ...] [--repeats N]
        [--out FILE]

A call is the attention of all layers of a model, without rotation, so that decodes read keys and values from memory.
The two libraries are compiled with the same flags and take turns. Times are medians and minima in milliseconds, of
processor time with one thread and of wall time with more.

- `ratio`: median of the ratios of adjacent calls, other commit over this one, with its quartiles.
- `gb_per_s` (decodes): keys and values read per second; `read_gb_per_s`: plain reads of the same size by one thread.
- `gflops` (prompts): multiplications of scores and values that causality leaves; `peak_gflops`: the fastest products of
  this type that the processor has, without loads, on one thread.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))
import harness
from harness import seconds_of
from skipjoin.model.attention.cpp_backend import CppAttention
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.ops import build
from skipjoin.model.ops.threads import share_between

BLOCK = 16
LAYERS = 12


class Case(NamedTuple):
    """Sequences with `context` tokens each, of which the last `new` are computed."""

    sequences: int
    context: int
    new: int
    heads: int = 12
    kv_heads: int = 12
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: int = 0

    def keys_seen(self) -> int:
        """Return the number of pairs of a query and a visible key, for one head."""
        ends = range(self.context - self.new + 1, self.context + 1)
        return self.sequences * sum(min(end, self.window or end) for end in ends)


CASES = (
    Case(1, 768, 1), Case(16, 96, 1), Case(16, 768, 1), Case(64, 96, 1), Case(64, 96, 1, 32, 8, 128),
    Case(8, 1024, 1, 32, 8, 128), Case(16, 768, 1, dtype=torch.float32),
    Case(1, 64, 64), Case(1, 512, 512), Case(2, 900, 900), Case(1, 2048, 256), Case(1, 512, 512, 32, 8, 128),
    Case(1, 1024, 1024, 12, 12, 64, torch.bfloat16, 256), Case(1, 512, 512, dtype=torch.float32),
)  # fmt: skip

# Products without loads and sums over memory, on one thread: the limits that cases are compared with.
_LIMITS = r"""
#include "products.inc.cpp"

// The result keeps the compiler from removing the work.
extern "C" float products(int64_t type, int64_t count) {
  Floats sums[16] = {};
  Words a{}, b{};
  asm volatile("" : "+m"(a), "+m"(b));
#ifdef SKIPJOIN_BF16
  if (type == 1) {
    for (int64_t i = 0; i < count; i++)
#pragma GCC unroll 16
      for (int j = 0; j < 16; j++) sums[j] = fma(a, b, sums[j]);
  } else
#endif
    for (int64_t i = 0; i < count; i++)
#pragma GCC unroll 16
      for (int j = 0; j < 16; j++) sums[j] = fma((Floats)a, (Floats)b, sums[j]);
  Floats total{};
  for (Floats sum : sums) total += sum;
  return sum_of(total);
}

extern "C" int64_t flops(int64_t type, int64_t count) {
#ifdef SKIPJOIN_BF16
  if (type == 1) return count * 16 * kLanes * 4;
#endif
  return count * 16 * kLanes * 2;
}

extern "C" float reads(const float *from, int64_t count) {
  Floats sums[8] = {};
  for (int64_t i = 0; i + 8 * kLanes <= count; i += 8 * kLanes)
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) sums[j] += load(from + i + j * kLanes);
  Floats total{};
  for (Floats sum : sums) total += sum;
  return sum_of(total);
}
"""


def compiled(include: Path, library: Path, *sources: Path) -> ctypes.CDLL:
    """Compile sources for this processor."""
    command = ["g++", *build.FLAGS, "-march=native", f"-I{include}", *map(str, sources), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def of_commit(commit: str, scratch: Path) -> ctypes.CDLL:
    """Compile the operations of another commit of this repository."""
    folder = harness.source_at(commit, "src/skipjoin/model/ops", scratch)
    sources = [folder / name for name in build.SOURCES if (folder / name).exists()]
    return compiled(folder, scratch / "other.so", *sources)


class Limits:
    """Peak arithmetic and memory rates of this processor on one thread."""

    def __init__(self, scratch: Path) -> None:
        (scratch / "limits.cpp").write_text(_LIMITS)
        self._library = compiled(Path(build.__file__).parent, scratch / "limits.so", scratch / "limits.cpp")
        self._library.flops.restype = ctypes.c_int64
        self._library.reads.argtypes = [ctypes.c_void_p, ctypes.c_int64]

    def peak_gflops(self, dtype: torch.dtype) -> float:
        kind, count = int(dtype == torch.bfloat16), 2_000_000
        flops = self._library.flops(kind, ctypes.c_int64(count))
        work = partial(self._library.products, kind, ctypes.c_int64(count))
        return flops / min(seconds_of(work, time.thread_time) for _ in range(5)) / 1e9

    def read_gb_per_s(self, size: int) -> float:
        memory = torch.zeros(size // 4)
        work = partial(self._library.reads, memory.data_ptr(), memory.numel())
        return memory.nbytes / statistics.median(seconds_of(work, time.thread_time) for _ in range(8)) / 1e9


class Work:
    """Attention of all layers for a case, with its own KV cache."""

    def __init__(self, case: Case) -> None:
        hidden = case.heads * case.dim
        sizes = {"hidden_size": hidden, "num_attention_heads": case.heads, "num_key_value_heads": case.kv_heads}
        sizes |= {"num_hidden_layers": LAYERS, "vocab_size": 8, "intermediate_size": 8, "head_dim": case.dim}
        config = ModelConfig.from_dict({"model_type": "llama", "max_position_embeddings": case.context, **sizes})
        count, width = case.sequences, -(-case.context // BLOCK)
        start = case.context - case.new
        segments = [Segment([1] * case.new, start, list(range(i, width * count, count))) for i in range(count)]
        self.case, self.batch = case, PackedBatch.build(segments, BLOCK)
        self.kv = PagedKV(width * count, BLOCK, config, case.dtype, "cpu")
        generator = torch.Generator().manual_seed(0)
        for block in self.kv.tensor:
            block.copy_(torch.randn(block.shape, generator=generator))
        parts = case.heads + 2 * case.kv_heads
        self.qkv = torch.randn(self.batch.num_tokens, parts, case.dim, generator=generator).to(case.dtype)

    def run(self, attention: CppAttention) -> None:
        query, key, value = self.qkv.split([self.case.heads, self.case.kv_heads, self.case.kv_heads], dim=1)
        for layer in range(LAYERS):
            attention.attend(query, key, value, self.kv, self.batch, layer=layer, scale=0.125, window=self.case.window)


def measure(case: Case, ways: list[CppAttention], repeats: int, limits: Limits, threads: int) -> dict[str, Any]:
    """Measure a case with this library and, if there are two, the other one."""
    work = Work(case)
    times: list[list[float]] = [[] for _ in ways]
    clock = time.thread_time if threads == 1 else time.perf_counter
    for way in ways:
        work.run(way)
    for turn in range(repeats):
        for i in harness.in_turn(range(len(ways)), turn):
            times[i].append(seconds_of(partial(work.run, ways[i]), clock))
    ours = statistics.median(times[0])
    found: dict[str, Any] = case._asdict() | {"dtype": str(case.dtype).removeprefix("torch."), "threads": threads}
    found |= {"median_ms": round(ours * 1e3, 3), "min_ms": round(min(times[0]) * 1e3, 3)}
    if len(ways) > 1:
        found["other_median_ms"] = round(statistics.median(times[1]) * 1e3, 3)
        ratios = [b / a for a, b in zip(*times, strict=True)]
        spread = harness.quartiles(ratios)
        found["ratio"], found["quartiles"] = spread["median"], [spread["p25"], spread["p75"]]
    if case.new == 1:
        size = 2 * LAYERS * case.sequences * case.context * case.kv_heads * case.dim * case.dtype.itemsize
        found |= {"gb_per_s": round(size / ours / 1e9, 2), "read_gb_per_s": round(limits.read_gb_per_s(size), 2)}
    else:
        flops = 4 * LAYERS * case.heads * case.dim * case.keys_seen()
        found |= {"gflops": round(flops / ours / 1e9, 1), "peak_gflops": round(limits.peak_gflops(case.dtype), 1)}
    return found


@torch.inference_mode()
def main() -> None:
    parser = harness.parser(__doc__, repeats=21)
    parser.add_argument("--against", help="another commit of this repository")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--only", type=int, nargs="+", help="indices of cases")
    arguments = parser.parse_args()
    mine = build.load_library()
    if mine is None:
        parser.error("the operations cannot be compiled: install a C++ compiler")
    record = harness.new_record(layers=LAYERS, block_size=BLOCK, against=arguments.against, path=build.path_of(mine))
    record["results"] = results = []
    with harness.scratch() as scratch:
        limits = Limits(scratch)
        ways = [CppAttention(mine)]
        if arguments.against:
            ways.append(CppAttention(of_commit(arguments.against, scratch)))
        for threads in arguments.threads:
            share_between(threads)
            for number, case in enumerate(CASES):
                if arguments.only is None or number in arguments.only:
                    results.append(measure(case, ways, arguments.repeats, limits, threads))
                    harness.show({name: value for name, value in results[-1].items() if value})
    harness.write_record(record, arguments.out)


if __name__ == "__main__":
    main()
