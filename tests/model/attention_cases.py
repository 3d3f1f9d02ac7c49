"""Random paged batches with expected attention outputs, computed by dense float64 arithmetic."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skipjoin.kv_format import CACHE_FORMATS
from skipjoin.model.attention.base import AttentionBackend
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV

SCALE = 0.3


def shape(heads: int, kv_heads: int, dim: int) -> ModelConfig:
    sizes = {"hidden_size": heads * dim, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 8, "intermediate_size": 8, "max_position_embeddings": 8192}
    return ModelConfig.from_dict({"model_type": "llama", **sizes, "head_dim": dim})


@dataclass
class Case:
    """Batch and expected output of attention in layer 1 of 2.

    Args:
        mix: Start and length of each segment.
        ends: "plain", "reversed", "both" for segments of random direction, or "mixed" with every other one reversed.
        rotary: Number of rotated dimensions per head.
        cache: Name of the format of the cache.
        cap, sinks: As of `AttentionBackend.attend`.
    """

    heads: int
    kv_heads: int
    dim: int
    mix: Sequence[tuple[int, int]]
    dtype: torch.dtype = torch.float32
    block_size: int = 8
    window: int = 0
    ends: str = "plain"
    rotary: int = 0
    seed: int = 0
    device: str = "cpu"
    cache: str = "auto"
    cap: float = 0.0
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.draw = torch.Generator().manual_seed(self.seed)
        self.cos_sin = self._randn(1 + max(s + n for s, n in self.mix), self.rotary).float() if self.rotary else None
        self.segments = self._segments()
        self.batch = PackedBatch.build(self.segments, self.block_size, self.device)
        blocks = 3 + sum(len(s.blocks) for s in self.segments)
        config, of = shape(self.heads, self.kv_heads, self.dim), CACHE_FORMATS[self.cache]
        self.kv = PagedKV(blocks, self.block_size, config, self.dtype, self.device, of=of)
        self.kv.tensor.fill_(-1 if of.has_scale else torch.nan)  # scales of all ones are NaN
        self.full = PagedKV(blocks, self.block_size, config, torch.float64, "cpu")
        self.full.tensor.fill_(torch.nan)
        self.qkv = self._randn(self.batch.num_tokens, self.heads + 2 * self.kv_heads, self.dim).to(self.dtype)
        self.expected = self._attend()

    def _randn(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.draw, dtype=torch.float64)

    def _segments(self) -> list[Segment]:
        rng = random.Random(self.seed)
        ends = [
            {"plain": False, "reversed": True, "both": rng.random() < 0.5, "mixed": number % 2 == 1}[self.ends]
            for number in range(len(self.mix))
        ]
        counts = [-(-(s + n) // self.block_size) for s, n in self.mix]
        free = rng.sample(range(sum(counts) + 3), sum(counts))
        return [
            Segment([0] * n, s, [free.pop() for _ in range(count)], reverse=reverse)
            for (s, n), reverse, count in zip(self.mix, ends, counts, strict=True)
        ]

    def _place(self, segment: Segment, position: int) -> tuple[int, int]:
        block, slot = divmod(position, self.block_size)
        return segment.blocks[block], self.block_size - 1 - slot if segment.reverse else slot

    def _rotated(self, x: torch.Tensor, start: int) -> torch.Tensor:
        if self.cos_sin is None:
            return x
        pairs = self.rotary // 2
        cos, sin = self.cos_sin[start : start + len(x), None].double().split(pairs, -1)
        a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * pairs :]], -1)

    def _kept(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what the cache holds of keys or values."""
        of = self.kv.format
        stored = of.quantize(rows.to(self.dtype)) if of.is_rounded else rows
        return of.dequantize(stored, self.dim, torch.float64).double()

    def _attend(self) -> torch.Tensor:
        """Write past keys and values to `kv` and all to `full`, and return the expected output."""
        out, begin = [], 0
        all_keys, all_values = self.full.layer(1)
        for segment, (start, length) in zip(self.segments, self.mix, strict=True):
            new = self.qkv[begin : begin + length].double()
            begin += length
            query, key, value = new.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            query, key = self._rotated(query, start), self._rotated(key, start)
            past = self._randn(2, start, self.kv_heads, self.dim).to(self.dtype)
            keys, values = (
                torch.cat([self._kept(before), self._kept(rows)]) for before, rows in ((past[0], key), (past[1], value))
            )
            block, slot = torch.tensor([self._place(segment, p) for p in range(start + length)]).unbind(1)
            self.kv.write(1, (block[:start], slot[:start]), (past[0].to(self.device), past[1].to(self.device)))
            all_keys[block, slot], all_values[block, slot] = keys, values
            keys, values = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", query, keys) * SCALE
            own, seen = torch.arange(start, start + length)[:, None], torch.arange(start + length)
            hidden = (seen > own) | ((seen <= own - self.window) if self.window else False)
            scores = scores if not self.cap else (scores / self.cap).tanh() * self.cap
            scores = scores.masked_fill(hidden, -torch.inf)
            if self.sinks is not None:
                sinks = self.sinks.double()[:, None, None].expand(-1, length, -1)
                scores = torch.cat([scores, sinks], -1)
            weights = scores.softmax(-1)[..., : len(keys)]
            out.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
        return torch.cat(out)

    def check(self, backend: AttentionBackend, tolerance: float) -> None:
        """Run `backend` and assert that its output and KV writes are right and that it writes nothing else."""
        # Copied, because backends may rotate in place.
        query, key, value = self.qkv.clone().to(self.device).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        cos_sin = None if self.cos_sin is None else self.cos_sin.to(self.device)
        options = {"layer": 1, "scale": SCALE, "window": self.window, "cos_sin": cos_sin, "cap": self.cap}
        if self.sinks is not None:
            options["sinks"] = self.sinks.to(self.device)
        ours = backend.attend(query, key, value, self.kv, self.batch, **options)
        assert ours.shape == self.expected.shape
        assert ours.is_contiguous()
        assert ours.dtype == self.dtype
        assert_near(ours, self.expected, tolerance)
        assert all(rows.isnan().all() for rows in self.kv.read(0, (slice(None),), torch.float64))
        for cache, expected in zip(self.kv.read(1, (slice(None),), torch.float64), self.full.layer(1), strict=True):
            assert torch.equal(cache.isnan().cpu(), expected.isnan())
            assert_near(cache.nan_to_num(0), expected.nan_to_num(0), tolerance)


def assert_near(ours: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    ours = ours.cpu().double()
    assert ours.isfinite().all()
    error = ((ours - expected).norm() / expected.norm()).item()
    assert error <= tolerance, f"relative error {error:.2e}, allowed {tolerance:.0e}"
