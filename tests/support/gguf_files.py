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
_ARCHITECTURES = {
    **{"mistral": "llama", "mixtral": "llama", "ministral3": "mistral3", "gpt_oss": "gpt-oss", "gpt_neox": "gptneox"},
    **{"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"},
    **{
        **{"granitemoehybrid": "granitehybrid", "granitemoeshared": "granitemoe"},
        "gemma3_text": "gemma3",
        "gemma4_text": "gemma4",
        "qwen3_moe": "qwen3moe",
        "qwen2_moe": "qwen2moe",
        "glm4_moe": "glm4moe",
        "ernie4_5_moe": "ernie4_5-moe",
        "minimax_m2": "minimax-m2",
        "lfm2_moe": "lfm2moe",
        "exaone_moe": "exaone-moe",
        "glm": "chatglm",
        "cohere": "command-r",
        "olmo3": "olmo2",
    },
}
_PERMUTED = ("llama", "mistral", "mixtral", "ministral3", "smollm3", "granite", "granitemoe")
_PERMUTED += ("arcee", "granitemoehybrid", "granitemoeshared")
# Names of parameters that the package knows only by those in checkpoints.
_IN_CHECKPOINTS = {
    "self_attn.sinks": "self_attn.sinks.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}
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
    if config.model_type in _PERMUTED and (".q_proj." in name or ".k_proj." in name):
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
    is_older: bool = False,
) -> None:
    """Write a model, and set its weights to those that the file has.

    Args:
        extra: Vectors that the file has besides.
        is_older: Whether each expert has its tensors, and queries, keys and values have one.
    """
    config: Any = model.config
    architecture = architecture or _ARCHITECTURES.get(config.model_type, config.model_type)
    writer = (_OlderWriter if is_older else gguf.GGUFWriter)(path, architecture, split_max_tensors=tensors_per_part)
    _add_settings(writer, config)
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


class _OlderWriter(gguf.GGUFWriter):
    def add_tensor(self, name: str, tensor: np.ndarray, raw_shape: Any = None, raw_dtype: Kind | None = None) -> None:
        part = name.removesuffix(".weight")
        if part.endswith("_exps"):
            for expert, matrix in enumerate(tensor):
                super().add_tensor(f"{part.removesuffix('_exps')}.{expert}.weight", matrix, raw_dtype=raw_dtype)
            return
        layer, _, inner = name.partition(".attn_")
        if inner.partition(".")[0] not in ("q", "k", "v"):
            super().add_tensor(name, tensor, raw_dtype=raw_dtype)
            return
        kept = self.__dict__.setdefault("kept", {})
        kept[name] = tensor
        names = [f"{layer}.attn_{one}.{inner.partition('.')[2]}" for one in "qkv"]
        if kept.keys() >= {*names}:
            joined = np.concatenate([kept.pop(one) for one in names])
            super().add_tensor(names[0].replace("attn_q.", "attn_qkv."), joined, raw_dtype=raw_dtype)


def _add_settings(writer: gguf.GGUFWriter, config: Any) -> None:
    hidden, heads = config.hidden_size, config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(hidden)
    writer.add_block_count(config.num_hidden_layers)
    if hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(_width(config))
    writer.add_head_count(heads)
    if config.model_type == "gemma4_text":
        _add_gemma4(writer, config)
        return
    kv_heads = getattr(config, "num_key_value_heads", heads)
    if config.model_type in ("lfm2", "lfm2_moe"):
        kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in config.layer_types]
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type == "granitemoehybrid":
        kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in config.layer_types]
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if config.model_type in ("granitemoehybrid", "granitemoeshared"):
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if (keys := getattr(config, "linear_num_key_heads", 0)) > 0:
        values = config.linear_num_value_heads
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(keys)
        writer.add_ssm_time_step_rank(values)
        writer.add_ssm_inner_size(values * config.linear_value_head_dim)
        writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
        if config.model_type != "qwen3_next":
            writer.add_rope_dimension_sections([2, 1, 1, 0])
    if config.model_type in ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", getattr(config, "norm_eps", 1e-6)))
    writer.add_layer_norm_eps(getattr(config, "norm_epsilon", getattr(config, "layer_norm_eps", 1e-5)))
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    _add_rope(writer, config, head_dim)
    if head_dim != hidden // heads:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    has_windows = ("phi3", "gemma2", "gemma3_text", "gpt_oss", "cohere2", "olmo3", "exaone4", "exaone_moe")
    if config.model_type in has_windows and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
        if config.model_type not in ("phi3", "gpt_oss", "cohere2"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    _add_settings_of_parts(writer, config)


def _add_settings_of_parts(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type.startswith("cohere"):
        writer.add_logit_scale(config.logit_scale)
    if config.model_type == "gpt_neox":
        writer.add_parallel_residual(config.use_parallel_residual)
    if config.model_type in ("glm4_moe", "dots1", "ernie4_5_moe", "minimax_m2", "lfm2_moe", "exaone_moe"):
        _add_scored(writer, config)
        return
    if (experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)) is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type in ("qwen2_moe", "qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe_text"):
        width = getattr(config, "moe_intermediate_size", config.intermediate_size)
        writer.add_expert_feed_forward_length(width)


def _add_scored(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.model_type == "minimax_m2":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        return
    if config.model_type == "lfm2_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        return
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "ernie4_5_moe":
        writer.add_expert_count(config.moe_num_experts)
        writer.add_expert_used_count(config.moe_k)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.moe_intermediate_size * config.moe_num_shared_experts)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        return
    is_exaone = config.model_type == "exaone_moe"
    writer.add_expert_count(config.num_experts if is_exaone else config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.num_shared_experts if is_exaone else config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def _add_gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    of = [config.per_layer_config[layer] for layer in range(len(slides))]
    wide, own = of[-1].head_dim, len(slides) - config.num_kv_shared_layers
    narrow = of[0].head_dim
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_head_count_kv([layer.num_key_value_heads for layer in of])
    writer.add_key_length(wide)
    writer.add_value_length(wide)
    writer.add_key_length_swa(narrow)
    writer.add_value_length_swa(narrow)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    if config.use_double_wide_mlp:
        writer.kv_data[0].pop("gemma4.feed_forward_length")
        writer.add_feed_forward_length(
            [config.intermediate_size * (1 + (layer >= own)) for layer in range(len(slides))]
        )
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_float32("gemma4.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(wide)
    writer.add_rope_dimension_count_swa(narrow)
    turning = int(rope["full_attention"]["partial_rotary_factor"] * wide // 2)
    writer.add_tensor("rope_freqs.weight", np.where(np.arange(wide // 2) < turning, 1, 1e30).astype(np.float32))
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _width(config: Any) -> int:
    if config.model_type != "lfm2" or not config.block_auto_adjust_ff_dim:
        return int(config.intermediate_size)
    width = int(config.block_ffn_dim_multiplier * int(2 * config.intermediate_size / 3))
    return -(-width // config.block_multiple_of) * config.block_multiple_of


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
    if config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
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
    kept = ("layer_scalar", "e_score_correction_bias", "expert_bias")
    scalars = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(kept)]
    for name, parameter in [*model.named_parameters(), *scalars]:
        if parameter.data_ptr() in done:
            continue
        done.add(parameter.data_ptr())
        if name.endswith(kept[1:]):
            writer.add_tensor(f"blk.{name.split('.')[2]}.exp_probs_b.bias", parameter.numpy().flatten())
            continue
        if config.model_type == "gemma4_text" and (".experts." in name or parameter.dim() == 1):
            _add_part_of_gemma4(writer, name, parameter, names, kind)
            continue
        if ".experts." in name:
            _add_experts(writer, name, parameter, kind, is_gpt_oss=config.model_type == "gpt_oss")
            continue
        if ".linear_attn." in name:
            _add_delta_rule(writer, name, parameter, config, kind)
            continue
        if ".mamba." in name or ".shared_mlp." in name:
            _add_hybrid(writer, name, parameter, config, kind)
            continue
        known = next((name.replace(end, one) for end, one in _IN_CHECKPOINTS.items() if name.endswith(end)), name)
        found = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        weight = parameter.detach().numpy()
        if ".conv.conv." in name:
            writer.add_tensor(found, weight[:, 0])
            continue
        # Which row of the checkpoint a row of the file is, to bring the numbers of blocks back.
        order = stored(name, np.arange(len(weight)), config)
        rows = np.ascontiguousarray(weight[order])
        from_one = config.model_type.startswith(("gemma", "nemotron", "qwen3_next", "qwen3_5"))
        from_one = from_one and config.model_type != "gemma4_text"
        if weight.ndim == 1 and from_one and "norm" in name and name.endswith(".weight"):
            rows += 1
            parameter.data = torch.from_numpy(rows) - 1
        if weight.ndim == 1 or "_norm" in found:
            writer.add_tensor(found, rows)
            continue
        blocks = packed(rows, kind, random)
        writer.add_tensor(found, blocks, raw_dtype=kind)
        parameter.data[torch.from_numpy(order)] = torch.from_numpy(gguf.dequantize(blocks, kind))


def _add_delta_rule(writer: gguf.GGUFWriter, name: str, parameter: torch.nn.Parameter, config: Any, kind: Kind) -> None:
    """Add a tensor of a delta rule, with the heads of its values in the order of Qwen3.5's files."""
    layer, part = name.split(".")[2], name.partition(".linear_attn.")[2].removesuffix(".weight")
    keys, count = config.linear_num_key_heads, config.linear_num_value_heads
    weight, is_next = parameter.detach(), config.model_type == "qwen3_next"

    def tiled(values: torch.Tensor) -> torch.Tensor:
        if is_next:
            return values
        by_key = values.unflatten(0, (keys, count // keys, len(values) // count))
        return by_key.transpose(0, 1).flatten(0, 2)

    def add(found: str, values: torch.Tensor) -> None:
        as_array = values.contiguous().numpy()
        if values.dim() == 2 and "conv" not in found:
            writer.add_tensor(f"blk.{layer}.{found}", gguf.quantize(as_array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"blk.{layer}.{found}", as_array)

    if part in ("in_proj_qkv", "conv1d"):
        first = 2 * keys * config.linear_key_head_dim
        whole = weight.squeeze(1) if part == "conv1d" else weight
        found = "ssm_conv1d.weight" if part == "conv1d" else "attn_qkv.weight"
        add(found, torch.cat([whole[:first], tiled(whole[first:])]))
    elif part == "in_proj_qkvz":
        values = count // keys * config.linear_value_head_dim
        sizes = [config.linear_key_head_dim, config.linear_key_head_dim, values, values]
        q, k, v, z = (part.flatten(0, 1) for part in weight.unflatten(0, (keys, sum(sizes))).split(sizes, dim=1))
        add("attn_qkv.weight", torch.cat([q, k, v]))
        add("attn_gate.weight", z)
    elif part == "out_proj":
        add("ssm_out.weight", tiled(weight.T).T)
    elif part == "A_log":
        add("ssm_a", tiled(-weight.exp()))
    else:
        names = {"in_proj_z": "attn_gate.weight", "in_proj_b": "ssm_beta.weight", "in_proj_a": "ssm_alpha.weight"}
        names |= {"in_proj_ba": "ssm_ba.weight", "dt_bias": "ssm_dt.bias", "norm": "ssm_norm.weight"}
        add(names[part], weight if part in ("norm", "in_proj_ba") else tiled(weight))
    if parameter.dim() == 2:
        blocks = gguf.dequantize(gguf.quantize(weight.contiguous().numpy(), kind), kind)
        parameter.data.copy_(torch.from_numpy(blocks))


def _add_hybrid(writer: gguf.GGUFWriter, name: str, parameter: torch.nn.Parameter, config: Any, kind: Kind) -> None:
    """Add a tensor of Granite 4: of a layer of Mamba-2, or of the MLP that all tokens use."""
    layer, part = name.split(".")[2], name.removesuffix(".weight").split(".", 4)[-1]
    weight, suffix = parameter.detach(), "_shexp" if config.num_local_experts else ""
    names = {"input_linear": ("ffn_gate", "ffn_up"), "output_linear": ("ffn_down",)}
    if part in names:
        found = [f"{name}{suffix}.weight" for name in names[part]]
    else:
        others = {"dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d", "conv1d.bias": "ssm_conv1d.bias"}
        others |= {"conv1d": "ssm_conv1d.weight", "in_proj": "ssm_in.weight", "out_proj": "ssm_out.weight"}
        found = [(others | {"norm": "ssm_norm.weight"})[part]]
    for one, rows in zip(found, weight.chunk(len(found)), strict=True):
        if weight.dim() == 2:
            blocks = gguf.quantize(rows.contiguous().numpy(), kind)
            writer.add_tensor(f"blk.{layer}.{one}", blocks, raw_dtype=kind)
            rows.copy_(torch.from_numpy(gguf.dequantize(blocks, kind)))
            continue
        shaped = {"A_log": lambda: -weight.exp()[:, None], "D": lambda: weight[:, None]}
        shaped |= {"conv1d": lambda: weight[:, 0], "norm": lambda: weight.view(config.mamba_n_groups, -1)}
        writer.add_tensor(f"blk.{layer}.{one}", shaped.get(part, lambda: weight)().contiguous().numpy())


def _add_experts(
    writer: gguf.GGUFWriter, name: str, parameter: torch.nn.Parameter, kind: Kind, *, is_gpt_oss: bool
) -> None:
    """Add a tensor of all experts, [experts, out, in], or that of the gates and of what they gate as two."""
    layer, is_bias, part = name.split(".")[2], name.endswith("_bias"), name.rpartition(".")[2].removesuffix("_bias")
    weight = parameter.detach()
    rows = weight if is_bias or not is_gpt_oss else weight.transpose(1, 2)
    parts = {part.removesuffix("_proj"): rows}
    if part == "gate_up_proj":
        halves = (rows[:, ::2], rows[:, 1::2]) if is_gpt_oss else rows.chunk(2, dim=1)
        parts = dict(zip(("gate", "up"), halves, strict=True))
    for of, view in parts.items():
        found = f"blk.{layer}.ffn_{of}_exps.{'bias' if is_bias else 'weight'}"
        if is_bias:
            writer.add_tensor(found, view.contiguous().numpy())
            continue
        blocks = gguf.quantize(view.contiguous().numpy(), kind)
        writer.add_tensor(found, blocks, raw_dtype=kind)
        view.copy_(torch.from_numpy(gguf.dequantize(blocks, kind)))


def _add_part_of_gemma4(
    writer: gguf.GGUFWriter, name: str, parameter: torch.Tensor, names: gguf.TensorNameMap, kind: Kind
) -> None:
    layer, weight = name.split(".")[2], parameter.detach().numpy()
    others = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    others |= {"layer_scalar": "layer_output_scale.weight"}
    found = next((f"blk.{layer}.{one}" for end, one in others.items() if name.endswith(end)), None)
    if weight.ndim == 1:
        writer.add_tensor(found or names.get_name(name, try_suffixes=(".weight",)), weight)
        return
    blocks = gguf.quantize(weight, kind)
    writer.add_tensor(f"{names.get_name(name)}.weight", blocks, raw_dtype=kind)
    parameter.data.copy_(torch.from_numpy(gguf.dequantize(blocks, kind)))


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
