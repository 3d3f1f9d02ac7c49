"""DeBERTa v2 and v3: encoders whose scores also depend on products with embeddings of distances."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from skipjoin.model.attention.base import Heads, LayerInputs
from skipjoin.model.batch import PackedBatch
from skipjoin.model.builder import Builder
from skipjoin.model.errors import ModelError
from skipjoin.model.families.encoder import (
    Encoder,
    EncoderLayer,
    Layout,
    encoder_family,
    encoder_fields,
    encoder_norm,
)
from skipjoin.model.self_attention import Rotary

_DEFAULTS = {"max_position_embeddings": 512, "type_vocab_size": 0, "layer_norm_eps": 1e-7, "hidden_act": "gelu"}
# Fields that would change what is computed, with the only values that are supported: those of all published v3 models.
_FIXED = {
    "relative_attention": True,
    "share_att_key": True,
    "position_biased_input": False,
    "norm_rel_ebd": "layer_norm",
    "pooler_hidden_act": "gelu",
}
_DIRECTIONS = {"c2p", "p2c"}


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    raw = {**_DEFAULTS, "pooler_hidden_act": "gelu", **raw}
    for name, value in _FIXED.items():
        if (given := raw.get(name)) != value:
            raise ModelError(f"{name} of this {architecture} must be {value!r}, got {given!r:.80}")
    asked = raw.get("pos_att_type") or ()
    directions = asked.lower().split("|") if isinstance(asked, str) else asked
    if {*map(str, directions)} != _DIRECTIONS:
        raise ModelError(f"pos_att_type of this {architecture} must be c2p and p2c, got {asked!r:.80}")
    hidden = int(raw["hidden_size"])
    for name, usual in {"conv_kernel_size": 0, "embedding_size": hidden, "pooler_hidden_size": hidden}.items():
        if (given := raw.get(name) or usual) != usual:
            raise ModelError(f"{name} of this {architecture} must be {usual}, got {given!r:.80}")
    positions, farthest = int(raw["max_position_embeddings"]), int(raw.get("max_relative_positions") or -1)
    return encoder_fields(raw) | {
        "max_positions": positions,
        "type_vocab_size": int(raw["type_vocab_size"]),
        "distance_buckets": int(raw["position_buckets"]),
        "farthest": farthest if farthest > 0 else positions,
    }


class DebertaLayer(EncoderLayer):
    """Layer whose query i also multiplies a key of the distance to j, and key j a query of it."""

    def __init__(self, builder: Builder, index: int, name: str, names: Layout, rotary: Rotary | None) -> None:
        super().__init__(builder, index, name, names, rotary)
        self._buckets, self._farthest = builder.config.distance_buckets, builder.config.farthest
        self._of_distances: tuple[torch.Tensor, torch.Tensor] | None = None

    def learn(self, distances: torch.Tensor) -> None:
        if self._of_distances is None:
            query, key, _ = self._qkv(distances).view(len(distances), 3, self._heads, self._dim).unbind(1)
            self._of_distances = query.permute(1, 2, 0).contiguous(), key.permute(1, 2, 0).contiguous()

    def attend(self, heads: Heads, batch: PackedBatch, by_distance: torch.Tensor | None) -> torch.Tensor:
        assert self._of_distances is not None
        out = torch.empty_like(heads.query, memory_format=torch.contiguous_format)
        scale = (3 * self._dim) ** -0.5
        for *parts, to in zip(*(part.split(batch.lengths) for part in (*heads, out)), strict=True):
            query, key, value = (part.transpose(0, 1) for part in parts)
            at = _buckets(len(to), self._buckets, self._farthest).to(to.device)[None].expand(self._heads, -1, -1)
            of_query, of_key = self._of_distances
            added = torch.gather(query @ of_key, 2, at)
            # That of key j to query i, whose distance is the negative of that of the query to the key.
            added += torch.gather(key @ of_query, 2, at.transpose(1, 2)).transpose(1, 2)
            found = F.scaled_dot_product_attention(
                query[None], key[None], value[None], added[None] * scale, scale=scale
            )
            to.copy_(found[0].transpose(0, 1))
        return out.flatten(1)


@lru_cache(maxsize=64)
def _buckets(length: int, buckets: int, farthest: int) -> torch.Tensor:
    """Return which embedding is that of the distance from each key to each query, [length, length]."""
    at = torch.arange(length)
    distance, middle = at[:, None] - at[None], buckets // 2
    far = distance.abs().clamp(min=middle).float()
    # In float32, as in the reference: a distance may lie on the border of two.
    steps = torch.log(far / middle) / torch.log(torch.tensor((farthest - 1) / middle)) * (middle - 1)
    wide = torch.ceil(steps) + middle
    found = torch.where(distance.abs() <= middle, distance, wide.long() * distance.sign())
    return (found + buckets).clamp(0, 2 * buckets - 1)


@encoder_family("deberta", _fields, {"type_vocab_size": 1 << 10, "position_buckets": 1 << 16}, DebertaV2="deberta-v2")
class DebertaEncoder(Encoder):
    PREFIX = "deberta"
    LAYER = DebertaLayer
    LAYOUT = Layout(
        positions="", qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj")
    )

    def __init__(self, builder: Builder, device: torch.device | str) -> None:
        super().__init__(builder, device)
        config = builder.config
        stored = builder.tensor(
            "deberta.encoder.rel_embeddings.weight", 2 * config.distance_buckets, config.hidden_size
        )
        self._distances = encoder_norm(builder, "deberta.encoder.LayerNorm", config.hidden_size)(stored)

    def advance(self, x: torch.Tensor, step: LayerInputs) -> torch.Tensor:
        for layer in self._layers:
            assert isinstance(layer, DebertaLayer)
            layer.learn(self._distances)
        return super().advance(x, step)
