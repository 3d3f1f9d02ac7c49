"""Llama and models of the same layers: Mistral, Qwen2 and 3, SmolLM3, Granite, Seed-OSS, ERNIE 4.5, Helium, CWM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skipjoin.model.builder import Builder
from skipjoin.model.config_fields import every, layer_kinds
from skipjoin.model.errors import ModelError
from skipjoin.model.families.gated import gated_fields, gated_layer, granite_scales
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import SequentialLayer
from skipjoin.model.self_attention import Rotary

_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Of missing entries: those of the configuration class in transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "ministral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "ministral3": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _MINISTRAL3_ROPE,
    },
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    "ernie4_5": {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
    | {"tie_word_embeddings": True},
    "helium": {"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 1e5},
    "cwm": {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 8192}
    | {"rope_parameters": _CWM_ROPE},
    "internlm3": {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
    "iquestcoder": {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    "smollm3": {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
}
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",
    "Ministral3ForCausalLM": "ministral3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite",
    "MiMoForCausalLM": "mimo",
    "InternLM3ForCausalLM": "internlm3",
    "IQuestCoderForCausalLM": "iquestcoder",
    "SeedOssForCausalLM": "seed_oss",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "HeliumForCausalLM": "helium",
    "CwmForCausalLM": "cwm",
}

# Those with the layers of another. Further ones of MiMo predict later tokens.
_SAME = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "mimo": "qwen2"}
# Those whose checkpoints rotate neighbors in a head.
_PAIRED = ("ernie4_5", "helium")


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    kind = _ARCHITECTURES[architecture]
    kind = _SAME.get(kind, kind)
    raw = _with_defaults(kind, raw)
    fields = gated_fields(raw)
    fields |= _biases(kind, raw)
    layers, window = fields["num_layers"], int(raw.get("sliding_window") or 0)
    if kind in ("mistral", "ministral3"):
        fields["windows"] = (window,) * layers
    elif kind == "ministral":
        fields["windows"] = tuple(window * slides for slides in layer_kinds(raw, layers, lambda _: True))
    elif kind == "cwm":
        slides = layer_kinds(raw, layers, lambda index: index % 4 != 0)
        fields["windows"] = tuple(window * slide for slide in slides)
    elif kind in ("qwen2", "qwen3"):
        fields["windows"] = _qwen_windows(raw, layers)
        fields["qk_norm"] = kind == "qwen3"
    elif kind == "smollm3":
        fields |= _smollm3(raw, fields)
    elif kind == "granite":
        fields |= granite_scales(raw)
    fields["is_encoder"] = raw.get("is_causal") is False or bool(raw.get("use_bidirectional_attention"))
    if fields["is_encoder"] and any(fields.get("windows", ())):
        raise ModelError(f"tokens of this {architecture} attend to later ones, for which sliding_window must be null")
    return fields


def _with_defaults(kind: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with defaults, which are not joined with rotary settings that are given."""
    found = {**_DEFAULTS.get(kind, {}), **raw}
    if raw.get("rope_scaling") is not None or raw.get("rope_parameters") is not None:
        found["rope_parameters"] = raw.get("rope_parameters")
    elif found.get("rope_parameters") is None:
        found["rope_parameters"] = _DEFAULTS.get(kind, {}).get("rope_parameters")
    return found


def _biases(kind: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    if kind == "qwen2":
        return {"attention_bias": True, "output_bias": False}
    if kind == "seed_oss":
        return {"output_bias": bool(raw.get("attention_out_bias", False))}
    if kind == "helium":
        return {"output_bias": False}
    if kind == "ernie4_5":
        return dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), bool(raw.get("use_bias", False)))
    if kind == "internlm3":
        has_bias = bool(raw.get("bias", False))
        return {"attention_bias": bool(raw.get("qkv_bias", False)), "output_bias": has_bias, "mlp_bias": has_bias}
    return {}


def _qwen_windows(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    window = int(raw.get("sliding_window") or 0) if raw.get("use_sliding_window") else 0
    first = int(raw["max_window_layers"])
    kinds = raw.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])


def _smollm3(raw: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    layers = fields["num_layers"]
    has_rope = raw.get("no_rope_layers")  # 1 for a layer that has it
    if has_rope is None:
        has_rope = [*map(every(raw.get("no_rope_layer_interval", 4)), range(layers))]
    if not isinstance(has_rope, list) or len(has_rope) != layers:
        raise ValueError(f"no_rope_layers must have 0 or 1 for each of {layers} layers, got {has_rope!r:.80}")
    window = int(raw.get("sliding_window") or 0) if raw.get("use_sliding_window") else 0
    slides = layer_kinds(raw, layers, lambda index: not has_rope[index])
    return {
        "ropes": tuple(fields["rope"] if rotates else None for rotates in has_rope),
        "windows": tuple(window * slide for slide in slides),
    }


@family(
    "llama", architectures=_ARCHITECTURES, fields=_fields, prefix="model.", sizes={"no_rope_layer_interval": 1 << 14}
)
class LlamaDecoder(RotaryDecoder):
    @staticmethod
    def layer(builder: Builder, index: int, rotary: Rotary | None) -> SequentialLayer:
        return gated_layer(builder, index, rotary, is_paired=_ARCHITECTURES[builder.config.architecture] in _PAIRED)
