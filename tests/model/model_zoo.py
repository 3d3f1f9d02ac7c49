"""Small transformers models with random weights, and runners of our models over paged batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.kv_cache import PagedKV

if TYPE_CHECKING:
    import transformers

VOCAB = 101
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_GATED = {**_SHAPE, "intermediate_size": 96, "num_key_value_heads": 2}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
_SCORED = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "n_shared_experts": 2},
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
}
_LATENT = {
    **{"kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20},
}
_OF_DENSE = ("intermediate_size", "first_k_dense_replace", "routed_scaling_factor")
_GROUPS = {"n_group": 4, "topk_group": 2}
_DELTA = {
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"head_dim": 32, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    **{"num_hidden_layers": 3, "shared_expert_intermediate_size": 32},
}
_MAMBA = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "shared_intermediate_size": 64},
    "layer_types": ["linear_attention", "full_attention"],
}
_GRANITE_MOE = {
    **{"num_local_experts": 4, "embedding_multiplier": 2.0, "attention_multiplier": 0.2},
    **{"residual_multiplier": 0.5, "logits_scaling": 4.0},
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_CONVOLUTIONS = ["conv", "full_attention", "conv"]
_KINDS = ["sliding_attention", "full_attention"]
_ROPE_BY_KIND = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
}
_QUERIES_GROW = _YARN | {"original_max_position_embeddings": 8, "factor": 16.0, "llama_4_scaling_beta": 0.5}
_GEMMA4 = {
    **{"head_dim": 16, "global_head_dim": 32, "sliding_window": 9, "hidden_size_per_layer_input": 32},
    **{"layer_types": _KINDS * 2, "vocab_size_per_layer_input": VOCAB},
}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)], "long_factor": [2.0] * 8,
}  # fmt: skip


def _config(name: str, **fields: Any) -> Callable[[], transformers.PreTrainedConfig]:
    """Return a function that makes a configuration, and imports transformers, which takes seconds."""
    return lambda: getattr(import_module("transformers"), name)(**fields)


CONFIGS = {
    "llama": _config("LlamaConfig", **_GATED),
    "llama-tied-mha": _config("LlamaConfig", **{**_GATED, "num_key_value_heads": 4}, tie_word_embeddings=True),
    "llama-biases": _config("LlamaConfig", **_GATED, attention_bias=True, mlp_bias=True),
    "llama-llama3": _config("LlamaConfig", **_GATED, rope_parameters=_LLAMA3),
    "llama-yarn": _config("LlamaConfig", **_GATED, rope_parameters=_YARN),
    "llama-linear": _config("LlamaConfig", **_GATED, rope_parameters=_LINEAR),
    "mistral": _config("MistralConfig", **_GATED, sliding_window=None),
    "mistral-window": _config("MistralConfig", **_GATED, sliding_window=9),
    "qwen2": _config("Qwen2Config", **_GATED),
    "qwen2-window": _config("Qwen2Config", **_GATED, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": _config("Qwen3Config", **_GATED, head_dim=32),
    "qwen3-moe": _config("Qwen3MoeConfig", **_GATED, **_EXPERTS, head_dim=32, norm_topk_prob=True),
    "qwen3-moe-dense": _config("Qwen3MoeConfig", **_GATED, **_EXPERTS, mlp_only_layers=[0], attention_bias=True),
    "mixtral": _config("MixtralConfig", **_GATED, num_local_experts=4, sliding_window=9),
    "olmoe": _config("OlmoeConfig", **_GATED, num_experts=4, num_experts_per_tok=2),
    "granite-moe": _config("GraniteMoeConfig", **_GATED, **_GRANITE_MOE),
    "granite-moe-shared": _config("GraniteMoeSharedConfig", **_GATED, **_GRANITE_MOE, shared_intermediate_size=64),
    "gpt-oss": _config(
        "GptOssConfig",
        **_GATED | {"intermediate_size": 64},
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        sliding_window=7,
        rope_parameters=_YARN,
    ),
    "glm4-moe": _config(
        "Glm4MoeConfig", **_GATED | _SCORED, head_dim=32, attention_bias=True, use_qk_norm=True, **_GROUPS
    ),
    "dots1": _config("Dots1Config", **_GATED | _SCORED, norm_topk_prob=True, sliding_window=9, max_window_layers=1),
    "solar-open": _config(
        "SolarOpenConfig",
        **{name: value for name, value in (_GATED | _SCORED).items() if name not in _OF_DENSE},
        head_dim=16,
    ),
    "exaone-moe": _config(
        "ExaoneMoeConfig", **_GATED | _EXPERTS | {"num_hidden_layers": 3}, sliding_window=9, sliding_window_pattern=2
    ),
    "deepseek-v2": _config(
        "DeepseekV2Config",
        **_GATED | _SCORED | _LATENT | _GROUPS | {"num_key_value_heads": 4},
        topk_method="group_limited_greedy",
        rope_parameters=_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek-v2-lite": _config(
        "DeepseekV2Config", **_GATED | _SCORED | _LATENT | {"num_key_value_heads": 4, "q_lora_rank": None}
    ),
    "deepseek-v3": _config(
        "DeepseekV3Config",
        **_GATED | _SCORED | _LATENT | _GROUPS | {"num_key_value_heads": 4},
        attention_bias=True,
        rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "glm4-moe-lite": _config(
        "Glm4MoeLiteConfig",
        **{name: value for name, value in (_GATED | _SCORED | _LATENT).items() if name != "first_k_dense_replace"}
        | {"num_key_value_heads": 4},
        rope_interleave=False,
    ),
    "youtu": _config("YoutuConfig", **_GATED | _LATENT | {"num_key_value_heads": 4}),
    "ernie4.5-moe": _config(
        "Ernie4_5_MoeConfig",
        **_GATED,
        moe_num_experts=6,
        moe_k=3,
        moe_intermediate_size=64,
        moe_num_shared_experts=2,
    ),
    "minimax-m2": _config(
        "MiniMaxM2Config",
        **_GATED | {"intermediate_size": 64},
        head_dim=32,
        num_local_experts=6,
        num_experts_per_tok=3,
        rotary_dim=16,
    ),
    "seed-oss": _config("SeedOssConfig", **_GATED, head_dim=32, attention_out_bias=True),
    "ernie4.5": _config("Ernie4_5Config", **_GATED, head_dim=16),
    "ernie4.5-biases": _config("Ernie4_5Config", **_GATED, head_dim=16, use_bias=True),
    "helium": _config("HeliumConfig", **_GATED, head_dim=16),
    "cwm": _config("CwmConfig", **_GATED, head_dim=16, sliding_window=9, layer_types=_KINDS, rope_parameters=_LLAMA3),
    "qwen2-moe": _config("Qwen2MoeConfig", **_GATED, **_EXPERTS, shared_expert_intermediate_size=32),
    "gpt-neox": _config("GPTNeoXConfig", **_SHAPE, intermediate_size=96),
    "gpt-neox-serial": _config(
        "GPTNeoXConfig", **_SHAPE, intermediate_size=96, use_parallel_residual=False, rotary_pct=0.5
    ),
    "starcoder2": _config("Starcoder2Config", **_GATED),
    "starcoder2-window": _config(
        "Starcoder2Config", **_GATED, sliding_window=7, use_bias=False, tie_word_embeddings=False
    ),
    "arcee": _config("ArceeConfig", **_GATED, head_dim=16),
    "nemotron": _config("NemotronConfig", **_GATED, head_dim=32, mlp_bias=True),
    "smollm3": _config("SmolLM3Config", **_GATED | {"num_hidden_layers": 4}),
    "granite": _config(
        "GraniteConfig",
        **_GATED,
        embedding_multiplier=6.0,
        residual_multiplier=0.22,
        attention_multiplier=0.15,
        logits_scaling=3.0,
        mlp_bias=True,
    ),
    "ministral": _config("MinistralConfig", **_GATED, head_dim=16, sliding_window=9, layer_types=_KINDS),
    "ministral3": _config("Ministral3Config", **_GATED, head_dim=32, rope_parameters=_QUERIES_GROW),
    "phi3": _config("Phi3Config", **_GATED, sliding_window=9, partial_rotary_factor=0.5),
    "phi3-longrope": _config("Phi3Config", **_GATED, rope_parameters=_LONGROPE, original_max_position_embeddings=64),
    "olmo2": _config("Olmo2Config", **_GATED, rope_parameters=_YARN),
    "olmo3": _config("Olmo3Config", **_GATED, sliding_window=9, layer_types=_KINDS, rope_parameters=_ROPE_BY_KIND),
    "exaone4": _config("Exaone4Config", **_GATED, sliding_window=9, layer_types=_KINDS),
    "glm": _config("GlmConfig", **_GATED, head_dim=16),
    "glm4": _config("Glm4Config", **_GATED, head_dim=16),
    "cohere": _config("CohereConfig", **_GATED, use_qk_norm=True),
    "cohere2": _config("Cohere2Config", **_GATED, sliding_window=9, layer_types=_KINDS, attention_bias=True),
    "gemma": _config("GemmaConfig", **_GATED, head_dim=16),
    "gemma2": _config(
        "Gemma2Config",
        **_GATED,
        head_dim=32,
        sliding_window=9,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
    ),
    "gemma3": _config(
        "Gemma3TextConfig",
        **_GATED,
        head_dim=32,
        sliding_window=9,
        layer_types=_KINDS,
        query_pre_attn_scalar=20,
        rope_parameters=_ROPE_BY_KIND,
    ),
    "gemma4": _config(
        "Gemma4TextConfig",
        **_GATED | _GEMMA4 | {"num_hidden_layers": 4},
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        final_logit_softcapping=2.0,
    ),
    "gemma4-experts": _config(
        "Gemma4TextConfig",
        **_GATED | _GEMMA4 | {"hidden_size_per_layer_input": 0, "layer_types": _KINDS},
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=3,
        moe_intermediate_size=64,
    ),
    "opt": _config("OPTConfig", **_SHAPE, ffn_dim=96),
    "opt-after": _config("OPTConfig", **_SHAPE, ffn_dim=96, do_layer_norm_before=False, word_embed_proj_dim=32),
}

# Models whose layers have a recurrent state, which test_recurrent.py runs.
HYBRIDS = {
    "qwen3-next": _config("Qwen3NextConfig", **_GATED | _DELTA | _EXPERTS, mlp_only_layers=[1]),
    "qwen3.5": _config("Qwen3_5TextConfig", **_GATED | _DELTA),
    "qwen3.5-moe": _config("Qwen3_5MoeTextConfig", **_GATED | _DELTA | _EXPERTS | {"linear_conv_kernel_dim": 3}),
    "granite-hybrid": _config("GraniteMoeHybridConfig", **_GATED | _MAMBA, num_local_experts=0),
    "granite-hybrid-experts": _config(
        "GraniteMoeHybridConfig",
        **_GATED | _MAMBA | {"mamba_n_groups": 2, "mamba_proj_bias": True, "time_step_limit": (0.4, 1.5)},
        num_local_experts=4,
        position_embedding_type="rope",
        embedding_multiplier=2.0,
        attention_multiplier=0.2,
        residual_multiplier=0.5,
        logits_scaling=4.0,
    ),
    "lfm2": _config("Lfm2Config", **_GATED | {"num_hidden_layers": 3}, layer_types=_CONVOLUTIONS, block_multiple_of=16),
    "lfm2-moe": _config(
        "Lfm2MoeConfig",
        **_GATED | _EXPERTS | {"num_hidden_layers": 3},
        layer_types=_CONVOLUTIONS,
        num_dense_layers=1,
        routed_scaling_factor=1.5,
    ),
    "lfm2-biases": _config(
        "Lfm2Config",
        **_GATED,
        layer_types=_CONVOLUTIONS[:2],
        conv_bias=True,
        conv_L_cache=5,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
    ),
}


def make_reference(name: str, **changes: Any) -> transformers.PreTrainedModel:
    """Return a model with random parameters, biases and norms included, so that swapped tensors are detected.

    Args:
        changes: Other values of the configuration.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes two seconds

    torch.manual_seed(sum(name.encode()))
    config = (CONFIGS | HYBRIDS)[name]()
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config).eval()
    for label, parameter in model.named_parameters():
        spread = 0.12 if parameter.dim() > 1 else 0.3
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in label and "weight" in label else 0.0, std=spread)
    for label, buffer in model.named_buffers():
        if label.endswith(("layer_scalar", "correction_bias", "expert_bias")):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    return model


def save_reference(name: str, folder: Path) -> transformers.PreTrainedModel:
    model = make_reference(name)
    model.save_pretrained(folder)
    return model


def poisoned_kv(model: CausalLM, num_blocks: int, block_size: int, sequences: int = 1) -> PagedKV:
    """Return a cache full of NaN, which reveals reads of unwritten slots."""
    config, shard = model.config, model.shard
    kv = PagedKV(
        num_blocks,
        block_size,
        config,
        model.dtype,
        model.device,
        of=model.kv_format,
        shard=shard,
        state_slots=sequences,
    )
    kv.tensor.view(torch.uint8).fill_(255)  # NaN of each type, and as the scale of codes
    if kv.states is not None:
        kv.states.tensor.fill_(255)
    return kv


class PagedRunner:
    """Runs sequences of given tokens through a model in random chunks and batches over scattered blocks.

    Ranks that are not on the last stage return no logits.

    Args:
        adapters: Number of the adapter of each sequence, 0 for none.
    """

    def __init__(
        self, model: CausalLM, sequences: list[list[int]], block_size: int, seed: int, adapters: list[int] | None = None
    ) -> None:
        self.adapters = adapters or [0] * len(sequences)
        self.random = random.Random(seed)
        self.model, self.sequences, self.block_size = model, sequences, block_size
        needed = [-(-len(s) // block_size) for s in sequences]
        self.kv = poisoned_kv(model, sum(needed) + 5, block_size, len(sequences))
        free = list(range(self.kv.num_blocks))
        self.random.shuffle(free)
        self.tables = [[free.pop() for _ in range(count)] for count in needed]
        self.free = free
        self.done = [0] * len(sequences)
        self.logits: list[list[torch.Tensor]] = [[] for _ in sequences]

    def step(self) -> None:
        """Run a random subset of unfinished sequences, each with a chunk of random length, often one token."""
        waiting = [i for i, s in enumerate(self.sequences) if self.done[i] < len(s)]
        chosen = self.random.sample(waiting, self.random.randint(1, len(waiting)))
        counts = [min(self.random.choice([1, 1, 1, 2, 5, 17]), len(self.sequences[i]) - self.done[i]) for i in chosen]
        segments = [
            Segment(
                self.sequences[i][self.done[i] : self.done[i] + n],
                self.done[i],
                self.tables[i],
                True,
                True,
                adapter=self.adapters[i],
                state=i,
            )
            for i, n in zip(chosen, counts, strict=True)
        ]
        batch = PackedBatch.build(segments, self.block_size, self.model.device)
        logits = self.model.forward(batch, self.kv)
        parts = logits.split(counts) if self.model.shard.is_last else [logits] * len(chosen)
        for i, count, part in zip(chosen, counts, parts, strict=True):
            self.logits[i].append(part)
            self.done[i] += count

    def run(self, between: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        while any(done < len(s) for done, s in zip(self.done, self.sequences, strict=True)):
            self.step()
            between()
        return [torch.cat(parts) for parts in self.logits]

    def move_a_block(self) -> None:
        """Copy one block elsewhere, overwrite the old one with NaN, and use the new one."""
        table = self.random.choice(self.tables)
        i = self.random.randrange(len(table))
        old, new = table[i], self.free.pop(0)
        rows = self.kv.block_view()
        rows[new] = rows[old]
        rows[old].view(torch.uint8).fill_(255)
        table[i] = new
        self.free.append(old)


def greedy(model: CausalLM, prompts: list[list[int]], count: int, block_size: int = 4) -> list[list[int]]:
    width = -(-(max(map(len, prompts)) + count) // block_size)
    kv = poisoned_kv(model, width * len(prompts), block_size, len(prompts))
    tables = [list(range(i, width * len(prompts), len(prompts))) for i in range(len(prompts))]
    known = [list(p) for p in prompts]
    done = [0] * len(prompts)
    for _ in range(count):
        segments = [Segment(k[d:], d, t, state=i) for i, (k, d, t) in enumerate(zip(known, done, tables, strict=True))]
        tokens = model.forward(PackedBatch.build(segments, block_size, model.device), kv).argmax(-1).tolist()
        for i, token in enumerate(tokens):
            done[i] = len(known[i])
            known[i].append(token)
    return [k[len(p) :] for k, p in zip(known, prompts, strict=True)]
