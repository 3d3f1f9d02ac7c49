"""Llama and models of the same architecture: Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from skipjoin.model.config import ModelError, activation, rope
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import Builder, Rotary, SequentialLayer, separate_attention
from skipjoin.model.ops.base import GATED


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    heads = int(raw["num_attention_heads"])
    layers = int(raw["num_hidden_layers"])
    # Missing fields take the architecture's default.
    kv_default = {"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}.get(architecture)
    head_dim = raw.get("head_dim", 128 if architecture == "Qwen3ForCausalLM" else None)
    head_dim = int(head_dim or raw["hidden_size"] // heads)
    max_positions = int(raw["max_position_embeddings"])
    bias = bool(raw.get("attention_bias", False))
    if activation(raw.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"activation {raw['hidden_act']!r} is not supported in gated layers, only silu is")
    return {
        "num_kv_heads": int(raw.get("num_key_value_heads", kv_default) or heads),
        "head_dim": head_dim,
        "max_positions": max_positions,
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "activation": "silu",
        "rope": rope(raw, head_dim, max_positions, 1.0),
        "windows": _windows(raw, architecture, layers),
        "attention_bias": bias or architecture == "Qwen2ForCausalLM",
        "output_bias": bias and architecture != "Qwen2ForCausalLM",
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "qk_norm": architecture == "Qwen3ForCausalLM",
    }


def _windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    if architecture == "MistralForCausalLM":
        return (int(raw.get("sliding_window", 4096) or 0),) * layers
    window = int(raw.get("sliding_window", 4096) or 0) if raw.get("use_sliding_window") else 0
    if not architecture.startswith("Qwen") or not window:
        return (0,) * layers
    first = int(raw.get("max_window_layers", 28))
    kinds = raw.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])


@family(
    "llama",
    architectures={
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
    },
    fields=_fields,
    prefix="model.",
)
class LlamaDecoder(RotaryDecoder):
    EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"

    def __init__(self, builder: Builder, device: torch.device | str) -> None:
        super().__init__(builder, device, _layer, lambda: builder.rms_norm("model.norm", builder.config.hidden_size))


def _layer(builder: Builder, index: int, rotary: Rotary) -> SequentialLayer:
    config, name = builder.config, f"model.layers.{index}"
    hidden, norms = config.hidden_size, None
    if config.qk_norm:
        of_query, of_key = (builder.rms_norm(f"{name}.self_attn.{p}_norm", config.head_dim) for p in "qk")
        norms = of_query, of_key
    attention = separate_attention(builder, index, f"{name}.self_attn", "o_proj", rotary=rotary, norms=norms)
    up, down = builder.mlp([f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"], f"{name}.mlp.down_proj", GATED)
    norm = builder.rms_norm(f"{name}.input_layernorm", hidden)
    return SequentialLayer(norm, attention, builder.rms_norm(f"{name}.post_attention_layernorm", hidden), up, down)
