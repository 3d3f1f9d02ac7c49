"""Small configurations of models whose layers have a recurrent state."""

from __future__ import annotations

from typing import Any

_SHAPE = {"vocab_size": 97, "hidden_size": 48, "num_attention_heads": 4, "max_position_embeddings": 256}
_GATED = _SHAPE | {"intermediate_size": 80, "num_key_value_heads": 2}
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
}
