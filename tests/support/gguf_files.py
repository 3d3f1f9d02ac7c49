"""GGUF files of small models, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch

if TYPE_CHECKING:
    import tokenizers
    import transformers

Kind = gguf.GGMLQuantizationType
_ARCHITECTURES = {"mistral": "llama", "gpt_neox": "gptneox", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}
# Types that the package reads and does not write: where their blocks have scales, as halves, and what is added to them.
_SCALES = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
    Kind.IQ3_S: (0,),
    Kind.IQ2_XS: (0,),
}


def stored(name: str, weight: np.ndarray, config: transformers.PreTrainedConfig) -> np.ndarray:
    """Return a checkpoint's tensor with its rows in the order of files."""
    heads = config.num_attention_heads
    if config.model_type in ("llama", "mistral", "smollm3", "granite") and (".q_proj." in name or ".k_proj." in name):
        count = heads if ".q_proj." in name else config.num_key_value_heads
        halves = weight.reshape(count, 2, weight.shape[0] // count // 2, *weight.shape[1:])
        return halves.swapaxes(1, 2).reshape(weight.shape)
    if ".query_key_value." in name:
        by_head = weight.reshape(heads, 3, weight.shape[0] // heads // 3, *weight.shape[1:])
        return np.concatenate([by_head[:, part].reshape(-1, *weight.shape[1:]) for part in range(3)])
    return weight


def packed(weight: np.ndarray, kind: Kind, random: np.random.Generator) -> np.ndarray:
    """Return a matrix as blocks of a type; random ones for types that the package cannot write."""
    if kind not in _SCALES:
        return gguf.quantize(weight, kind)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (weight.size // elements, size), dtype=np.uint8)
    for at in _SCALES[kind]:
        scale = random.uniform(1e-3, 4e-3, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(weight.shape[0], -1)


def write_model(
    path: Path,
    model: transformers.PreTrainedModel,
    kind: Kind = Kind.F32,
    *,
    tokenizer: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors_per_part: int = 0,
    architecture: str = "",
    extra: Mapping[str, int] | None = None,
) -> None:
    """Write a model, and set its weights to those that the file has. `extra` are vectors that it has besides."""
    config: Any = model.config
    architecture = architecture or _ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_part)
    hidden, heads = config.hidden_size, config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(hidden)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", heads))
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", 1e-6))
    writer.add_layer_norm_eps(getattr(config, "norm_epsilon", getattr(config, "layer_norm_eps", 1e-5)))
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    _add_rope(writer, config, head_dim)
    if head_dim != hidden // heads:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.model_type in ("phi3", "gemma2", "gemma3_text") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type.startswith("gemma"):
        kinds = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(kinds)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "gpt_neox":
        writer.add_parallel_residual(config.use_parallel_residual)
    if config.model_type == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for key, (value, kind_of) in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, kind_of)
    _add_tokenizer(writer, tokenizer or plain_tokens(config.vocab_size))
    _add_tensors(writer, model, kind)
    for name, count in (extra or {}).items():
        writer.add_tensor(name, np.zeros(count, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def small_llama(*, vocab_size: int = 101, hidden_size: int = 256, num_hidden_layers: int = 1) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415 - takes two seconds

    shape = {"hidden_size": hidden_size, "intermediate_size": hidden_size, "num_hidden_layers": num_hidden_layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**shape, **heads, vocab_size=vocab_size, max_position_embeddings=128, eos_token_id=2)
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config).eval()


def _add_rope(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    rope = config.rope_parameters
    if "full_attention" in rope:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))))
        for side in ("short", "long"):
            writer.add_tensor(f"rope_factors_{side}.weight", np.asarray(rope[f"{side}_factor"], np.float32))
    if rope["rope_type"] == "llama3":
        turns = rope["original_max_position_embeddings"] / 2 / np.pi
        turns = turns * rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clip(0, 1)
        factors = 1 / ((1 - kept) / rope["factor"] + kept)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))


def _add_tensors(writer: gguf.GGUFWriter, model: transformers.PreTrainedModel, kind: Kind) -> None:
    config: Any = model.config
    architecture = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == writer.arch)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    random = np.random.default_rng(1)
    done = set()
    for name, parameter in model.named_parameters():
        if parameter.data_ptr() in done:
            continue
        done.add(parameter.data_ptr())
        if name.endswith("experts.gate_up_proj"):
            _add_gates(writer, names, name, parameter, kind)
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        found = f"{found}.weight" if found and found.endswith("_exps") else found
        assert found is not None, name
        weight = parameter.detach().numpy()
        # Which row of the checkpoint a row of the file is, to bring the numbers of blocks back.
        order = stored(name, np.arange(len(weight)), config)
        rows = np.ascontiguousarray(weight[order])
        if weight.ndim == 1 and config.model_type.startswith("gemma"):
            rows += 1
            parameter.data = torch.from_numpy(rows) - 1
        if weight.ndim == 1:
            writer.add_tensor(found, rows)
            continue
        blocks = packed(rows, kind, random)
        writer.add_tensor(found, blocks, raw_dtype=kind)
        parameter.data[torch.from_numpy(order)] = torch.from_numpy(gguf.dequantize(blocks, kind))


def _add_gates(
    writer: gguf.GGUFWriter, names: gguf.TensorNameMap, name: str, parameter: torch.nn.Parameter, kind: Kind
) -> None:
    for part, weight in zip(("gate", "up"), parameter.detach().chunk(2, dim=1), strict=True):
        blocks = gguf.quantize(weight.contiguous().numpy(), kind)
        found = names.get_name(name.replace("gate_up", part))
        writer.add_tensor(f"{found}.weight", blocks, raw_dtype=kind)
        weight.copy_(torch.from_numpy(gguf.dequantize(blocks, kind)))


def _add_tokenizer(writer: gguf.GGUFWriter, described: Mapping[str, Any]) -> None:
    writer.add_tokenizer_model(described["model"])
    writer.add_token_list(described["tokens"])
    writer.add_token_types(described["types"])
    if "scores" in described:
        writer.add_token_scores(described["scores"])
    if "merges" in described:
        writer.add_token_merges(described["merges"])
        writer.add_tokenizer_pre(described["pre"])
    for name, index in described.get("ids", {}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    for name, value in described.get("flags", {}).items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    if template := described.get("template"):
        writer.add_chat_template(template)


def plain_tokens(count: int) -> dict[str, Any]:
    """Return a tokenizer of characters, with one merge."""
    tokens = [chr(0x100 + index) for index in range(count - 1)]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*tokens, tokens[0] + tokens[1]],
        "types": [1] * count,
        "merges": [f"{tokens[0]} {tokens[1]}"],
        "ids": {"eos": 2},
    }


def described(backend: tokenizers.Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """Return a byte-level tokenizer as metadata."""
    raw = json.loads(backend.to_str())
    tokens = [backend.id_to_token(index) for index in range(backend.get_vocab_size())]
    added = {token["id"]: 3 if token["special"] else 4 for token in raw["added_tokens"]}
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "types": [added.get(index, 1) for index in range(len(tokens))],
        "merges": [" ".join(pair) for pair in raw["model"]["merges"]],
        **more,
    }
