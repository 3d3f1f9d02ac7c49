"""LFM2: layers of gated short convolutions among layers of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skipjoin.model.builder import Builder
from skipjoin.model.config import StateSettings
from skipjoin.model.errors import ModelError
from skipjoin.model.families.gated import gated_fields
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import Layer
from skipjoin.model.ops.base import GATED, Norm
from skipjoin.model.recurrent import MixedLayer, Part, ShortConvolution, mlp_part
from skipjoin.model.self_attention import Rotary, separate_attention

# Of missing entries: those of the configuration class in transformers.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}


def mixed_kinds(raw: Mapping[str, Any], layers: int, known: Mapping[str, bool]) -> list[bool]:
    kinds = raw["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ModelError(f"layer_types in config.json must be {layers} of {', '.join(known)}, got {kinds!r:.80}")
    return [known[kind] for kind in kinds]


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    raw = {**_DEFAULTS, **raw}
    if raw.get("layer_types") is None:
        attends = raw.get("full_attn_idxs")
        layers = range(int(raw["num_hidden_layers"]))
        raw["layer_types"] = ["full_attention" if attends is None or layer in attends else "conv" for layer in layers]
    fields = gated_fields({**raw, "intermediate_size": _width(raw)})
    has_state = mixed_kinds(raw, fields["num_layers"], {"conv": True, "full_attention": False})
    return fields | {
        "norm_eps": float(raw["norm_eps"]),
        "tie_embeddings": bool(raw.get("tie_embedding", raw["tie_word_embeddings"])),
        "qk_norm": True,
        "states": StateSettings(
            layers=tuple(layer for layer, has in enumerate(has_state) if has),
            kernel=int(raw["conv_L_cache"]),
            channels=fields["hidden_size"],
        ),
        "conv_bias": bool(raw["conv_bias"]),
    }


def _width(raw: Mapping[str, Any]) -> int:
    width = int(raw["block_ff_dim"] if "block_ff_dim" in raw else raw["intermediate_size"])
    if raw["block_auto_adjust_ff_dim"]:
        width = 2 * width // 3
        if raw["block_ffn_dim_multiplier"] is not None:
            multiple = int(raw["block_multiple_of"])
            width = -(-int(raw["block_ffn_dim_multiplier"] * width) // multiple) * multiple
    return width


@family(
    "lfm2",
    architectures={"Lfm2ForCausalLM": "lfm2"},
    fields=_fields,
    prefix="model.",
    sizes={"conv_L_cache": 1 << 10, "block_multiple_of": 1 << 20, "block_ff_dim": 1 << 24},
)
class Lfm2Decoder(RotaryDecoder):
    @staticmethod
    def layer(builder: Builder, index: int, rotary: Rotary | None) -> Layer:
        config, name = builder.config, f"model.layers.{index}"
        assert config.states is not None
        mixer: Part
        if index in config.states.layers:
            mixer = ShortConvolution(builder, index, f"{name}.conv", has_bias=config.conv_bias)
        else:
            query, key = (builder.rms_norm(f"{name}.self_attn.{part}_layernorm", config.head_dim) for part in "qk")
            norms = query, key
            mixer = separate_attention(builder, index, f"{name}.self_attn", "out_proj", rotary=rotary, norms=norms)
        norm, mlp_norm = builder.rms_norm(f"{name}.operator_norm"), builder.rms_norm(f"{name}.ffn_norm")
        up, down = builder.mlp([f"{name}.feed_forward.w1", f"{name}.feed_forward.w3"], f"{name}.feed_forward.w2", GATED)
        return MixedLayer(norm, mixer, mlp_norm, mlp_part(up, down))

    @staticmethod
    def final_norm(builder: Builder) -> Norm:
        return builder.rms_norm("model.embedding_norm")
