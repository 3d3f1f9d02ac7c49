"""Time attention alone: Skipjoin's kernels, torch's operations and, where it is installed, FlashInfer.

Decodes are memory-bound: the keys and values read per second are compared with the bandwidth of a copy in device
memory. Prompts are compute-bound: their FLOPs are compared with those of a matrix product.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import BLOCK_SIZE, Figures, Task, seconds_of, significant, spread

from skipjoin.model.attention.base import AttentionBackend
from skipjoin.model.attention.torch_backend import TorchAttention
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.parallel import WHOLE

# heads, kv_heads, head_dim, whether heads rotate
MODELS = {"llama-3-8b": (32, 8, 128, True), "opt-13b": (40, 40, 128, False)}
_TINY = {"tiny": (4, 2, 16, True)}
# Size of the layers that runs cycle through, so that the device's caches do not hold the keys of the next run.
_LAYERS_BYTES = 1 << 30
_WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True)
class Case:
    """A batch of "decode" or "prefill"; `mix` has (tokens with KV, new tokens) of each sequence."""

    kind: str
    model: str
    mix: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        start, length = self.mix[0]
        last = self.mix[-1][0]
        return f"{self.kind} {self.model} {len(self.mix)} x {length} after {start}" + (
            f" to {last}" if last != start else ""
        )


def decode_cases(models: Sequence[str] = tuple(MODELS)) -> list[Case]:
    """Return decodes with equal contexts, with very different ones, and with one long context among short ones."""
    sizes = ((1, 1024), (16, 1024), (64, 1024), (256, 1024), (64, 4096))
    cases = [Case("decode", model, ((context - 1, 1),) * count) for model in models for count, context in sizes]
    uneven = (tuple((16 + 31 * i, 1) for i in range(128)), ((32_767, 1), *((511, 1),) * 63))
    return cases + [Case("decode", model, mix) for model in models for mix in uneven]


def prefill_cases(models: Sequence[str] = tuple(MODELS)) -> list[Case]:
    """Return one prompt, several prompts, and chunks of prompts with cached beginnings."""
    mixes = (((0, 8192),), ((0, 2048),) * 4, ((4096, 512),) * 4)
    return [Case("prefill", model, mix) for model in models for mix in mixes]


def measure(task: Task) -> Figures:
    """Return a record for each case and implementation; in a rehearsal of a few tiny cases."""
    cases = [*decode_cases(), *prefill_cases()]
    if task.is_rehearsal:
        cases = [Case("decode", "tiny", ((40, 1), (3, 1))), Case("prefill", "tiny", ((0, 9), (20, 5)))]
    figures: Figures = {"cases": []}
    for case in cases:
        figures["cases"] += _measure(case, task.device, task.ceilings)
        task.keep(figures)
    return figures


class _Work:
    def __init__(self, case: Case, device: str) -> None:
        self.heads, self.kv_heads, self.dim, rotates = (MODELS | _TINY)[case.model]
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        counts = [-(-(start + length) // BLOCK_SIZE) for start, length in case.mix]
        self.blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        self.tables = [self.blocks[end - count : end] for end, count in zip(ends, counts, strict=True)]
        segments = [Segment([0] * n, s, table) for (s, n), table in zip(case.mix, self.tables, strict=True)]
        self.batch = PackedBatch.build(segments, BLOCK_SIZE, device)
        layer_bytes = 2 * len(self.blocks) * BLOCK_SIZE * self.kv_heads * self.dim * self.dtype.itemsize
        self.layers = 1 if device == "cpu" else max(1, min(32, _LAYERS_BYTES // layer_bytes))
        self.config = _config(self.heads, self.kv_heads, self.dim, self.layers)
        self.kv = PagedKV(len(self.blocks), BLOCK_SIZE, self.config, self.dtype, device)
        self.kv.tensor.normal_()
        width = self.heads + 2 * self.kv_heads
        self.packed = torch.randn(self.batch.num_tokens, width, self.dim, device=device, dtype=self.dtype)
        self.fresh = self.packed.clone()
        self.qkv = self.packed.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        angles = torch.rand(32768, self.dim // 2, device=device)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1) if rotates else None
        self.scale = self.dim**-0.5
        self.kv_bytes = sum(s + n for s, n in case.mix) * 2 * self.kv_heads * self.dim * self.dtype.itemsize
        # Token i of a segment sees start + i + 1 keys, with one multiply-add for scores and one for values.
        pairs = sum(n * s + n * (n + 1) // 2 for s, n in case.mix)
        self.flop = 4 * self.heads * self.dim * pairs


def _measure(case: Case, device: str, ceilings: Mapping[str, float]) -> Iterator[Figures]:
    work = _Work(case, device)
    expected: torch.Tensor | None = None
    for name, make in _implementations(work, device):
        record: Figures = {"case": case.name, "kind": case.kind, "model": case.model, "implementation": name}
        try:
            call = make()
            work.packed.copy_(work.fresh)  # every call rotates the queries in place
            out = call(0).float()
            expected = out if expected is None else expected
            if name.startswith("triton") or (name == "flashinfer" and work.cos_sin is None):
                record["difference"] = significant(((out - expected).norm() / expected.norm()).item())
            del out
            times = _times(call, work.layers, device)
            record |= {"ms": spread(times, 1e3)} if name == "kv_write" else _figures(case, work, times, ceilings)
        except Exception as error:  # an implementation that fails is a finding
            record["failed"] = f"{type(error).__name__}: {error}"[:300]
        yield record
    if device != "cpu":
        torch.cuda.empty_cache()


def _implementations(work: _Work, device: str) -> Iterator[tuple[str, Callable[[], Callable[[int], torch.Tensor]]]]:
    """Yield names and factories of functions that attend once in a layer."""
    yield "torch", functools.partial(_attend, work, TorchAttention)
    if device == "cpu":
        return
    yield "triton", functools.partial(_attend, work, _triton)
    yield "triton tuned", functools.partial(_attend, work, functools.partial(_tuned, work))
    yield "kv_write", functools.partial(_write_only, work)
    if importlib.util.find_spec("flashinfer") is not None:
        yield "flashinfer", functools.partial(_flashinfer, work)


def _attend(work: _Work, make: Callable[[], AttentionBackend]) -> Callable[[int], torch.Tensor]:
    """Attend as a layer does, including rotation and the write of keys and values."""
    backend = make()
    options = {"scale": work.scale, "cos_sin": work.cos_sin}
    return lambda layer: backend.attend(*work.qkv, work.kv, work.batch, layer=layer, **options)


def _triton() -> AttentionBackend:
    from skipjoin.model.attention.triton_backend import TritonAttention  # noqa: PLC0415
    from skipjoin.model.kernels.tuning import TunedTable  # noqa: PLC0415

    return TritonAttention(TunedTable(None))


@functools.cache
def _tuned_table() -> Any:
    from skipjoin.model.kernels.tuning import TunedTable  # noqa: PLC0415

    return TunedTable(None)


def _tuned(work: _Work) -> AttentionBackend:
    from skipjoin.model.attention.triton_backend import TritonAttention  # noqa: PLC0415

    backend = TritonAttention(_tuned_table())
    backend.tune(work.config, work.dtype, torch.device("cuda"), BLOCK_SIZE, WHOLE)
    return backend


def _write_only(work: _Work) -> Callable[[int], torch.Tensor]:
    """Run the part of our attention that FlashInfer does not do."""
    from skipjoin.model.kernels.kv_write import kv_write  # noqa: PLC0415

    def call(layer: int) -> torch.Tensor:
        kv_write(*work.qkv, *work.kv.layer(layer), None, work.batch.slots, work.batch.positions, work.cos_sin)
        return work.qkv[0].flatten(1)

    return call


def _flashinfer(work: _Work) -> Callable[[int], torch.Tensor]:
    import flashinfer  # noqa: PLC0415

    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    counts = [0, *(len(table) for table in work.tables)]
    starts = torch.tensor(counts).cumsum(0).int().cuda()
    blocks = torch.tensor([block for table in work.tables for block in table], dtype=torch.int32, device="cuda")
    last = ((work.batch.context_lens - 1) % BLOCK_SIZE + 1).int()
    shape = (work.heads, work.kv_heads, work.dim, BLOCK_SIZE)
    types = {"q_data_type": work.dtype, "kv_data_type": work.dtype, "sm_scale": work.scale}
    if work.batch.decode_only:
        cores = work.heads > work.kv_heads
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=cores)
        wrapper.plan(starts, blocks, last, *shape, **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(work.batch.query_start.int(), starts, blocks, last, *shape, causal=True, **types)
    query = work.qkv[0].contiguous()
    pools = [tuple(pool.transpose(1, 2) for pool in work.kv.layer(layer)) for layer in range(work.layers)]
    return lambda layer: wrapper.run(query, pools[layer]).flatten(1)


def _times(call: Callable[[int], object], layers: int, device: str) -> list[float]:
    if device == "cpu":
        return seconds_of(device, lambda: call(0), warmup=0, runs=3)
    from triton.testing import do_bench  # noqa: PLC0415

    turn = iter(range(1 << 40))
    # Warm-up calls compile everything and raise the clocks.
    return [ms / 1e3 for ms in do_bench(lambda: call(next(turn) % layers), warmup=50, rep=200, return_mode="all")]


def _figures(case: Case, work: _Work, times: list[float], ceilings: Mapping[str, float]) -> Figures:
    name, amount, share, ceiling = (
        ("bytes_per_s", work.kv_bytes, "of_copy", "copy_bytes_per_s")
        if case.kind == "decode"
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
