"""Time compiled attention on this machine's CPU, on its own or in turns with that of another commit. Writes JSON.

    python benchmarks/performance/model_step/attention.py [--against COMMIT] [--threads N ...] [--repeats N]
        [--out FILE]

A call is the attention of all layers of a model, without rotation, so that keys and values of decodes come from memory.
The two libraries, compiled with the same flags, take turns: what else runs on the machine then meets both. Times are
medians over repeats, in milliseconds, with the smallest: of processor time with one thread, of wall time with more.
`ratio` is the median of the ratios of neighbours, other over ours, with its quartiles. For decodes, `gb_per_s` is the
keys and values that a call reads over its time, beside `read_gb_per_s`, of plain reads of as much memory by one thread.
For prompts, `gflops` counts the products of scores and values that causality leaves, beside `peak_gflops`, of the
fastest products of the type that this processor has, with nothing to load, on one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))
from machine import describe_machine
from skipjoin.model.attention.cpp_backend import CppAttention
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.ops import build
from skipjoin.model.ops.threads import share_between

ROOT = Path(__file__).resolve().parents[3]
BLOCK = 16
LAYERS = 12


class Case(NamedTuple):
    """`sequences` with so much context each, of which the last `new` tokens are computed."""

    sequences: int
    context: int
    new: int
    heads: int = 12
    kv_heads: int = 12
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: int = 0

    def keys_seen(self) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        ends = range(self.context - self.new + 1, self.context + 1)
        return self.sequences * sum(min(end, self.window or end) for end in ends)


CASES = (
    Case(1, 768, 1), Case(16, 96, 1), Case(16, 768, 1), Case(64, 96, 1), Case(64, 96, 1, 32, 8, 128),
    Case(8, 1024, 1, 32, 8, 128), Case(16, 768, 1, dtype=torch.float32),
    Case(1, 64, 64), Case(1, 512, 512), Case(2, 900, 900), Case(1, 2048, 256), Case(1, 512, 512, 32, 8, 128),
    Case(1, 1024, 1024, 12, 12, 64, torch.bfloat16, 256), Case(1, 512, 512, dtype=torch.float32),
)  # fmt: skip

# Products with nothing to load, and sums over memory, on one thread: what `Case`s are compared with.
_LIMITS = r"""
#include "products.inc.cpp"

// Seconds are the caller's; returns what keeps the compiler from leaving the work out.
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


def compiled(folder: Path, library: Path, *sources: str) -> ctypes.CDLL:
    """A library for this processor of a folder's sources."""
    command = ["g++", *build.FLAGS, "-march=native", f"-I{folder}", *(str(folder / name) for name in sources)]
    subprocess.run([*command, "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def of_commit(commit: str, scratch: Path) -> ctypes.CDLL:
    """The compiled operations of another commit of this repository."""
    inside = "src/skipjoin/model/ops"
    files = subprocess.run(["git", "archive", commit, inside], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(scratch)], input=files, check=True)
    folder = scratch / inside
    names = [name for name in build.SOURCES if (folder / name).exists()]
    return compiled(folder, scratch / "other.so", *names)


def seconds(work: Callable[[], Any], clock: Callable[[], float] = time.thread_time) -> float:
    begin = clock()
    work()
    return clock() - begin


class Limits:
    """What this processor does at most, on one thread."""

    def __init__(self, scratch: Path) -> None:
        (scratch / "limits.cpp").write_text(_LIMITS)
        (scratch / "limits.so").unlink(missing_ok=True)
        command = [
            "g++",
            *build.FLAGS,
            "-march=native",
            f"-I{Path(build.__file__).parent}",
            str(scratch / "limits.cpp"),
        ]
        subprocess.run([*command, "-o", str(scratch / "limits.so")], check=True)
        self._library = ctypes.CDLL(str(scratch / "limits.so"))
        self._library.flops.restype = ctypes.c_int64
        self._library.reads.argtypes = [ctypes.c_void_p, ctypes.c_int64]

    def peak_gflops(self, dtype: torch.dtype) -> float:
        kind, count = int(dtype == torch.bfloat16), 2_000_000
        flops = self._library.flops(kind, ctypes.c_int64(count))
        return flops / min(seconds(lambda: self._library.products(kind, ctypes.c_int64(count))) for _ in range(5)) / 1e9

    def read_gb_per_s(self, size: int) -> float:
        memory = torch.zeros(size // 4)
        taken = (seconds(lambda: self._library.reads(memory.data_ptr(), memory.numel())) for _ in range(8))
        return memory.nbytes / statistics.median(taken) / 1e9


class Work:
    """The attention of all layers for a case, with a cache of its own."""

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
    """All figures of a case. ways: ours, and the other."""
    work = Work(case)
    times: list[list[float]] = [[] for _ in ways]
    clock = time.thread_time if threads == 1 else time.perf_counter
    for way in ways:
        work.run(way)
    for turn in range(repeats):
        for i in range(len(ways)) if turn % 2 else reversed(range(len(ways))):
            times[i].append(seconds(partial(work.run, ways[i]), clock))
    ours = statistics.median(times[0])
    found: dict[str, Any] = case._asdict() | {"dtype": str(case.dtype).removeprefix("torch."), "threads": threads}
    found |= {"median_ms": round(ours * 1e3, 3), "min_ms": round(min(times[0]) * 1e3, 3)}
    if len(ways) > 1:
        found["other_median_ms"] = round(statistics.median(times[1]) * 1e3, 3)
        ratios = [b / a for a, b in zip(*times, strict=True)]
        found["ratio"], found["quartiles"] = round(statistics.median(ratios), 3), _quartiles(ratios)
    if case.new == 1:
        size = 2 * LAYERS * case.sequences * case.context * case.kv_heads * case.dim * case.dtype.itemsize
        found |= {"gb_per_s": round(size / ours / 1e9, 2), "read_gb_per_s": round(limits.read_gb_per_s(size), 2)}
    else:
        flops = 4 * LAYERS * case.heads * case.dim * case.keys_seen()
        found |= {"gflops": round(flops / ours / 1e9, 1), "peak_gflops": round(limits.peak_gflops(case.dtype), 1)}
    return found


def _quartiles(values: list[float]) -> list[float]:
    first, _, third = statistics.quantiles(values)
    return [round(first, 3), round(third, 3)]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", help="another commit of this repository")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of cases, from 0")
    parser.add_argument("--out", type=Path, help="write the JSON here")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        scratch, limits = Path(folder), Limits(Path(folder))
        mine = build.load_library()
        assert mine is not None, "there is no compiler"
        ways = [CppAttention(mine)]
        if arguments.against:
            ways.append(CppAttention(of_commit(arguments.against, scratch)))
        for threads in arguments.threads:
            share_between(threads)
            for number, case in enumerate(CASES):
                if arguments.only is None or number in arguments.only:
                    results.append(measure(case, ways, arguments.repeats, limits, threads))
                    print({name: value for name, value in results[-1].items() if value}, flush=True)
    record = {"machine": describe_machine(), "layers": LAYERS, "block_size": BLOCK, "against": arguments.against}
    record |= {"path": build.path_of(mine), "results": results}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
