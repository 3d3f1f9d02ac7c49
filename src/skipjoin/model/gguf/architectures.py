from __future__ import annotations

from skipjoin.model.gguf.architecture import OUTER, QKV, Architecture

_ATTENTION = {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"} | {"self_attn.o_proj": "attn_output"}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_GATED = {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
_PLAIN = {f"mlp.{part}_proj": f"ffn_{part}" for part in ("up", "down")}
_JOINED_GATE = {"mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
# Experts of a layer are one tensor, [experts, out, in].
_EXPERTS = {f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")}
_JOINED_EXPERTS = "ffn_gate_exps", "ffn_up_exps"
_POST_NORMS = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_QK_NORMS = {f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"}
_RMS_EPSILON = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
_EPSILON = "attention.layer_norm_epsilon"
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
    name="GraniteMoeForCausalLM", layers=_GRANITE_EXPERTS, biases={}, numbers={**_SCALES, **_MIXTRAL.numbers}
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
_GEMMA4 = Architecture(
    "Gemma4ForCausalLM",
    {
        **_GEMMA2.layers,
        **_QK_NORMS,
        **{f"{part}_feedforward_layernorm_2": f"{part}_ffw_norm_2" for part in ("pre", "post")},
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "router.proj": "ffn_gate_inp",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps",
        "experts.down_proj": "ffn_down_exps",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "layer_scalar": "layer_output_scale",
    },
    _RMS_EPSILON,
    {},
    outer={
        **OUTER,
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
    },
    fixed={"hidden_activation": "gelu_pytorch_tanh"},
    numbers={
        "head_dim": "attention.key_length_swa",
        "num_kv_shared_layers": "attention.shared_kv_layers",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        "final_logit_softcapping": "final_logit_softcapping",
        "num_experts": "expert_count",
        "top_k_experts": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    },
    has_windows=True,
    has_layer_heads=True,
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
# The shared expert's names in files of models that have no gate of it, and corrections of scores.
_SCORED = {
    **_EXPERTS,
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction": "exp_probs_b",
}
_SCORED_NUMBERS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_DOTS1 = Architecture(
    "Dots1ForCausalLM",
    {**_LLAMA.layers, **_QK_NORMS, **_SCORED},
    _RMS_EPSILON,
    {},
    frozenset({"exp_probs_b"}),
    fixed={"norm_topk_prob": True, "sliding_window": None},
    numbers=_SCORED_NUMBERS,
    has_logistic_scores=True,
)
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
_LFM2 = Architecture(
    "Lfm2ForCausalLM",
    {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
    | {f"self_attn.{part}_layernorm": f"attn_{part}_norm" for part in "qk"}
    | {f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")}
    | {"self_attn.out_proj": "attn_output", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm"}
    | {"feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up"},
    ("norm_eps", "attention.layer_norm_rms_epsilon"),
    {},
    outer={**OUTER, "model.embedding_norm": "token_embd_norm"},
    fixed={"block_auto_adjust_ff_dim": False},
    numbers={"conv_L_cache": "shortconv.l_cache"},
    state_kind="conv",
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
    "gemma4": _GEMMA4,
    "dots1": _DOTS1,
    "glm4moe": _DOTS1._replace(
        name="Glm4MoeForCausalLM",
        layers={**_DOTS1.layers, "post_attention_layernorm": "post_attention_norm"},
        biases={"attention_bias": QKV},
        fixed={"norm_topk_prob": True},
    ),
    "exaone-moe": _DOTS1._replace(
        name="ExaoneMoeForCausalLM",
        layers={name.replace("mlp.gate.e_score", "mlp.e_score"): part for name, part in _DOTS1.layers.items()},
        fixed={"norm_topk_prob": True},
        numbers={
            "num_experts"
            if name == "n_routed_experts"
            else "num_shared_experts"
            if name == "n_shared_experts"
            else name: of
            for name, of in _SCORED_NUMBERS.items()
        },
        has_windows=True,
    ),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        {
            **_LLAMA.layers,
            **{name: part for name, part in _SCORED.items() if part != "exp_probs_b"},
            "mlp.moe_statics.e_score_correction": "exp_probs_b",
        },
        _RMS_EPSILON,
        {},
        frozenset({"exp_probs_b"}),
        numbers={
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        {
            **_ATTENTION,
            **_NORMS,
            **_QK_NORMS,
            "block_sparse_moe.gate": "ffn_gate_inp",
            "block_sparse_moe.e_score_correction": "exp_probs_b",
            "block_sparse_moe.experts.w1": "ffn_gate_exps",
            "block_sparse_moe.experts.w2": "ffn_down_exps",
            "block_sparse_moe.experts.w3": "ffn_up_exps",
        },
        _RMS_EPSILON,
        {},
        frozenset({"exp_probs_b"}),
        numbers=_MIXTRAL.numbers,
        has_logistic_scores=True,
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
        "Qwen3ForCausalLM", {**_LLAMA.layers, **_QK_NORMS}, _RMS_EPSILON, {"attention_bias": QKV | {"attn_output"}}
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
        layers={**{name: part for name, part in _QWEN35.layers.items() if name not in _GATED}, **_SHARED_EXPERTS},
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
        name="Cohere2ForCausalLM", layers=_ATTENTION | _GATED | {"input_layernorm": "attn_norm"}, has_windows=True
    ),
    "lfm2": _LFM2,
    "lfm2moe": _LFM2._replace(
        name="Lfm2MoeForCausalLM",
        layers={
            **_LFM2.layers,
            "feed_forward.gate": "ffn_gate_inp",
            "feed_forward.expert": "exp_probs_b",
            "feed_forward.experts.w1": "ffn_gate_exps",
            "feed_forward.experts.w2": "ffn_down_exps",
            "feed_forward.experts.w3": "ffn_up_exps",
        },
        always_biased=frozenset({"exp_probs_b"}),
        fixed={"norm_topk_prob": True},
        numbers={**_LFM2.numbers, **_EXPERT_NUMBERS, "num_dense_layers": "leading_dense_block_count"},
        has_logistic_scores=True,
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
