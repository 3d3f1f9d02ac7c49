"""Gemma 1 to 3: gated gelu, norms with weights counted from 1, and from Gemma 2 on also after each part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from skipjoin.model.builder import Builder
from skipjoin.model.config_fields import cap, every, factor, layer_kinds, rope, rope_of_kind
from skipjoin.model.errors import ModelError
from skipjoin.model.families.gated import BEFORE_PARTS, LayerNorms, gated_fields, gated_layer
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import SequentialLayer
from skipjoin.model.self_attention import Rotary

_SHARED = {"head_dim": 256, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
_LATER = _SHARED | {"num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096}
# Of missing entries: those of the configuration class in transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": _SHARED | {"num_key_value_heads": 16},
    "gemma2": _LATER | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "gemma3": _LATER | {"vocab_size": 262_208, "max_position_embeddings": 131_072},
}
_ARCHITECTURES = {
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
}
_NORMS = LayerNorms(
    after_attention="post_attention_layernorm", mlp="pre_feedforward_layernorm", after_mlp="post_feedforward_layernorm"
)


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    kind = _ARCHITECTURES[architecture].removesuffix("_text")
    raw = {**_DEFAULTS[kind], **raw}
    is_whole = bool(raw.get("use_bidirectional_attention"))
    if is_whole and kind != "gemma3":
        raise ModelError(
            f"tokens of prompts of this {architecture} attend to later ones (use_bidirectional_attention), as "
            "PaliGemma's, so that prompts could neither be cut into chunks nor share KV: give a model without that"
        )
    # Early files of Gemma say gelu and mean its approximation.
    act = raw["hidden_act"] if kind == "gemma" and raw.get("hidden_act") else raw["hidden_activation"]
    flat = {**raw, "hidden_act": "gelu_pytorch_tanh" if act == "gelu" else act}
    if kind == "gemma3":
        flat |= rope_of_kind(raw, "full_attention", "rope_theta", 1e6)
        # The length in the file is the extended one.
        scaling = flat.get("rope_scaling") or flat["rope_parameters"]
        if isinstance(scaling, Mapping):
            flat["original_max_position_embeddings"] = raw["max_position_embeddings"] / factor(scaling, "factor", 1.0)
    fields = gated_fields(flat) | {"norm_offset": 1.0}
    fields["embedding_scale"] = math.sqrt(fields["hidden_size"])
    if kind == "gemma":
        return fields
    layers, interval = fields["num_layers"], raw.get("sliding_window_pattern", 6) if kind == "gemma3" else 2
    slides, window = layer_kinds(raw, layers, every(interval)), int(raw.get("sliding_window") or 0)
    if is_whole:  # of EmbeddingGemma; a window is on both sides, and this half of it is that without the token itself
        window //= 2
        if cap(raw, "attn_logit_softcapping"):
            raise ModelError(f"attn_logit_softcapping of this {architecture} must be null with tokens that look ahead")
    fields |= {
        "is_encoder": is_whole,
        "attention_scale": factor(raw, "query_pre_attn_scalar", 256) ** -0.5,
        "attention_cap": cap(raw, "attn_logit_softcapping"),
        "logit_cap": cap(raw, "final_logit_softcapping"),
        "windows": tuple(window * slide for slide in slides),
    }
    if kind == "gemma3":
        of_window = rope_of_kind(raw, "sliding_attention", "rope_local_base_freq", 1e4)
        local = rope(of_window, fields["head_dim"], fields["max_positions"], 1.0)
        fields |= {"qk_norm": True, "ropes": tuple(local if slide else fields["rope"] for slide in slides)}
    return fields


@family(
    "gemma", architectures=_ARCHITECTURES, fields=_fields, prefix="model.", sizes={"sliding_window_pattern": 1 << 14}
)
class GemmaDecoder(RotaryDecoder):
    @staticmethod
    def layer(builder: Builder, index: int, rotary: Rotary | None) -> SequentialLayer:
        is_first = builder.config.architecture == "GemmaForCausalLM"
        return gated_layer(builder, index, rotary, BEFORE_PARTS if is_first else _NORMS)
