"""Cohere's Command models: attention and MLP in parallel, layer norms without bias, pairs of neighbors rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from skipjoin.model.attention.base import LayerInputs
from skipjoin.model.builder import Builder
from skipjoin.model.config_fields import every, factor, layer_kinds
from skipjoin.model.families.gated import gated_fields, gated_mlp
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import Layer
from skipjoin.model.ops.base import Norm
from skipjoin.model.self_attention import Rotary, halves_of_pairs, separate_attention

_ARCHITECTURES = {"CohereForCausalLM": "cohere", "Cohere2ForCausalLM": "cohere2"}
_DEFAULTS: dict[str, dict[str, Any]] = {"cohere": {"rope_theta": 5e5}, "cohere2": {"sliding_window": 4096}}


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    kind = _ARCHITECTURES[architecture]
    raw = {"tie_word_embeddings": True, **_DEFAULTS[kind], **raw}
    fields = gated_fields({**raw, "mlp_bias": False})
    fields |= {
        "norm_eps": float(raw.get("layer_norm_eps", 1e-5)),
        "logit_scale": factor(raw, "logit_scale", 0.0625),
        "qk_norm": kind == "cohere" and bool(raw.get("use_qk_norm", False)),
    }
    if kind == "cohere2":
        slides = layer_kinds(raw, fields["num_layers"], every(raw.get("sliding_window_pattern", 4)))
        window = int(raw.get("sliding_window") or 0)
        fields["windows"] = tuple(window * slide for slide in slides)
        fields["ropes"] = tuple(fields["rope"] if slide else None for slide in slides)
    return fields


@family(
    "cohere", architectures=_ARCHITECTURES, fields=_fields, prefix="model.", sizes={"sliding_window_pattern": 1 << 14}
)
class CohereDecoder(RotaryDecoder):
    @staticmethod
    def layer(builder: Builder, index: int, rotary: Rotary | None) -> Layer:
        return _CohereLayer(builder, index, rotary)

    @staticmethod
    def final_norm(builder: Builder) -> Norm:
        return builder.layer_norm("model.norm", bias=False)


class _CohereLayer:
    def __init__(self, builder: Builder, index: int, rotary: Rotary | None) -> None:
        config, shard, name = builder.config, builder.shard, f"model.layers.{index}"
        norms = None
        if config.qk_norm:
            norms = (
                _HeadNorms(builder, f"{name}.self_attn.q_norm", config.num_heads, shard.heads(config)),
                _HeadNorms(builder, f"{name}.self_attn.k_norm", config.num_kv_heads, shard.kv_heads(config)),
            )
        # Attention and MLP share one all-reduce.
        self._attention = separate_attention(
            builder, index, f"{name}.self_attn", "o_proj", rotary=rotary, norms=norms, is_paired=True, ends=False
        )
        self._up, self._down = gated_mlp(builder, f"{name}.mlp", begins=False)
        self.norm = builder.layer_norm(f"{name}.input_layernorm", bias=False)

    def __call__(self, x: torch.Tensor, normed: torch.Tensor, step: LayerInputs, then: Norm | None) -> torch.Tensor:
        self._attention.add_to(normed, x, step)
        return self._down.add_to(self._up(normed), x, then)


class _HeadNorms:
    """Layer norm of [n, heads, dim] over each head, with weights of its own."""

    def __init__(self, builder: Builder, name: str, heads: int, own: range) -> None:
        config = builder.config
        weight = builder.tensor(f"{name}.weight", heads, config.head_dim, rows=own).float()
        if config.rope is not None:
            order = halves_of_pairs(weight.numel(), config.head_dim, config.rope.rotary_dim).to(weight.device)
            weight = weight.flatten()[order].view_as(weight)
        self._weight, self._eps = weight, config.norm_eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], eps=self._eps)
        return values.mul_(self._weight).to(x.dtype)
