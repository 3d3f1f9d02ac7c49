"""Architectures of GGUF files: their names of tensors, and the order in which they store rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from skipjoin.model.gguf.file import Gguf, GgufError

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_OF_POSITIONS = {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)")
_ATTENTION = {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"} | {"self_attn.o_proj": "attn_output"}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_GATED = {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
# Experts of a layer are one tensor, [experts, out, in].
_EXPERTS = {f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_QK_NORMS = {f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_QKV = frozenset({"attn_q", "attn_k", "attn_v"})
_RMS_EPSILON = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
_EPSILON = "attention.layer_norm_epsilon"


class Architecture(NamedTuple):
    """How files of one `general.architecture` store a model.

    Attributes:
        name: Name in config.json.
        layers: Names of tensors in a layer by those in checkpoints; `outer` has those outside.
        epsilon: Names of the norms' epsilon in config.json and in the metadata.
        biases: Tensors of a layer whose biases come together, by the field of config.json that says so.
        always_biased: Tensors that always have a bias.
        fixed: Fields of config.json that all models have.
        numbers: Other fields, and their names in the metadata.
        has_windows: Which layers have a sliding window follows from the architecture, or stands in the metadata.
        norm_offset: What the file's weights of norms have been increased by.
        has_paired_rows: The values that are rotated together are neighbors in heads of queries and keys.
        has_joined_heads: The rows of a projection are all queries, then all keys and values, not those of each head.
    """

    name: str
    layers: Mapping[str, str]
    epsilon: tuple[str, str]
    biases: Mapping[str, frozenset[str]]
    always_biased: frozenset[str] = frozenset()
    prefix: str = "model."
    outer: Mapping[str, str] = _OUTER
    fixed: Mapping[str, Any] = {}
    numbers: Mapping[str, str] = {}
    has_windows: bool = False
    norm_offset: float = 0.0
    has_paired_rows: bool = False
    has_joined_heads: bool = False

    def stored_name(self, name: str) -> str:
        """Return the name in a file of a tensor that a checkpoint has as `name`."""
        base, _, kind = name.rpartition(".")
        if base in self.outer:
            return f"{self.outer[base]}.{kind}"
        _, index, rest = _EXPERT.sub(".experts.", base).removeprefix(self.prefix).split(".", 2)
        return f"blk.{index}.{self.layers[rest]}.{kind}"

    @staticmethod
    def expert(name: str) -> int | None:
        """Return which expert's a checkpoint's tensor is, in whose tensor the file has that of all."""
        found = _EXPERT.search(name)
        return None if found is None else int(found[1])

    def order(self, stored_name: str, rows: int, heads: int, kv_heads: int) -> np.ndarray | None:
        """Return the row in a file of each row of a checkpoint's tensor, or None if they agree."""
        part = stored_name.split(".")[-2]
        if self.has_paired_rows and part in ("attn_q", "attn_k"):
            count = heads if part == "attn_q" else kv_heads
            return np.arange(rows).reshape(count, -1, 2).swapaxes(1, 2).reshape(rows)
        if self.has_joined_heads and part == "attn_qkv":
            return np.arange(rows).reshape(3, heads, -1).swapaxes(0, 1).reshape(rows)
        return None


_LLAMA = Architecture(
    "LlamaForCausalLM",
    _ATTENTION | _NORMS | _GATED,
    _RMS_EPSILON,
    {"attention_bias": _QKV | {"attn_output"}, "mlp_bias": frozenset(_GATED.values())},
    has_paired_rows=True,
)
_GEMMA2 = Architecture(
    "Gemma2ForCausalLM",
    _ATTENTION | _NORMS | _GATED | _POST_NORMS | {"pre_feedforward_layernorm": "ffn_norm"},
    _RMS_EPSILON,
    {},
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    numbers={name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
    has_windows=True,
    norm_offset=1.0,
)
ARCHITECTURES = {
    "llama": _LLAMA,  # Mistral too
    "smollm3": _LLAMA._replace(name="SmolLM3ForCausalLM"),
    "granite": _LLAMA._replace(
        name="GraniteForCausalLM",
        numbers={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        _ATTENTION | _QK_NORMS | _POST_NORMS | _GATED,
        _RMS_EPSILON,
        {"attention_bias": _QKV | {"attn_output"}},
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        _NORMS
        | {"self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output"}
        | {"mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"},
        _RMS_EPSILON,
        {},
        has_windows=True,
    ),
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA2._replace(
        name="Gemma3ForCausalLM",
        layers={**_GEMMA2.layers, **_QK_NORMS},
        numbers={"rope_local_base_freq": "rope.freq_base_swa"},
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", _LLAMA.layers, _RMS_EPSILON, {}, _QKV),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        {**_LLAMA.layers, **_QK_NORMS},
        _RMS_EPSILON,
        {"attention_bias": _QKV | {"attn_output"}},
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        {**_ATTENTION, **_NORMS, **_QK_NORMS, **_EXPERTS, "mlp.gate": "ffn_gate_inp"},
        _RMS_EPSILON,
        {"attention_bias": _QKV | {"attn_output"}},
        fixed={"norm_topk_prob": True},
        numbers={
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        _NORMS
        | {"attention.query_key_value": "attn_qkv", "attention.dense": "attn_output"}
        | {"mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down"},
        ("layer_norm_eps", _EPSILON),
        {"attention_bias": frozenset({"attn_qkv", "attn_output"})},
        frozenset({"ffn_up", "ffn_down", "attn_norm", "ffn_norm"}),
        "gpt_neox.",
        {"gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm", "embed_out": "output"},
        {"hidden_act": "gelu"},
        has_joined_heads=True,
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        _ATTENTION | _NORMS | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
        ("norm_epsilon", _EPSILON),
        {"use_bias": _QKV | {"attn_output", "ffn_up", "ffn_down"}},
        frozenset({"attn_norm", "ffn_norm"}),
        fixed={"hidden_act": "gelu_pytorch_tanh"},
    ),
}


def architecture_of(file: Gguf) -> Architecture:
    """Return the architecture of a file; raise `GgufError` if it is unknown or lacks or adds tensors of a layer."""
    if (found := ARCHITECTURES.get(file.architecture)) is None:
        raise GgufError(
            f"{file.path} has architecture {file.architecture[:80]!r}, which is not supported in GGUF files; supported "
            f"are {', '.join(ARCHITECTURES)}: give a model of one of these"
        )
    known = {*found.layers.values()}
    for name in file.tensors:
        base = name.rpartition(".")[0]
        inner = _IN_LAYER.fullmatch(base)
        if not (inner[2] in known if inner else base in found.outer.values() or name in _OF_POSITIONS):
            raise GgufError(
                f"{file.path} has a tensor {name[:80]!r}, which {found.name} lacks: it is of a variant that is not "
                "supported"
            )
    return found


def biased(file: Gguf, of: Architecture) -> dict[str, bool]:
    """Return the fields of config.json that say which biases a file has."""
    layers = (_IN_LAYER.fullmatch(name.removesuffix(".bias")) for name in file.tensors if name.endswith(".bias"))
    having = {found[2] for found in layers if found}
    fields = {field: bool(having & parts) for field, parts in of.biases.items()}
    wanted = of.always_biased.union(*(parts for field, parts in of.biases.items() if fields[field]))
    if having != wanted:
        odd = ", ".join(sorted(having ^ wanted))
        raise GgufError(f"{file.path} has biases that {of.name} lacks, or lacks some that it has: those of {odd}")
    return fields
