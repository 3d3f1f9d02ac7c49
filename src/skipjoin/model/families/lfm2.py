"""LFM2: layers of gated short convolutions among layers of attention, also with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skipjoin.model.builder import Builder
from skipjoin.model.config import ExpertSettings, RoutingSettings, StateSettings
from skipjoin.model.config_fields import factor
from skipjoin.model.errors import ModelError
from skipjoin.model.experts import expert_mlp, separate_experts
from skipjoin.model.families.gated import gated_fields
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import Layer
from skipjoin.model.ops.base import GATED, Norm
from skipjoin.model.recurrent import MixedLayer, Part, ShortConvolution, Stateless, mlp_part
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


_OF_EXPERTS = _DEFAULTS | {
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts_per_tok": 4,
    "num_experts": 32,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "block_auto_adjust_ff_dim": False,
}


def mixed_kinds(raw: Mapping[str, Any], layers: int, known: Mapping[str, bool]) -> list[bool]:
    kinds = raw["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ModelError(f"layer_types in config.json must be {layers} of {', '.join(known)}, got {kinds!r:.80}")
    return [known[kind] for kind in kinds]


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    has_experts = architecture == "Lfm2MoeForCausalLM"
    raw = {**(_OF_EXPERTS if has_experts else _DEFAULTS), **raw}
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
        "experts": _experts(raw, fields["num_layers"]) if has_experts else None,
    }


def _experts(raw: Mapping[str, Any], layers: int) -> ExpertSettings:
    return ExpertSettings(
        count=int(raw["num_experts"]),
        per_token=int(raw["num_experts_per_tok"]),
        width=int(raw["moe_intermediate_size"]),
        among_chosen=True,
        layers=tuple(range(int(raw["num_dense_layers"]), layers)),
        routing=RoutingSettings(
            corrects=bool(raw["use_expert_bias"]),
            sums_to_one=bool(raw["norm_topk_prob"]),
            added=1e-6,
            scale=factor(raw, "routed_scaling_factor", 1.0),
        ),
    )


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
    architectures={"Lfm2ForCausalLM": "lfm2", "Lfm2MoeForCausalLM": "lfm2_moe"},
    fields=_fields,
    prefix="model.",
    sizes={"conv_L_cache": 1 << 10, "block_multiple_of": 1 << 20, "block_ff_dim": 1 << 24, "num_dense_layers": 1 << 14},
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
        name = f"{name}.feed_forward"
        if config.experts is not None and index in config.experts.layers:
            make = separate_experts(builder, f"{name}.experts", ("w1", "w3"), "w2")
            mlp = expert_mlp(builder, f"{name}.gate", make, correction=f"{name}.expert_bias")
            return MixedLayer(norm, mixer, mlp_norm, Stateless(mlp.add_to))
        up, down = builder.mlp([f"{name}.w1", f"{name}.w3"], f"{name}.w2", GATED)
        return MixedLayer(norm, mixer, mlp_norm, mlp_part(up, down))

    @staticmethod
    def final_norm(builder: Builder) -> Norm:
        return builder.rms_norm("model.embedding_norm")
