"""GLM-4: neighbors in half of each head are rotated; GLM-4-0414 has norms before and after each part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skipjoin.model.builder import Builder
from skipjoin.model.families.gated import BEFORE_PARTS, LayerNorms, gated_fields, gated_layer
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import SequentialLayer
from skipjoin.model.self_attention import Rotary

# Of missing entries: those of the configuration class in transformers. Parts of models that see have others.
_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "rms_norm_eps": 1.5625e-7}
_PARTS = {
    "glm4v_text": {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "attention_bias": True},
    "glm_ocr_text": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
}
_NORMS = LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    part = _PARTS.get(str(raw.get("model_type")))
    fields = gated_fields({**_DEFAULTS, **raw}, 0.5) if part is None else gated_fields({**part, **raw})
    return fields | {"output_bias": False, "mlp_bias": False}


@family("glm", architectures={"GlmForCausalLM": "glm", "Glm4ForCausalLM": "glm4"}, fields=_fields, prefix="model.")
class GlmDecoder(RotaryDecoder):
    @staticmethod
    def layer(builder: Builder, index: int, rotary: Rotary | None) -> SequentialLayer:
        names = BEFORE_PARTS if builder.config.architecture == "GlmForCausalLM" else _NORMS
        return gated_layer(builder, index, rotary, names, has_joined_gate=True, is_paired=True)
