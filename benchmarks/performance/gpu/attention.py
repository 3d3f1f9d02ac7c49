"""Time attention alone, from graphs: Triton with each of its sizes, with int8 KV, and FlashAttention 3 if installed.

Decodes are memory-bound: the keys and values read per second are compared with the bandwidth of a read in device
memory. Prompts are compute-bound: their FLOPs are compared with those of a matrix product.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from common import BLOCK_SIZE, Figures, Task, recorded, seconds_of, significant, spread

from skipjoin.kv_format import CACHE_FORMATS
from skipjoin.model.attention.base import AttentionBackend
from skipjoin.model.attention.check import agrees
from skipjoin.model.attention.torch_backend import TorchAttention
from skipjoin.model.attention.triton_backend import TritonAttention
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.config import ModelConfig
from skipjoin.model.kernels.choices import Shape, decode_choice
from skipjoin.model.kernels.prefill_attention import prefill_configs
from skipjoin.model.kernels.tuning import Config, TunedTable
from skipjoin.model.kv_cache import PagedKV

# heads, kv_heads, head_dim: Llama-3-8B, and a rehearsal
_CARD, _TINY = (32, 8, 128), (4, 2, 16)
# Size of the layers that runs cycle through, so that the device's caches do not hold the keys of the next run.
_LAYERS_BYTES = 1 << 30
# Keys before which a window ends, in the case that has one.
_WINDOW = {"cuda": 1024, "cpu": 16}


@dataclass(frozen=True)
class Case:
    """A batch of "decode" or "prefill"; `mix` has (tokens with KV, new tokens) of each sequence."""

    kind: str
    mix: tuple[tuple[int, int], ...]
    window: int = 0

    @property
    def name(self) -> str:
        start, length = self.mix[0]
        last = self.mix[-1][0]
        to = f" to {last}" if last != start else ""
        return f"{self.kind} {len(self.mix)} x {length} after {start}{to}" + (
            f", window {self.window}" * bool(self.window)
        )


def cases(device: str) -> list[Case]:
    """Return decodes with equal contexts and a long one among short ones, and prompts, chunks, and windowed chunks."""
    if device == "cpu":
        decodes, prompts = [((40, 1), (3, 1))], [((0, 9), (20, 5)), ((30, 20),)]
    else:
        sizes = ((1, 1024), (16, 1024), (64, 1024), (256, 1024), (64, 4096))
        decodes = [((context - 1, 1),) * count for count, context in sizes] + [((32_767, 1), *((511, 1),) * 63)]
        prompts = [((0, 8192),), ((0, 2048),) * 4, ((4096, 512),) * 4]
    found = [Case("decode", mix) for mix in decodes] + [Case("prefill", mix) for mix in prompts]
    return [*found, Case("prefill", prompts[-1], _WINDOW[device])]


def measure(task: Task) -> Figures:
    """Return FlashAttention's checks, and a record for each case and implementation."""
    figures: Figures = {"flash": _flash_checks(task.device), "cases": []}
    task.keep(figures)
    for case in cases(task.device):
        if task.left_s < 0:
            figures["skipped"] = case.name
            break
        figures["cases"] += _measure(case, task.device, task.ceilings)
        task.keep(figures)
    return figures


def _flash_checks(device: str) -> Figures:
    """Compare FlashAttention 3 with the reference; in a rehearsal, which has no library for it, Triton's kernels."""
    try:
        backend = TritonAttention() if device == "cpu" else _flash()
        types = (torch.float32,) if device == "cpu" else (torch.bfloat16, torch.float16)
        # Not only plain segments: reversed ones mix the library's rows with Triton's.
        return {
            f"{dtype} {plain=}": agrees(backend, dtype, device, plain=plain)
            for dtype in types
            for plain in (True, False)
        }
    except Exception as error:  # a library that is missing or fails is a finding
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def _flash() -> AttentionBackend:
    from skipjoin.model.attention.flash_backend import FlashAttention  # noqa: PLC0415 - imports the library

    return FlashAttention(TunedTable(None))


class _Sized(TunedTable):
    """Table that always has the same sizes of a kernel, and the default ones of the others."""

    def __init__(self, kind: str, number: int) -> None:
        super().__init__(None)
        self._kind, self._number = kind, number

    def find(self, name: str, source: str, key: Any, configs: Any) -> Config:
        return configs[self._number if name == self._kind else 0]


class _Work:
    def __init__(self, case: Case, device: str, cache: str = "auto") -> None:
        self.heads, self.kv_heads, self.dim = _TINY if device == "cpu" else _CARD
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.case = case
        counts = [-(-(start + length) // BLOCK_SIZE) for start, length in case.mix]
        blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        tables = [blocks[end - count : end] for end, count in zip(ends, counts, strict=True)]
        segments = [Segment([0] * n, s, table) for (s, n), table in zip(case.mix, tables, strict=True)]
        self.batch = PackedBatch.build(segments, BLOCK_SIZE, device)
        of = CACHE_FORMATS[cache]
        self.kv_bytes = (
            sum(s + n for s, n in case.mix) * 2 * self.kv_heads * of.row_bytes(self.dim, self.dtype.itemsize)
        )
        self.layers = 1 if device == "cpu" else max(1, min(32, _LAYERS_BYTES // self.kv_bytes))
        config = _config(self.heads, self.kv_heads, self.dim, self.layers)
        self.kv = PagedKV(len(blocks), BLOCK_SIZE, config, self.dtype, device, of=of)
        draw = torch.Generator(device).manual_seed(0)
        where = (slice(None), slice(None))
        for layer in range(self.layers):
            shape = (len(blocks), BLOCK_SIZE, self.kv_heads, self.dim)
            rows = [torch.randn(shape, device=device, dtype=self.dtype, generator=draw) for _ in range(2)]
            self.kv.write(layer, where, (rows[0], rows[1]))
        width = self.heads + 2 * self.kv_heads
        packed = torch.randn(self.batch.num_tokens, width, self.dim, device=device, dtype=self.dtype, generator=draw)
        self.qkv = packed.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        # Token i of a segment sees start + i + 1 keys, with one multiply-add for scores and one for values.
        most = case.window or 1 << 30
        pairs = sum(sum(min(s + i + 1, most) for i in range(n)) for s, n in case.mix)
        self.flop = 4 * self.heads * self.dim * pairs

    def attend(self, backend: AttentionBackend, layer: int) -> torch.Tensor:
        """Attend as a layer does, including the write of keys and values."""
        return backend.attend(
            *self.qkv, self.kv, self.batch, layer=layer, scale=self.dim**-0.5, window=self.case.window
        )


def _measure(case: Case, device: str, ceilings: Mapping[str, float]) -> Iterator[Figures]:
    work = _Work(case, device)
    expected = work.attend(TorchAttention(), 0).float()
    for name, cache, make in _implementations(case, work):
        record: Figures = {"case": case.name, "kind": case.kind, "implementation": name}
        try:
            own = work if cache == "auto" else _Work(case, device, cache)
            backend = make()
            out = own.attend(backend, 0).float()
            record["difference"] = significant(((out - expected).norm() / expected.norm()).item())
            record |= _figures(own, _times(own, backend, device), ceilings)
        except Exception as error:  # an implementation that fails is a finding
            record["failed"] = f"{type(error).__name__}: {error}"[:300]
        yield record
    if device != "cpu":
        torch.cuda.empty_cache()


def _implementations(case: Case, work: _Work) -> Iterator[tuple[str, str, Callable[[], AttentionBackend]]]:
    """Yield name, KV format and factory of each implementation."""
    group, size = work.heads // work.kv_heads, work.dtype.itemsize
    if case.kind == "decode":
        configs = decode_choice(Shape(work.dtype, group, work.dim, BLOCK_SIZE), len(case.mix) * work.kv_heads)[-1]
    else:
        configs = prefill_configs(group, work.dim, size, max(n for _, n in case.mix) * group)
    for number, config in enumerate(configs[: 1 if size > 2 else None]):
        sizes = " ".join(f"{name}={value}" for name, value in config.items())
        yield f"triton {sizes}", "auto", functools.partial(TritonAttention, _Sized(case.kind, number))
    yield "triton int8", "int8", functools.partial(TritonAttention, TunedTable(None))
    yield "flash", "auto", _flash


def _times(work: _Work, backend: AttentionBackend, device: str) -> list[float]:
    """Return the seconds of a layer's attention, from replays of a graph of all layers."""
    calls = [functools.partial(work.attend, backend, layer) for layer in range(work.layers)]
    replay = recorded(device, *calls)
    warmup, runs = (3, 10) if device == "cuda" else (0, 1)
    return [seconds / work.layers for seconds in seconds_of(device, replay, warmup=warmup, runs=runs)]


def _figures(work: _Work, times: list[float], ceilings: Mapping[str, float]) -> Figures:
    name, amount, share, ceiling = (
        ("bytes_per_s", work.kv_bytes, "of_read", "read_bytes_per_s")
        if work.case.kind == "decode"
        else ("flop_per_s", work.flop, "of_matmul", "matmul_flop_per_s")
    )
    rate = amount / statistics.median(times)
    return {
        "ms": spread(times, 1e3),
        "bytes": work.kv_bytes,
        "flop": work.flop,
        name: significant(rate),
        share: significant(rate / ceilings[ceiling]),
    }


def _config(heads: int, kv_heads: int, dim: int, layers: int) -> ModelConfig:
    sizes = {"hidden_size": heads * dim, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    sizes |= {"num_hidden_layers": layers, "vocab_size": 8, "intermediate_size": 8, "max_position_embeddings": 32768}
    return ModelConfig.from_dict({"model_type": "llama", **sizes})
