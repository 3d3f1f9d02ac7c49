"""OLMo 2 and 3, and EXAONE 4: norms after each part, not before it, and norms of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skipjoin.model.builder import Builder
from skipjoin.model.config_fields import every, layer_kinds, rope, rope_of_kind
from skipjoin.model.families.gated import LayerNorms, gated_fields, gated_layer
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import SequentialLayer
from skipjoin.model.self_attention import Rotary

_ARCHITECTURES = {"Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo3", "Exaone4ForCausalLM": "exaone4"}
_NORMS = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    kind = _ARCHITECTURES[architecture]
    raw = {"rms_norm_eps": 1e-5, **({} if kind == "olmo2" else {"sliding_window": 4096}), **raw}
    if kind == "olmo3":
        fields = gated_fields({**raw, **rope_of_kind(raw, "full_attention", "rope_theta", 5e5)})
    elif kind == "exaone4":
        fields = gated_fields({"num_key_value_heads": 32, **raw, "attention_bias": False})
    else:
        fields = gated_fields(raw)
    fields["qk_norm"] = True
    if kind == "olmo2":
        return fields
    if kind == "exaone4":
        return fields | windows_with_positions(raw, fields)
    slides = layer_kinds(raw, fields["num_layers"], every(4))
    of_window = rope_of_kind(raw, "sliding_attention", "rope_theta", 5e5)
    other = rope(of_window, fields["head_dim"], fields["max_positions"], 1.0)
    return fields | {
        "windows": tuple(int(raw.get("sliding_window") or 0) * slide for slide in slides),
        "ropes": tuple(other if slide else fields["rope"] for slide in slides),
    }


def windows_with_positions(raw: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return EXAONE's windows, and its rotary positions, which only layers with a window have if any has one."""
    window = int(raw.get("sliding_window") or 0)
    pattern = raw.get("sliding_window_pattern", 4) if window else 0
    slides = layer_kinds(raw, fields["num_layers"], every(len(pattern) if isinstance(pattern, str) else pattern))
    return {
        "windows": tuple(window * slide for slide in slides),
        "ropes": tuple(fields["rope"] if slide or not window else None for slide in slides),
    }


@family("olmo", architectures=_ARCHITECTURES, fields=_fields, prefix="model.")
class OlmoDecoder(RotaryDecoder):
    @staticmethod
    def layer(builder: Builder, index: int, rotary: Rotary | None) -> SequentialLayer:
        is_olmo = builder.config.architecture.startswith("Olmo")
        return gated_layer(builder, index, rotary, _NORMS, has_projection_norms=is_olmo)
