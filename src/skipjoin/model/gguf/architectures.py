"""Architectures of GGUF files: their names of tensors, and the order in which they store rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from skipjoin.model.gguf.file import Gguf, GgufError

if TYPE_CHECKING:
    import numpy as np
    import torch

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_OF_POSITIONS = {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}
_IN_LAYER = re.compile(r"blk\.(\d+)\.([\w.]+?)(\.weight|\.bias)?")
# Number of layers that predict further tokens.
_PREDICTING = "nextn_predict_layers"
# Tensors without a suffix.
_BARE = ("ssm_a", "ssm_d")
# Tensors of a delta rule whose rows are values' heads.
_OF_VALUES = ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt")
_ATTENTION = {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"} | {"self_attn.o_proj": "attn_output"}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_GATED = {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
_PLAIN = {f"mlp.{part}_proj": f"ffn_{part}" for part in ("up", "down")}
_JOINED_GATE = {"mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
# Experts of a layer are one tensor, [experts, out, in].
_EXPERTS = {f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# Those of older files are a tensor for each expert.
_ONE_EXPERT = re.compile(r"(ffn_\w+)\.\d+")
_JOINED_EXPERTS = "ffn_gate_exps", "ffn_up_exps"
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_QK_NORMS = {f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
QKV = frozenset({"attn_q", "attn_k", "attn_v"})
# Queries, keys and values in one tensor, as some files have those of models whose checkpoints have three.
JOINED_QKV = "attn_qkv"
_RMS_EPSILON = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
_EPSILON = "attention.layer_norm_epsilon"


class Recurrence(NamedTuple):
    """Heads of a delta rule's values and keys, and the size of each."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int


class Heads(NamedTuple):
    """Number of heads of queries, and of keys and values, and those of a recurrence if the model has one."""

    queries: int
    keys: int
    states: Recurrence | None = None


class Architecture(NamedTuple):
    """How files of one `general.architecture` store a model.

    Attributes:
        name: Name in config.json.
        layers: Names of tensors in a layer by those in checkpoints, several if the rows of one are those of several,
            one after the other; `outer` has those outside.
        epsilon: Names of the norms' epsilon in config.json and in the metadata.
        biases: Tensors of a layer whose biases come together, by the field of config.json that says so.
        always_biased: Tensors that always have a bias.
        fixed: Fields of config.json that all models have.
        numbers: Other fields, and their names in the metadata.
        yarn, yarn_numbers: Likewise of the settings of YaRN.
        has_windows: Which layers have a sliding window follows from the architecture, or stands in the metadata.
        state_kind: Name in config.json of layers that have no KV; files say so by 0 heads of keys and values.
        norm_offset: What the file's weights of norms have been increased by.
        has_paired_rows: The values that are rotated together are neighbors in heads of queries and keys.
        has_joined_heads: The rows of a projection are all queries, then all keys and values, not those of each head.
        has_tiled_values: Heads of a recurrence's values are ordered by their number at their key, and then by the key.
        has_alternating_gates: Rows of experts' gates and of what they gate alternate in checkpoints.
    """

    name: str
    layers: Mapping[str, str | tuple[str, ...]]
    epsilon: tuple[str, str]
    biases: Mapping[str, frozenset[str]]
    always_biased: frozenset[str] = frozenset()
    prefix: str = "model."
    outer: Mapping[str, str] = _OUTER
    fixed: Mapping[str, Any] = {}
    numbers: Mapping[str, str] = {}
    yarn: Mapping[str, Any] = {}
    yarn_numbers: Mapping[str, str] = {}
    has_windows: bool = False
    state_kind: str = ""
    norm_offset: float = 0.0
    has_paired_rows: bool = False
    has_joined_heads: bool = False
    has_tiled_values: bool = False
    has_alternating_gates: bool = False

    @property
    def parts(self) -> frozenset[str]:
        """The names of all tensors of a layer, without suffixes."""
        named = self.layers.values()
        return frozenset(part for parts in named for part in ((parts,) if isinstance(parts, str) else parts))

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the names in a file of the tensors that a checkpoint has as one, `name`."""
        base, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            base, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
        if base in self.outer:
            return (f"{self.outer[base]}.{kind}",)
        _, index, rest = _EXPERT.sub(".experts.", base).removeprefix(self.prefix).split(".", 2)
        parts = self.layers[rest]
        named = (parts,) if isinstance(parts, str) else parts
        return tuple(f"blk.{index}.{part}" if part in _BARE else f"blk.{index}.{part}.{kind}" for part in named)

    @staticmethod
    def expert(name: str) -> int | None:
        """Return which expert's a checkpoint's tensor is, in whose tensor the file has that of all."""
        found = _EXPERT.search(name)
        return None if found is None else int(found[1])

    def order(self, stored_names: tuple[str, ...], rows: int, heads: Heads) -> np.ndarray:
        """Return the row in a file's tensors, one after the other, of each row of a checkpoint's tensor."""
        import numpy as np  # noqa: PLC0415 (programs that read settings only need it not)

        part, plain = _part(stored_names[0]), np.arange(rows)
        if self.has_paired_rows and part in ("attn_q", "attn_k"):
            count = heads.queries if part == "attn_q" else heads.keys
            return plain.reshape(count, -1, 2).swapaxes(1, 2).reshape(rows)
        if self.has_joined_heads and part == "attn_qkv":
            return plain.reshape(3, heads.queries, -1).swapaxes(0, 1).reshape(rows)
        if self.has_tiled_values and part in _OF_VALUES and (of := heads.states) is not None:
            first = 2 * of.key_heads * of.key_dim if part in ("attn_qkv", "ssm_conv1d") else 0
            return np.concatenate([plain[:first], first + self._tiled(rows - first, of)])
        if len(stored_names) == 2 and part == "attn_qkv" and (of := heads.states) is not None:
            return _by_key_head(of)
        if self.has_alternating_gates and part == "ffn_gate_exps":
            return plain.reshape(2, -1).T.reshape(rows)
        return plain

    def columns(self, stored_names: tuple[str, ...], columns: int, heads: Heads) -> np.ndarray | None:
        """Return the column in a file of each column of a checkpoint's tensor, or None if they agree."""
        if self.has_tiled_values and _part(stored_names[0]) == "ssm_out" and heads.states is not None:
            return self._tiled(columns, heads.states)
        return None

    @staticmethod
    def _tiled(size: int, of: Recurrence) -> np.ndarray:
        """Return the place of each number of values' heads, where the file has the first head of each key first."""
        import numpy as np  # noqa: PLC0415

        return np.arange(size).reshape(of.heads // of.key_heads, of.key_heads, -1).swapaxes(0, 1).reshape(size)

    def is_bias_of_experts(self, name: str) -> bool:
        return name.endswith("_bias") and self.stored_names(name)[0].endswith("_exps.bias")

    def original(self, stored_name: str, vector: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a checkpoint, given those of a tensor of one dimension, in float32."""
        if stored_name.endswith(".ssm_a"):
            return (-vector).log()
        is_weight = "norm" in stored_name and "ssm_norm" not in stored_name and not stored_name.endswith(".bias")
        return vector - self.norm_offset if self.norm_offset and is_weight else vector


def _part(stored_name: str) -> str:
    """Return the name of a tensor in its layer."""
    return stored_name.split(".")[2] if stored_name.startswith("blk.") else stored_name


def _by_key_head(of: Recurrence) -> np.ndarray:
    """Return the rows of queries, keys, values and gates by head of keys, where the file has all of one part first."""
    import numpy as np  # noqa: PLC0415

    values = of.heads // of.key_heads * of.value_dim
    parts, first = [], 0
    for size in (of.key_dim, of.key_dim, values, values):
        parts.append(first + np.arange(of.key_heads * size).reshape(of.key_heads, size))
        first += of.key_heads * size
    return np.concatenate(parts, axis=1).flatten()


_LLAMA = Architecture(
    "LlamaForCausalLM",
    _ATTENTION | _NORMS | _GATED,
    _RMS_EPSILON,
    {"attention_bias": QKV | {"attn_output"}, "mlp_bias": frozenset(_GATED.values())},
    has_paired_rows=True,
)
_MIXTRAL = Architecture(
    "MixtralForCausalLM",
    _ATTENTION
    | _NORMS
    | {"block_sparse_moe.gate": "ffn_gate_inp", "block_sparse_moe.experts.w1": "ffn_gate_exps"}
    | {"block_sparse_moe.experts.w2": "ffn_down_exps", "block_sparse_moe.experts.w3": "ffn_up_exps"},
    _RMS_EPSILON,
    {},
    numbers={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    has_paired_rows=True,
)
_GRANITE_EXPERTS: dict[str, str | tuple[str, ...]] = {
    **_ATTENTION,
    **_NORMS,
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.input_linear": _JOINED_EXPERTS,
    "block_sparse_moe.output_linear": "ffn_down_exps",
}
_GRANITE_SHARED: dict[str, str | tuple[str, ...]] = {
    "shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp"),
    "shared_mlp.output_linear": "ffn_down_shexp",
}
_SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_GRANITE_MOE = _LLAMA._replace(
    name="GraniteMoeForCausalLM",
    layers=_GRANITE_EXPERTS,
    biases={},
    numbers={**_SCALES, **_MIXTRAL.numbers},
)
_GEMMA = Architecture(
    "GemmaForCausalLM",
    _LLAMA.layers,
    _RMS_EPSILON,
    {},
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    norm_offset=1.0,
)
_GEMMA2 = _GEMMA._replace(
    name="Gemma2ForCausalLM",
    layers=_ATTENTION | _NORMS | _GATED | _POST_NORMS | {"pre_feedforward_layernorm": "ffn_norm"},
    numbers={name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
    has_windows=True,
)
_OLMO2 = Architecture(
    "Olmo2ForCausalLM",
    _ATTENTION | _QK_NORMS | _POST_NORMS | _GATED,
    _RMS_EPSILON,
    {"attention_bias": QKV | {"attn_output"}},
)
_GLM = Architecture("GlmForCausalLM", _ATTENTION | _NORMS | _JOINED_GATE, _RMS_EPSILON, {"attention_bias": QKV})
_COHERE = Architecture(
    "CohereForCausalLM",
    _ATTENTION | _QK_NORMS | _GATED | {"input_layernorm": "attn_norm"},
    ("layer_norm_eps", _EPSILON),
    {},
    numbers={"logit_scale": "logit_scale"},
)
_SHARED_EXPERTS = {
    **_EXPERTS,
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_EXPERT_NUMBERS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_DELTA: dict[str, str | tuple[str, ...]] = {
    **_ATTENTION,
    **_QK_NORMS,
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    **{f"linear_attn.{part}": f"ssm_{part}" for part in ("conv1d", "dt", "norm")},
    "linear_attn.A_log": "ssm_a",
    "linear_attn.out_proj": "ssm_out",
}
_QWEN35 = Architecture(
    "Qwen3_5ForCausalLM",
    {
        **_DELTA,
        **_GATED,
        **{"linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate"},
        **{"linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha"},
    },
    _RMS_EPSILON,
    {},
    frozenset({"ssm_dt"}),
    numbers={
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "linear_key_head_dim": "ssm.state_size",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "full_attention_interval": "full_attention_interval",
    },
    norm_offset=1.0,
    has_tiled_values=True,
)
_DELTA_EXPERTS = {
    **_QWEN35.numbers,
    **_EXPERT_NUMBERS,
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_GRANITE_HYBRID = _LLAMA._replace(
    name="GraniteMoeHybridForCausalLM",
    layers=_ATTENTION
    | _NORMS
    | {f"mamba.{part}": f"ssm_{suffix}" for part, suffix in (("in_proj", "in"), ("out_proj", "out"), ("A_log", "a"))}
    | {f"mamba.{part}": f"ssm_{part.lower()}" for part in ("conv1d", "dt", "D", "norm")}
    | {"shared_mlp.input_linear": ("ffn_gate", "ffn_up"), "shared_mlp.output_linear": "ffn_down"},
    biases={"mamba_conv_bias": frozenset({"ssm_conv1d"})},
    always_biased=frozenset({"ssm_dt"}),
    fixed={"num_local_experts": 0},
    numbers={
        **_SCALES,
        **_MIXTRAL.numbers,
        "shared_intermediate_size": "expert_shared_feed_forward_length",
        "mamba_d_conv": "ssm.conv_kernel",
        "mamba_d_state": "ssm.state_size",
        "mamba_n_groups": "ssm.group_count",
        "mamba_n_heads": "ssm.time_step_rank",
    },
    state_kind="mamba",
)
_ENCODER_NORMS = frozenset({"attn_output_norm", "layer_output_norm"})
_BERT = Architecture(
    "BertModel",
    {f"attention.self.{part}": f"attn_{part[0]}" for part in ("query", "key", "value")}
    | {"attention.output.dense": "attn_output", "attention.output.LayerNorm": "attn_output_norm"}
    | {"intermediate.dense": "ffn_up", "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm"},
    ("layer_norm_eps", _EPSILON),
    {},
    QKV | _ENCODER_NORMS | {"attn_output", "ffn_up", "ffn_down"},
    "bert.encoder.",
    {
        "bert.embeddings.word_embeddings": "token_embd",
        "bert.embeddings.position_embeddings": "position_embd",
        "bert.embeddings.token_type_embeddings": "token_types",
        "bert.embeddings.LayerNorm": "token_embd_norm",
    },
)
_NOMIC_BERT = Architecture(
    "NomicBertModel",
    {"attn.Wqkv": "attn_qkv", "attn.out_proj": "attn_output", "norm1": "attn_output_norm"}
    | {"mlp.fc11": "ffn_up", "mlp.fc12": "ffn_gate", "mlp.fc2": "ffn_down", "norm2": "layer_output_norm"},
    ("layer_norm_eps", _EPSILON),
    {},
    _ENCODER_NORMS,
    "nomic_bert.encoder.",
    {
        "nomic_bert.embeddings.word_embeddings": "token_embd",
        "nomic_bert.embeddings.token_type_embeddings": "token_types",
        "nomic_bert.emb_ln": "token_embd_norm",
    },
)
ARCHITECTURES = {
    "bert": _BERT,
    "nomic-bert": _NOMIC_BERT,
    "llama": _LLAMA,  # Mistral too
    "arcee": _LLAMA._replace(
        name="ArceeForCausalLM",
        layers=_ATTENTION | _NORMS | _PLAIN,
        biases={**_LLAMA.biases, "mlp_bias": frozenset(_PLAIN.values())},
    ),
    "nemotron": Architecture(
        "NemotronForCausalLM",
        _ATTENTION | _NORMS | _PLAIN,
        ("norm_eps", _EPSILON),
        {"attention_bias": QKV | {"attn_output"}, "mlp_bias": frozenset(_PLAIN.values())},
        frozenset({"attn_norm", "ffn_norm"}),
        norm_offset=1.0,
    ),
    "mistral3": _LLAMA._replace(
        name="Ministral3ForCausalLM",
        yarn={"mscale": 1.0},
        yarn_numbers={"mscale_all_dim": "rope.scaling.yarn_log_multiplier"}
        | {"llama_4_scaling_beta": "attention.temperature_scale"},
    ),
    "smollm3": _LLAMA._replace(name="SmolLM3ForCausalLM"),
    "granite": _LLAMA._replace(name="GraniteForCausalLM", numbers=_SCALES),
    "granitemoe": _GRANITE_MOE,
    "granitehybrid": _GRANITE_HYBRID,
    "olmo2": _OLMO2,
    "olmoe": _OLMO2._replace(
        name="OlmoeForCausalLM",
        layers=_ATTENTION | _NORMS | _QK_NORMS | _EXPERTS | {"mlp.gate": "ffn_gate_inp"},
        fixed={"norm_topk_prob": False},
        numbers={"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    ),
    "exaone4": _OLMO2._replace(name="Exaone4ForCausalLM", biases={}, has_windows=True),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        _NORMS | _JOINED_GATE | {"self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output"},
        _RMS_EPSILON,
        {},
        has_windows=True,
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA2._replace(
        name="Gemma3ForCausalLM",
        layers={**_GEMMA2.layers, **_QK_NORMS},
        numbers={"rope_local_base_freq": "rope.freq_base_swa"},
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", _LLAMA.layers, _RMS_EPSILON, {}, QKV),
    "seed_oss": Architecture(
        "SeedOssForCausalLM",
        _ATTENTION | _GATED | {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"},
        _RMS_EPSILON,
        {"attention_bias": QKV, "attention_out_bias": frozenset({"attn_output"})},
    ),
    "ernie4_5": Architecture(
        "Ernie4_5ForCausalLM",
        _LLAMA.layers,
        _RMS_EPSILON,
        {"use_bias": QKV | {"attn_output"} | frozenset(_GATED.values())},
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        _ATTENTION | _NORMS | _SHARED_EXPERTS,
        _RMS_EPSILON,
        {},
        QKV,
        fixed={"norm_topk_prob": False},
        numbers=_EXPERT_NUMBERS | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        {**_LLAMA.layers, **_QK_NORMS},
        _RMS_EPSILON,
        {"attention_bias": QKV | {"attn_output"}},
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        {**_ATTENTION, **_NORMS, **_QK_NORMS, **_EXPERTS, "mlp.gate": "ffn_gate_inp"},
        _RMS_EPSILON,
        {"attention_bias": QKV | {"attn_output"}},
        fixed={"norm_topk_prob": True},
        numbers=_EXPERT_NUMBERS,
    ),
    "qwen3next": _QWEN35._replace(
        name="Qwen3NextForCausalLM",
        layers={
            **_DELTA,
            **_SHARED_EXPERTS,
            "linear_attn.in_proj_qkvz": ("attn_qkv", "attn_gate"),
            "linear_attn.in_proj_ba": "ssm_ba",
        },
        numbers=_DELTA_EXPERTS,
        has_tiled_values=False,
    ),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35._replace(
        name="Qwen3_5MoeForCausalLM",
        layers={
            **{name: part for name, part in _QWEN35.layers.items() if name not in _GATED},
            **_SHARED_EXPERTS,
        },
        numbers=_DELTA_EXPERTS,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        _ATTENTION
        | {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm"}
        | {"self_attn.sinks": "attn_sinks", "mlp.router": "ffn_gate_inp"}
        | {"mlp.experts.gate_up_proj": _JOINED_EXPERTS, "mlp.experts.down_proj": "ffn_down_exps"},
        _RMS_EPSILON,
        {"attention_bias": QKV | {"attn_output"}},
        frozenset({"ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}),
        # Files do not have it. llama.cpp rounds the bounds of YaRN's ramp, and so computes others than the model has.
        yarn={"truncate": False},
        numbers={**_MIXTRAL.numbers, "intermediate_size": "expert_feed_forward_length"},
        has_windows=True,
        has_alternating_gates=True,
    ),
    "glm4": _GLM._replace(
        name="Glm4ForCausalLM",
        layers={
            **_GLM.layers,
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
    ),
    "chatglm": _GLM,
    "command-r": _COHERE,
    "cohere2": _COHERE._replace(
        name="Cohere2ForCausalLM",
        layers=_ATTENTION | _GATED | {"input_layernorm": "attn_norm"},
        has_windows=True,
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
        | {f"self_attn.{part}_layernorm": f"attn_{part}_norm" for part in "qk"}
        | {f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")}
        | {"self_attn.out_proj": "attn_output", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm"}
        | {"feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up"},
        ("norm_eps", "attention.layer_norm_rms_epsilon"),
        {},
        outer={**_OUTER, "model.embedding_norm": "token_embd_norm"},
        fixed={"block_auto_adjust_ff_dim": False},
        numbers={"conv_L_cache": "shortconv.l_cache"},
        state_kind="conv",
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
        {"use_bias": QKV | {"attn_output", "ffn_up", "ffn_down"}},
        frozenset({"attn_norm", "ffn_norm"}),
        fixed={"hidden_act": "gelu_pytorch_tanh"},
    ),
}
# Others that files of an architecture may have, by the number in the metadata that is above 0 in those.
VARIANTS = {
    "llama": ("expert_count", _MIXTRAL),
    "granitemoe": (
        "expert_shared_feed_forward_length",
        _GRANITE_MOE._replace(
            name="GraniteMoeSharedForCausalLM",
            layers={**_GRANITE_EXPERTS, **_GRANITE_SHARED},
            numbers={**_GRANITE_MOE.numbers, "shared_intermediate_size": "expert_shared_feed_forward_length"},
        ),
    ),
    "granitehybrid": (
        "expert_count",
        _GRANITE_HYBRID._replace(
            layers={
                **_GRANITE_HYBRID.layers,
                **{name: part for name, part in _GRANITE_EXPERTS.items() if name.startswith("block_sparse_moe.")},
                **_GRANITE_SHARED,
            }
        ),
    ),
    "olmo2": ("attention.sliding_window", _OLMO2._replace(name="Olmo3ForCausalLM", has_windows=True)),
}


def architecture_of(file: Gguf) -> Architecture:
    """Return the architecture of a file; raise `GgufError` if it is unknown or lacks or adds tensors of a layer."""
    if (found := ARCHITECTURES.get(file.architecture)) is None:
        raise GgufError(
            f"{file.path} has architecture {file.architecture[:80]!r}, which is not supported in GGUF files; supported "
            f"are {', '.join(ARCHITECTURES)}: give a model of one of these"
        )
    if (variant := VARIANTS.get(file.architecture)) is not None:
        number = file.metadata.get(f"{file.architecture}.{variant[0]}")
        found = variant[1] if isinstance(number, int) and number > 0 else found
    known, predicting = found.parts, file.metadata.get(f"{file.architecture}.{_PREDICTING}")
    last = layers_of(file) if predicting else None
    for name in file.tensors:
        inner = _IN_LAYER.fullmatch(name)
        if inner and last is not None and int(inner[1]) >= last:
            continue
        if inner:
            is_known = known.issuperset(_stands_for(inner[2], known))
        else:
            is_known = name.rpartition(".")[0] in found.outer.values() or name in _OF_POSITIONS
        if not is_known:
            raise GgufError(
                f"{file.path} has a tensor {name[:80]!r}, which {found.name} lacks: it is of a variant that is not "
                "supported"
            )
    return found


def _stands_for(stored_part: str, known: frozenset[str]) -> frozenset[str]:
    """Return the names of tensors in a layer that a tensor of a file is: several if it joins them."""
    if stored_part == JOINED_QKV and stored_part not in known:
        return QKV
    expert = _ONE_EXPERT.fullmatch(stored_part)
    return frozenset({f"{expert[1]}_exps" if expert else stored_part})


def layers_of(file: Gguf) -> Any:
    """Return the number of layers without those that predict further tokens, which come last and are not used."""
    found = [file.metadata.get(f"{file.architecture}.{key}", 0) for key in ("block_count", _PREDICTING)]
    if not all(isinstance(count, int) for count in found) or found[0] <= found[1]:
        raise GgufError(f"{file.path} has no {file.architecture}.block_count in its metadata: convert the model again")
    return found[0] - found[1]


def biased(file: Gguf, of: Architecture) -> dict[str, bool]:
    """Return the fields of config.json that say which biases a file has."""
    layers = (_IN_LAYER.fullmatch(name) for name in file.tensors if name.endswith(".bias"))
    having = frozenset[str]().union(*(_stands_for(found[2], of.parts) for found in layers if found))
    fields = {field: bool(having & parts) for field, parts in of.biases.items()}
    wanted = of.always_biased.union(*(parts for field, parts in of.biases.items() if fields[field]))
    if having != wanted:
        odd = ", ".join(sorted(having ^ wanted))
        raise GgufError(f"{file.path} has biases that {of.name} lacks, or lacks some that it has: those of {odd}")
    return fields
