from __future__ import annotations

from typing import Any

import torch

from skipjoin.kv_format import CacheFormat
from skipjoin.model.attention.base import AttentionBackend, HeadWeights
from skipjoin.model.attention.torch_backend import TorchAttention
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import AUTO, PagedKV

_SHAPE = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "vocab_size": 8,
    "intermediate_size": 8,
    "max_position_embeddings": 64,
    "hidden_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# A decode, a chunk and a prompt; two of them share block 7 bidirectionally.
_SEGMENTS = [
    Segment([0], 18, [7, 1, 2, 9, 4]),
    Segment([0] * 7, 3, [3, 0, 11]),
    Segment([0] * 5, 0, [10, 7], reverse=True),
]


def agrees(
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    of: CacheFormat = AUTO,
    plain: bool = False,
    variants: bool = False,
) -> bool:
    """Return whether `backend` matches the reference, on `plain` segments only, or also with caps and sinks."""
    generator = torch.Generator().manual_seed(0)
    config = ModelConfig.from_dict(_SHAPE)
    caches = [PagedKV(12, 4, config, dtype, device, of=of) for _ in range(2)]
    past = torch.randn((2, 12, 4, 2, 40), generator=generator).to(device, dtype)
    for cache in caches:
        cache.write(0, (slice(None), slice(None)), (past[0], past[1]))
    qkv = torch.randn(13, 8, 40, generator=generator).to(device, dtype)
    cos_sin = torch.rand(64, 24, generator=generator).to(device)
    # Rounding of rotated keys differs if multiplications are fused.
    tolerance = 2e-2 if of.is_rounded else {torch.float32: 1e-5, torch.float16: 5e-3}.get(dtype, 2e-2)
    one, other = (torch.rand(40, generator=generator).to(device, dtype) for _ in range(2))
    cases: list[dict[str, Any]] = [{"window": 0}, {"window": 6, "norms": HeadWeights(one, other, 1e-5, 0.5)}]
    if variants:
        cases.append({"window": 6, "cap": 1.5, "sinks": torch.rand(4, generator=generator).to(device)})
    mixed = [segment._replace(reverse=False) for segment in _SEGMENTS] if plain else _SEGMENTS
    for segments in (mixed, mixed[:1]):
        batch = PackedBatch.build(segments, 4, device)
        for case in cases:
            results = []
            for b, cache in zip((backend, TorchAttention()), caches, strict=True):
                query, key, value = qkv[: batch.num_tokens].clone().split([4, 2, 2], dim=1)
                out = b.attend(query, key, value, cache, batch, layer=0, scale=0.2, cos_sin=cos_sin, **case)
                kept = cache.read(0, (slice(None),), torch.float32)
                results.append((out.float(), *(rows.float() for rows in kept)))
            for ours, expected in zip(*results, strict=True):
                if not (ours - expected).norm() <= tolerance * expected.norm():
                    return False
    return True


def cuts_change_nothing(backend: AttentionBackend, dtype: torch.dtype, of: CacheFormat = AUTO) -> bool:
    """Return whether a token's output has the same bits in a prompt and as a decode."""
    config, tokens = ModelConfig.from_dict(_SHAPE), 21
    qkv = torch.randn(tokens, 8, 40, generator=torch.Generator().manual_seed(0)).to(dtype)

    def outputs(lengths: list[int]) -> torch.Tensor:
        kv, parts, start = PagedKV(6, 4, config, dtype, "cpu", of=of), [], 0
        for length in lengths:
            batch = PackedBatch.build([Segment([0] * length, start, [3, 0, 5, 1, 4, 2])], 4)
            query, key, value = qkv[start : start + length].split([4, 2, 2], dim=1)
            parts.append(backend.attend(query, key, value, kv, batch, layer=0, scale=0.2))
            start += length
        return torch.cat(parts)

    return torch.equal(outputs([tokens]), outputs([11, *[1] * (tokens - 11)]))
