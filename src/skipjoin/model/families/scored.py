"""Models with Llama's attention and experts chosen by scores.

GLM-4.5, dots.llm1, ERNIE 4.5 MoE, MiniMax-M2, Solar Open and K-EXAONE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from skipjoin.model.builder import Builder
from skipjoin.model.config import ExpertSettings, RoutingSettings
from skipjoin.model.config_fields import factor, layer_kinds
from skipjoin.model.errors import ModelError
from skipjoin.model.experts import expert_mlp, gated_experts, separate_experts
from skipjoin.model.families.gated import gated_attention, gated_fields, gated_mlp, norms_before
from skipjoin.model.families.olmo import windows_with_positions
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import Layer, SequentialLayer
from skipjoin.model.recurrent import MixedLayer, Stateless, shared_experts
from skipjoin.model.self_attention import Rotary


class _Kind(NamedTuple):
    """Names of tensors, and settings of missing entries, which are those of the configuration class in transformers."""

    model_type: str
    mlp: str
    correction: str
    defaults: Mapping[str, Any]


_DEEPSEEK = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "n_shared_experts": 1}
_KINDS = {
    "Glm4MoeForCausalLM": _Kind(
        "glm4_moe", "mlp", "gate.e_score_correction_bias",
        _DEEPSEEK | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "moe_intermediate_size": 1408}
        | {"num_experts_per_tok": 8, "n_routed_experts": 128, "first_k_dense_replace": 1, "norm_topk_prob": True},
    ),
    "SolarOpenForCausalLM": _Kind(
        "solar_open", "mlp", "gate.e_score_correction_bias",
        _DEEPSEEK | {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
        | {"moe_intermediate_size": 1280, "num_experts_per_tok": 8, "n_routed_experts": 128, "norm_topk_prob": True}
        | {"first_k_dense_replace": 0},
    ),
    "ExaoneMoeForCausalLM": _Kind(
        "exaone_moe", "mlp", "e_score_correction_bias",
        _DEEPSEEK | {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "moe_intermediate_size": 1024}
        | {"num_experts_per_tok": 8, "num_experts": 64, "num_shared_experts": 1, "norm_topk_prob": True}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "sliding_window": 4096},
    ),
    "Dots1ForCausalLM": _Kind(
        "dots1", "mlp", "gate.e_score_correction_bias",
        _DEEPSEEK | {"num_key_value_heads": 32, "moe_intermediate_size": 1408, "first_k_dense_replace": 0}
        | {"sliding_window": 4096, "max_window_layers": 62},
    ),
    "Ernie4_5_MoeForCausalLM": _Kind(
        "ernie4_5_moe", "mlp", "moe_statics.e_score_correction_bias",
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True}
        | {"moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_norm_min": 1e-12},
    ),
    "MiniMaxM2ForCausalLM": _Kind(
        "minimax_m2", "block_sparse_moe", "e_score_correction_bias",
        {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6, "num_local_experts": 256}
        | {"num_experts_per_tok": 8},
    ),
}  # fmt: skip


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    kind = _KINDS[architecture]
    raw = {**kind.defaults, **raw}
    if kind.model_type == "solar_open":  # all layers have experts
        raw.setdefault("intermediate_size", raw["moe_intermediate_size"])
    if kind.model_type == "exaone_moe":
        raw = _renamed(raw)
    if kind.model_type == "minimax_m2" and raw.get("rotary_dim"):
        raw["partial_rotary_factor"] = int(raw["rotary_dim"]) / max(int(raw["head_dim"]), 1)
    fields = gated_fields(raw, 0.5 if kind.model_type == "glm4_moe" else 1.0)
    if fields["activation"] != "silu":
        raise ModelError(f"hidden_act of {architecture} must be silu, got {raw['hidden_act']!r:.80}")
    layers = range(fields["num_layers"])
    if kind.model_type == "ernie4_5_moe":
        return fields | _ernie(raw, layers)
    if kind.model_type == "minimax_m2":
        experts = ExpertSettings(
            count=int(raw["num_local_experts"]),
            per_token=int(raw["num_experts_per_tok"]),
            width=fields["intermediate_size"],
            among_chosen=True,
            layers=tuple(layers),
            routing=RoutingSettings(),
        )
        return fields | {"qk_norm": True, "experts": experts}
    width = int(raw["moe_intermediate_size"])
    fields["experts"] = ExpertSettings(
        count=int(raw["n_routed_experts"]),
        per_token=int(raw["num_experts_per_tok"]),
        width=width,
        among_chosen=True,
        layers=tuple(sparse_layers(raw, layers)),
        routing=RoutingSettings(
            groups=int(raw["n_group"] or 1),
            kept=int(raw["topk_group"] or 1),
            sums_to_one=bool(raw.get("norm_topk_prob", False)),
            scale=factor(raw, "routed_scaling_factor", 1.0),
        ),
    )
    fields["shared_width"] = width * int(raw["n_shared_experts"] or 0)
    if kind.model_type == "glm4_moe":
        return fields | {"output_bias": False, "qk_norm": bool(raw.get("use_qk_norm", False))}
    if kind.model_type == "solar_open":
        return fields | {"output_bias": False}
    if kind.model_type == "exaone_moe":
        return fields | {"qk_norm": True} | windows_with_positions(raw, fields)
    window, first = int(raw["sliding_window"] or 0), int(raw["max_window_layers"])
    slides = layer_kinds(raw, len(layers), lambda layer: layer >= first)
    return fields | {"qk_norm": True, "windows": tuple(window * slide for slide in slides)}


def _renamed(raw: Mapping[str, Any]) -> dict[str, Any]:
    found = {**raw, "n_routed_experts": raw["num_experts"], "n_shared_experts": raw["num_shared_experts"]}
    return found | {"attention_bias": False}


def sparse_layers(raw: Mapping[str, Any], layers: range) -> Sequence[int]:
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return layers[int(raw["first_k_dense_replace"]) :]
    if not isinstance(kinds, list) or len(kinds) != len(layers) or not {*kinds} <= {"dense", "sparse"}:
        raise ModelError(f"mlp_layer_types in config.json must be {len(layers)} of dense, sparse, got {kinds!r:.80}")
    return [layer for layer in layers if kinds[layer] == "sparse"]


def _ernie(raw: Mapping[str, Any], layers: range) -> dict[str, Any]:
    first, last, interval = (int(raw[f"moe_layer_{name}"]) for name in ("start_index", "end_index", "interval"))
    last = len(layers) - 1 if last == -1 else last
    if interval < 1:
        raise ModelError(f"moe_layer_interval in config.json must be at least 1, got {interval}")
    if raw.get("use_bias"):
        raise ModelError("use_bias of Ernie4_5_MoeForCausalLM must be false, got true")
    width = int(raw["moe_intermediate_size"])
    experts = ExpertSettings(
        count=int(raw["moe_num_experts"]),
        per_token=int(raw["moe_k"]),
        width=width,
        among_chosen=True,
        layers=tuple(layer for layer in layers if first <= layer <= last and (layer + 1) % interval == 0),
        # The smallest sum there, which no softmax has.
        routing=RoutingSettings(squashes=False, added=factor(raw, "moe_norm_min", 1e-12)),
    )
    return {"experts": experts, "shared_width": width * int(raw["moe_num_shared_experts"] or 0)}


@family(
    "scored",
    architectures={name: kind.model_type for name, kind in _KINDS.items()},
    fields=_fields,
    prefix="model.",
    sizes={"n_routed_experts": 1 << 12, "moe_num_experts": 1 << 12, "moe_k": 1 << 12, "rotary_dim": 1 << 16}
    | {"n_group": 1 << 12, "topk_group": 1 << 12, "moe_layer_interval": 1 << 14},
)
class ScoredDecoder(RotaryDecoder):
    @staticmethod
    def layer(builder: Builder, index: int, rotary: Rotary | None) -> Layer:
        config, kind = builder.config, _KINDS[builder.config.architecture]
        assert config.experts is not None
        attention = gated_attention(
            builder,
            index,
            rotary,
            has_projection_norms=kind.model_type == "minimax_m2",
            is_paired=kind.model_type == "ernie4_5_moe",
        )
        norm, mlp_norm = norms_before(builder, f"model.layers.{index}")
        name = f"model.layers.{index}.{kind.mlp}"
        if index not in config.experts.layers:
            return SequentialLayer(norm, attention, mlp_norm, *gated_mlp(builder, name))
        if kind.model_type == "minimax_m2":
            make = separate_experts(builder, f"{name}.experts", ("w1", "w3"), "w2")
        else:
            make = gated_experts(builder, f"{name}.experts")
        mlp = expert_mlp(builder, f"{name}.gate", make, correction=f"{name}.{kind.correction}")
        if not config.shared_width:
            return MixedLayer(norm, attention, mlp_norm, Stateless(mlp.add_to))
        return MixedLayer(norm, attention, mlp_norm, shared_experts(builder, f"{name}.shared_experts", mlp))
