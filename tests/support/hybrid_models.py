"""Small configurations of models whose layers have a recurrent state."""

from __future__ import annotations

from typing import Any

_SHAPE = {"vocab_size": 97, "hidden_size": 48, "num_attention_heads": 4, "max_position_embeddings": 256}
_GATED = _SHAPE | {"intermediate_size": 80, "num_key_value_heads": 2}
# Of models that run through transformers: attention beside Mamba-2, no attention, Mamba with experts, the delta rule.
_THROUGH: dict[str, dict[str, Any]] = {
    "falcon_h1": _GATED
    | {"architectures": ["FalconH1ForCausalLM"], "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 96}
    | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16, "mamba_n_groups": 2},
    "mamba2": {"architectures": ["Mamba2ForCausalLM"], "vocab_size": 97, "num_hidden_layers": 2}
    | {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "jamba": _GATED
    | {"architectures": ["JambaForCausalLM"], "num_hidden_layers": 2, "intermediate_size": 96, "num_experts": 4}
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 32, "mamba_d_state": 16},
    "olmo_hybrid": _GATED
    | {"architectures": ["OlmoHybridForCausalLM"], "num_hidden_layers": 2, "intermediate_size": 96}
    | {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 3}
    | {"linear_num_value_heads": 3, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
# Tails of vectors are in all dimensions.
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": _GATED
    | {"architectures": ["Lfm2ForCausalLM"], "num_hidden_layers": 3, "block_multiple_of": 16}
    | {"layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_next": _GATED
    | {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 2, "head_dim": 16, "full_attention_interval": 2}
    | {"linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_num_key_heads": 1, "linear_num_value_heads": 3}
    | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 24}
    | {"decoder_sparse_step": 2},
    "granite_hybrid": _GATED
    | {"architectures": ["GraniteMoeHybridForCausalLM"], "num_hidden_layers": 2, "num_local_experts": 0}
    | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 40}
    | {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 20, "mamba_n_groups": 2},
} | {name: raw | {"hidden_size": 64, "eos_token_id": None, "pad_token_id": None} for name, raw in _THROUGH.items()}
_LATENT = _GATED | {"num_key_value_heads": 4, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_LATENT |= {"v_head_dim": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_local_experts": 6}
_LATENT |= {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]}
_MAMBA2 = {"mamba_n_heads": 6, "mamba_d_state": 12, "mamba_n_groups": 2}
# Further ones that run through transformers: the delta rule with decays of keys, convolutions with experts or windows,
# attention that layers share, and Mamba beside experts or with several heads.
FURTHER: dict[str, dict[str, Any]] = {
    "kimi_linear": _LATENT
    | {"architectures": ["KimiLinearForCausalLM"], "q_lora_rank": 24, "linear_head_dim": 12, "linear_num_heads": 3},
    "bailing_hybrid": _LATENT
    | {"architectures": ["BailingHybridForCausalLM"], "head_dim": 12, "n_group": 2, "topk_group": 1}
    | {"first_k_dense_replace": 1},
    "zamba2": _GATED
    | {"architectures": ["Zamba2ForCausalLM"], "num_key_value_heads": 4, "n_mamba_heads": 6, "mamba_d_state": 12}
    | {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3}
    | {"use_shared_attention_adapter": True, "adapter_rank": 8, "use_mem_rope": True},
    "zamba": _GATED
    | {"architectures": ["ZambaForCausalLM"], "num_key_value_heads": 4, "n_mamba_heads": 2, "mamba_d_state": 12}
    | {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3, "mamba_dt_rank": 6},
    "nemotron_h": _GATED
    | {"architectures": ["NemotronHForCausalLM"], "layers_block_type": ["mamba", "attention", "moe"], "head_dim": 12}
    | {"mamba_num_heads": 6, "mamba_head_dim": 12, "ssm_state_size": 12, "n_groups": 2, "n_routed_experts": 6}
    | {"num_hidden_layers": 3, "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 40},
    "bamba": _GATED | _MAMBA2 | {"architectures": ["BambaForCausalLM"], "attn_layer_indices": [1]},
    "falcon_mamba": {"architectures": ["FalconMambaForCausalLM"], "hidden_size": 48, "state_size": 12}
    | {"time_step_rank": 6},
    "lfm2_moe": _GATED
    | {"architectures": ["Lfm2MoeForCausalLM"], "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
    | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_eps": 1e-5},
    "lfm3": _GATED
    | {"architectures": ["Lfm3ForCausalLM"], "layer_types": ["conv", "full_attention", "sliding_attention"]}
    | {"num_hidden_layers": 3, "head_dim": 12, "sliding_window": 9},
}
FURTHER = {
    name: {"vocab_size": 97, "num_hidden_layers": 2, **raw, "eos_token_id": None, "pad_token_id": None}
    for name, raw in FURTHER.items()
}
