"""Models with Llama's attention and experts: Qwen2- and Qwen3-MoE, Mixtral, OLMoE, GraniteMoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from skipjoin.model.builder import Builder
from skipjoin.model.config import ExpertSettings
from skipjoin.model.config_fields import every, layer_kinds
from skipjoin.model.errors import ModelError
from skipjoin.model.experts import (
    ExpertLayer,
    MakeExperts,
    expert_mlp,
    gated_experts,
    separate_experts,
    stacked_experts,
)
from skipjoin.model.families.gated import (
    gated_attention,
    gated_fields,
    gated_mlp,
    granite_scales,
    norms_before,
    shared_mlp,
)
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import Layer, SequentialLayer
from skipjoin.model.ops.base import GATED
from skipjoin.model.recurrent import MixedLayer, SharedExperts, shared_experts
from skipjoin.model.self_attention import Rotary
from skipjoin.model.weights import Stack


class _Kind(NamedTuple):
    """Names of settings in config.json and of tensors; `names` is None if one tensor has all experts."""

    model_type: str
    width: str
    experts: str
    mlp: str
    router: str
    names: tuple[str, str, str] | None
    defaults: Mapping[str, Any]


_SEPARATE = ("gate_proj", "up_proj", "down_proj")
_QWEN3 = {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
_MIXTRAL = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8}
_GRANITE = {"num_local_experts": 8, "num_experts_per_tok": 2}
_KINDS = {
    "Qwen3MoeForCausalLM": _Kind(
        "qwen3_moe", "moe_intermediate_size", "num_experts", "mlp", "gate", _SEPARATE,
        {**_QWEN3, "moe_intermediate_size": 768},
    ),
    "Qwen2MoeForCausalLM": _Kind(
        "qwen2_moe", "moe_intermediate_size", "num_experts", "mlp", "gate", _SEPARATE,
        _QWEN3 | {"num_experts": 60, "num_experts_per_tok": 4, "num_key_value_heads": 16, "sliding_window": 4096}
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "max_window_layers": 28},
    ),
    "Qwen3VLMoeForConditionalGeneration": _Kind(
        "qwen3_vl_moe", "moe_intermediate_size", "num_experts", "mlp", "gate", _SEPARATE,
        _QWEN3 | {"num_experts": 60, "num_experts_per_tok": 4, "num_key_value_heads": 16, "norm_topk_prob": True}
        | {"moe_intermediate_size": 1408},
    ),
    "MixtralForCausalLM": _Kind(
        "mixtral", "intermediate_size", "num_local_experts", "block_sparse_moe", "gate", ("w1", "w3", "w2"),
        {**_MIXTRAL, "num_experts_per_tok": 2},
    ),
    "OlmoeForCausalLM": _Kind(
        "olmoe", "intermediate_size", "num_experts", "mlp", "gate", _SEPARATE,
        {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
    ),
    "GraniteMoeForCausalLM": _Kind(
        "granitemoe", "intermediate_size", "num_local_experts", "block_sparse_moe", "router.layer", None,
        _GRANITE,
    ),
    "GraniteMoeSharedForCausalLM": _Kind(
        "granitemoeshared", "intermediate_size", "num_local_experts", "block_sparse_moe", "router.layer", None,
        _GRANITE | {"shared_intermediate_size": 0},
    ),
}  # fmt: skip


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    kind = _KINDS[architecture]
    other = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}[kind.experts]
    count = raw.get(kind.experts) or raw.get(other) or kind.defaults[kind.experts]
    raw = {**kind.defaults, **raw}
    fields = gated_fields(raw)
    if fields["activation"] != "silu":
        raise ModelError(f"hidden_act of {architecture} must be silu, got {raw['hidden_act']!r:.80}")
    if raw.get("clip_qkv") is not None:
        raise ModelError(f"clip_qkv of {architecture} must be null, got {raw['clip_qkv']!r:.80}")
    layers, window = fields["num_layers"], int(raw.get("sliding_window") or 0)
    is_sparse = [True] * layers
    is_qwen2, is_qwen3 = kind.model_type == "qwen2_moe", kind.model_type in ("qwen3_moe", "qwen3_vl_moe")
    if is_qwen2 or is_qwen3:
        window = window if raw.get("use_sliding_window") else 0
        dense, is_skipped = raw.get("mlp_only_layers") or (), every(raw["decoder_sparse_step"])
        is_sparse = [layer not in dense and not is_skipped(layer) for layer in range(layers)]
    is_granite, width = kind.names is None, fields["intermediate_size"]
    if is_granite:
        fields |= granite_scales(raw)
    if shared := int(raw.get("shared_intermediate_size") or 0) if kind.model_type == "granitemoeshared" else 0:
        fields |= {"intermediate_size": shared, "shared_width": shared}
    windows = (window,) * layers
    if is_qwen2:
        most = int(raw["max_window_layers"])
        slides = layer_kinds(raw, layers, lambda index: index % 2 == 0 and index < most)
        windows = tuple(window * slide for slide in slides)
        fields |= {"attention_bias": bool(raw.get("qkv_bias", True)), "output_bias": False}
        fields["shared_width"] = int(raw["shared_expert_intermediate_size"])
    return fields | {
        "windows": windows if is_qwen2 or is_qwen3 or kind.model_type == "mixtral" else (0,) * layers,
        "qk_norm": is_qwen3 or kind.model_type == "olmoe",
        "experts": ExpertSettings(
            count=int(count),
            per_token=int(raw["num_experts_per_tok"]),
            width=width if kind.width == "intermediate_size" else int(raw[kind.width]),
            # In OLMoE and Qwen3-MoE, config.json chooses.
            among_chosen=is_granite or kind.model_type == "mixtral" or bool(raw.get("norm_topk_prob", False)),
            layers=tuple(layer for layer in range(layers) if is_sparse[layer]),
        ),
    }


@family(
    "moe",
    architectures={name: kind.model_type for name, kind in _KINDS.items()},
    fields=_fields,
    prefix="model.",
    sizes={"decoder_sparse_step": 1 << 14}
    | dict.fromkeys(("shared_intermediate_size", "shared_expert_intermediate_size"), 1 << 24),
)
class ExpertDecoder(RotaryDecoder):
    @staticmethod
    def layer(builder: Builder, index: int, rotary: Rotary | None) -> Layer:
        config, kind, name = builder.config, _KINDS[builder.config.architecture], f"model.layers.{index}"
        assert config.experts is not None
        has_projection_norms = config.architecture == "OlmoeForCausalLM"
        attention = gated_attention(builder, index, rotary, has_projection_norms=has_projection_norms)
        norm, mlp_norm = norms_before(builder, name)
        if index not in config.experts.layers:
            return SequentialLayer(norm, attention, mlp_norm, *gated_mlp(builder, f"{name}.{kind.mlp}"))
        mlp = expert_mlp(builder, f"{name}.{kind.mlp}.{kind.router}", _experts(builder, f"{name}.{kind.mlp}", kind))
        if not config.shared_width:
            return ExpertLayer(norm, attention, mlp_norm, mlp)
        if kind.model_type == "qwen2_moe":
            part = f"{name}.mlp.shared_expert"
            return MixedLayer(norm, attention, mlp_norm, shared_experts(builder, part, mlp, f"{part}_gate"))
        shared = shared_mlp(builder, f"{name}.shared_mlp")
        return MixedLayer(norm, attention, mlp_norm, SharedExperts(builder, mlp, shared, None))


def _experts(builder: Builder, name: str, kind: _Kind) -> MakeExperts:
    if kind.names == _SEPARATE:
        return gated_experts(builder, f"{name}.experts")
    if kind.names is not None:
        return separate_experts(builder, f"{name}.experts", kind.names[:2], kind.names[2])
    of, hidden, own = builder.config.experts, builder.config.hidden_size, builder.shard.expert_columns(builder.config)
    assert of is not None
    rows = torch.cat([torch.arange(first + own.start, first + own.stop) for first in (0, of.width)])
    up = Stack(f"{name}.input_linear.weight", of.count, 2 * of.width, hidden, rows=rows)
    return stacked_experts(
        builder, up, Stack(f"{name}.output_linear.weight", of.count, hidden, of.width, columns=own), GATED
    )
