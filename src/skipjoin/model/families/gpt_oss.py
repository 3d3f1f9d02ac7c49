"""gpt-oss: experts with biases and a clamped gate, attention with sinks, and alternating windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from skipjoin.model.builder import Builder
from skipjoin.model.config import ExpertSettings
from skipjoin.model.config_fields import rope
from skipjoin.model.errors import ModelError
from skipjoin.model.experts import ExpertLayer, expert_mlp, stacked_experts
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.ops.base import CLAMPED, CLAMPED_LIMIT, CLAMPED_SLOPE
from skipjoin.model.self_attention import Rotary, separate_attention
from skipjoin.model.weights import Stack

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    for name, only in (("swiglu_limit", CLAMPED_LIMIT), ("swiglu_alpha", CLAMPED_SLOPE), ("hidden_act", "silu")):
        if raw.get(name, only) != only:
            raise ModelError(f"{name} of {architecture} must be {only}, got {raw[name]!r:.80}")
    layers, head_dim = int(raw["num_hidden_layers"]), int(raw.get("head_dim") or 64)
    max_positions, bias = int(raw.get("max_position_embeddings", 131072)), bool(raw.get("attention_bias", True))
    window = int(raw.get("sliding_window", 128) or 0)
    kinds = raw.get("layer_types") or ["sliding_attention", "full_attention"] * layers
    rotary = {"rope_theta": 150000.0, **raw}
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        rotary["rope_scaling"] = _ROPE
    return {
        "num_kv_heads": int(raw.get("num_key_value_heads") or 8),
        "head_dim": head_dim,
        "max_positions": max_positions,
        "norm_eps": float(raw.get("rms_norm_eps", 1e-5)),
        "tie_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "activation": "silu",
        "rope": rope(rotary, head_dim, max_positions, 1.0),
        "windows": tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers]),
        "attention_bias": bias,
        "output_bias": bias,
        "experts": ExpertSettings(
            count=int(raw.get("num_local_experts") or raw.get("num_experts") or 128),
            per_token=int(raw.get("num_experts_per_tok") or 4),
            width=int(raw["intermediate_size"]),
            among_chosen=True,
            layers=tuple(range(layers)),
        ),
    }


@family("gpt_oss", architectures={"GptOssForCausalLM": "gpt_oss"}, fields=_fields, prefix="model.")
class GptOssDecoder(RotaryDecoder):
    @staticmethod
    def layer(builder: Builder, index: int, rotary: Rotary | None) -> ExpertLayer:
        config, shard, name = builder.config, builder.shard, f"model.layers.{index}"
        of, hidden, columns = config.experts, config.hidden_size, shard.expert_columns(config)
        assert of is not None
        sinks = builder.tensor(f"{name}.self_attn.sinks", config.num_heads, rows=shard.heads(config)).float()
        attention = separate_attention(builder, index, f"{name}.self_attn", "o_proj", rotary=rotary, sinks=sinks)
        # Rows of the gate and of what it gates alternate.
        rows = torch.cat([torch.arange(2 * columns.start + part, 2 * columns.stop, 2) for part in (0, 1)])
        experts = f"{name}.mlp.experts"
        up = Stack(f"{experts}.gate_up_proj", of.count, 2 * of.width, hidden, is_transposed=True, rows=rows)
        down = Stack(f"{experts}.down_proj", of.count, hidden, of.width, is_transposed=True, columns=columns)
        return ExpertLayer(
            builder.rms_norm(f"{name}.input_layernorm"),
            attention,
            builder.rms_norm(f"{name}.post_attention_layernorm"),
            expert_mlp(
                builder, f"{name}.mlp.router", stacked_experts(builder, up, down, CLAMPED, has_bias=True), has_bias=True
            ),
        )
