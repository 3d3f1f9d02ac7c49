"""ModernBERT, NomicBERT, GTE and Jina v3: encoders with rotary positions, most with gated MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skipjoin.model.config_fields import activation, layer_kinds, rope, rope_of_kind
from skipjoin.model.errors import ModelError
from skipjoin.model.families.encoder import Encoder, Layout, encoder_family
from skipjoin.model.rope import RopeSettings

_LARGEST_SIZE = 1 << 24


def _common(raw: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    return {
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "num_layers": int(raw["num_hidden_layers"]),
        "intermediate_size": int(raw["intermediate_size"]),
        "head_dim": int(raw.get("head_dim") or hidden // heads),
        "max_positions": int(raw["max_position_embeddings"]),
        "tie_embeddings": True,
        "norm_before": False,
        "is_encoder": True,
    }


def _modern_fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    common, layers = _common({"max_position_embeddings": 8192, **raw}), int(raw["num_hidden_layers"])
    every = int(raw.get("global_attn_every_n_layers") or 3)
    slides = layer_kinds(raw, layers, lambda index: index % every != 0)
    dim, positions = common["head_dim"], common["max_positions"]
    ropes = {
        is_near: rope(rope_of_kind(raw, kind, theta, default), dim, positions, 1.0)
        for is_near, kind, theta, default in (
            (False, "full_attention", "global_rope_theta", 160_000.0),
            (True, "sliding_attention", "local_rope_theta", 10_000.0),
        )
    }
    return common | {
        "norm_eps": float(raw.get("norm_eps", 1e-5)),
        "norm_bias": bool(raw.get("norm_bias", False)),
        "norm_before": True,
        "activation": activation(raw.get("hidden_activation", "gelu")),
        "attention_bias": bool(raw.get("attention_bias", False)),
        "output_bias": bool(raw.get("attention_bias", False)),
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "rope": ropes[False],
        "ropes": tuple(ropes[is_local] for is_local in slides),
        # On each side.
        "windows": tuple(int(raw.get("local_attention", 128)) // 2 if is_local else 0 for is_local in slides),
    }


@encoder_family(
    "modernbert",
    _modern_fields,
    {"local_attention": 1 << 30, "global_attn_every_n_layers": 1 << 14},
    ModernBert="modernbert",
)
class ModernBertEncoder(Encoder):
    PREFIX = "model"
    LAYOUT = Layout(
        words="embeddings.tok_embeddings",
        norm="embeddings.norm",
        layer="layers.{}",
        qkv=("attn.Wqkv",),
        out="attn.Wo",
        attention_norm="attn_norm",
        up=("mlp.Wi",),
        is_joined=True,
        down="mlp.Wo",
        mlp_norm="mlp_norm",
        final_norm="final_norm",
    )


# Names in the configuration of the published checkpoints, which is that of GPT-2.
_NOMIC = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
    "partial_rotary_factor": "rotary_emb_fraction",
}
# Fields that would change what is computed, with the only values that are supported.
_NOMIC_FIXED = {
    **{"prenorm": False, "parallel_block": False, "use_rms_norm": False, "rotary_emb_interleaved": False},
    **{"qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "causal": False, "num_experts": 0},
    **{"rotary_emb_scale_base": None, "activation_function": "swiglu", "moe_every_n_layers": 0},
}


def _nomic_fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    for name, value in _NOMIC_FIXED.items():
        if (given := raw.get(name)) is not None and given != value:
            raise ModelError(f"{name} of this {architecture} must be {value!r}, got {given!r:.80}")
    raw = {**raw, **{name: raw[own] for name, own in _NOMIC.items() if own in raw}}
    common = _common(raw)
    if raw.get("rotary_scaling_factor"):  # frequencies depend on the length of texts beyond this one
        common["max_positions"] = int(raw.get("max_trained_positions") or common["max_positions"])
    return common | {
        "norm_eps": float(raw.get("layer_norm_eps", 1e-12)),
        "activation": activation(raw.get("hidden_act", "silu")),
        "rope": rope({"rope_theta": 1000.0, **raw}, common["head_dim"], common["max_positions"], 1.0),
        "type_vocab_size": int(raw.get("type_vocab_size", 2)),
    }


@encoder_family(
    "nomic-bert",
    _nomic_fields,
    {"type_vocab_size": 1 << 10}
    | dict.fromkeys(("n_embd", "n_inner", "n_positions", "max_trained_positions"), _LARGEST_SIZE)
    | {"n_head": 1 << 16, "n_layer": 1 << 14},
    NomicBert="nomic_bert",
)
class NomicBertEncoder(Encoder):
    PREFIX = "nomic_bert"
    LAYOUT = Layout(
        norm="emb_ln",
        layer="encoder.layers.{}",
        qkv=("attn.Wqkv",),
        out="attn.out_proj",
        attention_norm="norm1",
        up=("mlp.fc12", "mlp.fc11"),
        down="mlp.fc2",
        mlp_norm="norm2",
    )


def _gte_fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    for name, value in {"layer_norm_type": "layer_norm", "pack_qkv": True, "logn_attention_scale": False}.items():
        if (given := raw.get(name, value)) != value:
            raise ModelError(f"{name} of this {architecture} must be {value!r}, got {given!r:.80}")
    if (kind := raw.get("position_embedding_type", "rope")) != "rope":
        raise ModelError(f"position_embedding_type of this {architecture} must be 'rope', got {kind!r:.80}")
    common = _common({"max_position_embeddings": 8192, **raw})
    return common | {
        "norm_eps": float(raw.get("layer_norm_eps", 1e-12)),
        "activation": activation(raw.get("hidden_act", "gelu")),
        "attention_bias": True,
        "output_bias": True,
        "rope": _gte_rope(raw, common),
        "type_vocab_size": int(raw.get("type_vocab_size", 1)),
    }


def _gte_rope(raw: Mapping[str, Any], common: Mapping[str, Any]) -> RopeSettings:
    scaling, dim = raw.get("rope_scaling"), common["head_dim"]
    is_ntk = isinstance(scaling, Mapping) and scaling.get("type", scaling.get("rope_type")) == "ntk"
    if not is_ntk:
        return rope({"rope_theta": 160_000.0, **raw}, dim, common["max_positions"], 1.0)
    assert isinstance(scaling, Mapping)
    if scaling.get("mixed_b") is not None:
        raise ModelError(f"mixed_b in rope_scaling must be null, got {scaling['mixed_b']!r:.80}")
    # NTK-aware scaling of a fixed factor, as of the published code: a larger base, and frequencies that are divided.
    factor = float(scaling["factor"])
    newer = {"rope_type": "factors", "factors": [factor ** (2 / dim)] * (dim // 2)}
    larger = {"rope_theta": float(raw.get("rope_theta", 10_000.0)) * factor, "rope_parameters": newer}
    return rope(larger, dim, common["max_positions"], 1.0)


@encoder_family("gte", _gte_fields, Gte="gte", New="new")
class GteEncoder(Encoder):
    PREFIX = "gte"
    LAYOUT = Layout(
        qkv=("attention.qkv_proj",),
        out="attention.o_proj",
        attention_norm="attn_ln",
        up=("mlp.up_gate_proj",),
        is_joined=True,
        has_up_first=True,
        has_down_bias=True,
        down="mlp.down_proj",
        mlp_norm="mlp_ln",
    )


def _jina_fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    raw = {"max_position_embeddings": 8194, "layer_norm_eps": 1e-5, "type_vocab_size": 1, **raw}
    common = _common(raw)
    return common | {
        "norm_eps": float(raw["layer_norm_eps"]),
        "activation": activation(raw.get("hidden_act", "gelu")),
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "rope": rope({"rope_theta": 20_000.0, **raw}, common["head_dim"], common["max_positions"], 1.0),
        "type_vocab_size": int(raw["type_vocab_size"]),
    }


@encoder_family("jina-v3", _jina_fields, JinaEmbeddingsV3="jina_embeddings_v3")
class JinaEncoder(Encoder):
    """Jina's embeddings v3 in the files of transformers' version, which has the tasks as adapters."""

    PREFIX = "roberta"
    LAYOUT = Layout(
        norm="emb_ln",
        layer="encoder.layers.{}",
        qkv=("mixer.Wqkv",),
        out="mixer.out_proj",
        attention_norm="norm1",
        up=("mlp.fc1",),
        down="mlp.fc2",
        mlp_norm="norm2",
    )
