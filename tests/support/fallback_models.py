"""Small configurations of architectures without a native family."""

from __future__ import annotations

from typing import Any

_SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_FULL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
FALLBACKS: dict[str, dict[str, Any]] = {
    # Learned positions, transposed weights, tied output.
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        **{"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "eos_token_id": None},
    },
    # Attention and MLP in parallel, norms per head with means.
    "stablelm": {
        **_SHAPE,
        "architectures": ["StableLmForCausalLM"],
        "hidden_size": 128,
        "partial_rotary_factor": 1.0,
        "qk_layernorm": True,
        "use_parallel_residual": True,
    },
    # Soft caps of scores and of logits, another scale, a window.
    "vaultgemma": {
        **_SHAPE,
        "architectures": ["VaultGemmaForCausalLM"],
        "sliding_window": 9,
        "query_pre_attn_scalar": 50,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    # Sinks, experts, values of another length than keys, numbers of key-value heads that differ between layers.
    "mimo": {
        **_SHAPE,
        **_EXPERTS,
        "architectures": ["MiMoV2FlashForCausalLM"],
        "sliding_window": 9,
        "v_head_dim": 16,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _FULL),
    },
    # Linear biases, for a number of heads that is no power of two.
    "bloom": {
        "architectures": ["BloomForCausalLM"],
        **{"vocab_size": 96, "hidden_size": 192, "n_layer": 2, "n_head": 6, "seq_length": 256, "eos_token_id": None},
    },
    # Attention within chunks, queries that grow, experts whose inputs are scaled.
    "llama4": {
        **_SHAPE,
        "architectures": ["Llama4ForCausalLM"],
        **{"num_local_experts": 6, "moe_layers": [0], "intermediate_size_mlp": 96, "no_rope_layers": [1, 0]},
        **{"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 16, "floor_scale": 4},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
# Others, with which fewer tests run.
FURTHER: dict[str, dict[str, Any]] = {
    "falcon_rw": {
        "architectures": ["FalconForCausalLM"],
        **{"vocab_size": 97, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "alibi": True},
        **{"multi_query": False, "bias": True, "parallel_attn": False, "eos_token_id": None, "bos_token_id": 0},
    },
    "doge": _SHAPE | {"architectures": ["DogeForCausalLM"], "keep_window_size": 128},
    "jetmoe": _SHAPE
    | {"architectures": ["JetMoeForCausalLM"], "kv_channels": 24, "num_local_experts": 6, "num_experts_per_tok": 2},
    "mpt": {"architectures": ["MptForCausalLM"], "d_model": 96, "n_layers": 2, "n_heads": 6, "max_seq_len": 256},
    "neox_japanese": {
        "architectures": ["GPTNeoXJapaneseForCausalLM"],
        **{"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_multiple_size": 2},
        **{"max_position_embeddings": 256, "eos_token_id": None},
    },
    # Routers that transformers keeps in float32.
    "ernie_moe": _SHAPE
    | {"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32}
    | {"moe_layer_start_index": 0},
    # Experts that are cut from one matrix, and a base of rotary positions that transformers does not read.
    "dbrx": {
        "architectures": ["DbrxForCausalLM"],
        **{"vocab_size": 96, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "eos_token_id": None},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 6, "moe_top_k": 2},
    },
    # Linear attention: a state without a convolution.
    "minimax": _SHAPE
    | {"architectures": ["MiniMaxForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 16}
    | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    # A state with a decay of each channel and token, gates with a matrix for each head, and a window.
    "recurrent_gemma": _SHAPE
    | {"architectures": ["RecurrentGemmaForCausalLM"], "num_hidden_layers": 3, "attention_window_size": 9}
    | {"lru_width": 64, "conv1d_width": 4},
    # No attention: each token is mixed with the one before, and the state has averages and their exponents.
    "rwkv": {
        "architectures": ["RwkvForCausalLM"],
        **{"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3},
        **{"context_length": 256, "rescale_every": 2, "eos_token_id": None},
    },
    # Latent attention: keys and values of different lengths are made of one vector.
    "deepseek_v3": _SHAPE
    | {"architectures": ["DeepseekV3ForCausalLM"], "head_dim": 16, "qk_head_dim": 32, "num_key_value_heads": 4}
    | {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
    | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    # Parameters that its code draws with a function that ignores the default device.
    "diffllama": _SHAPE | {"architectures": ["DiffLlamaForCausalLM"]},
    "hrm": _SHAPE | {"architectures": ["HrmTextForCausalLM"], "num_hidden_layers": 4},
}
