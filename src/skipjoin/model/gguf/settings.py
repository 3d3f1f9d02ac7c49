from __future__ import annotations

import copy
import math
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from skipjoin.model.gguf.architecture import Architecture
from skipjoin.model.gguf.file import Gguf, GgufError, Identity, identity_of, read_gguf
from skipjoin.model.gguf.recognize import ROPE_FACTORS, SHORT_FACTORS, architecture_of, biased, layers_of
from skipjoin.model.gguf.unread import refuse_unread

# Metadata of newer files, and the fields of generation_config.json.
_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
# Control tokens that end an answer in whichever vocabulary has them. Files name only one.
_ENDS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
)
# In vocabularies with the first of these, an answer has several parts, each of which <|end|> ends.
_ENDS_OF_PARTS = ("<|return|>", "<|call|>", "<|endoftext|>")
CONTROL = 3
# How vectors are made of a text's hidden states, by `pooling_type`; the first kind is none.
_POOLINGS = (None, "mean", "cls", "last")
# More are refused when the whole configuration is checked.
_MAX_LAYERS = 1 << 14
# Factor of pairs that do not turn, in float32.
_STILL = struct.unpack("<f", struct.pack("<f", 1e30))[0]
# Layers of the largest models.
_LARGEST = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}


def gguf_settings(path: Path) -> dict[str, dict[str, Any]]:
    """Return the JSON files of the folder that a model would have.

    Raises:
        GgufError: If the file is damaged, of an architecture that is not supported, or lacks metadata.
    """
    return copy.deepcopy(_settings(path, identity_of(path)))


# A model's settings are asked for file by file, also after its header is forgotten.
@lru_cache(maxsize=1)
def _settings(path: Path, parts: Identity) -> dict[str, dict[str, Any]]:
    file = read_gguf(path)
    special = {name: _token_id(file, f"{key}_token_id") for name, key in _SPECIAL.items()}
    ends = [*dict.fromkeys(_ends(file))]
    return {
        "config.json": _config(file) | {"eos_token_id": ends},
        "generation_config.json": _sampling(file) | {"eos_token_id": ends},
        "tokenizer_config.json": _tokenizer(file, special),
    }


def _config(file: Gguf) -> dict[str, Any]:
    of, heads = architecture_of(file), _number(file, "attention.head_count")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise GgufError(f"{file.path} has no tensor 'token_embd.weight': it is not a whole model")
    hidden = _number(file, "embedding_length")
    head_dim = _number(file, "attention.key_length", hidden // max(heads, 1))
    if (values := _number(file, "attention.value_length", head_dim)) != head_dim:
        raise GgufError(f"{file.path} has values of {values} numbers and keys of {head_dim}, which must be the same")
    rotated = _number(file, "rope.dimension_count", head_dim)
    ours, theirs = of.epsilon
    kv_heads, kinds = _kv_heads(file, of, heads)
    config = {
        "architectures": [of.name],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers_of(file),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": _width(file, of),
        "max_position_embeddings": _number(file, "context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        # The next larger number, because the product with `head_dim` is rounded down.
        "partial_rotary_factor": math.nextafter(rotated / max(head_dim, 1), 1.0),
        "rope_theta": _number(file, "rope.freq_base", 10000.0),
        "rope_parameters": _rope(file, of, rotated, head_dim),
        ours: _number(file, theirs),
        **of.fixed,
        **biased(file, of),
    }
    config |= _numbers(file, of.numbers)
    if kinds is not None:
        config["layer_types"] = kinds
    config |= _windows(file, of, config)
    if of.has_layer_heads:
        config |= _layer_heads(file, config, head_dim)
    if of.name in _LARGEST:
        config["query_pre_attn_scalar"] = _query_scalar(of, config)
    if "linear_num_value_heads" in config:
        heads = max(config["linear_num_value_heads"], 1)
        config["linear_value_head_dim"] = _number(file, "ssm.inner_size") // heads
    if "mamba_n_heads" in config:
        inner = _number(file, "ssm.inner_size")
        config |= {"mamba_d_head": inner // max(config["mamba_n_heads"], 1), "mamba_expand": inner // max(hidden, 1)}
        # Only files with this have rotary positions.
        config["position_embedding_type"] = "rope" if _metadata(file, "rope.scaling.finetuned") else "nope"
    if (types := file.tensors.get("token_types.weight")) is not None:
        config["type_vocab_size"] = types.shape[0]
    if (pooling := _pooling(file)) is not None:
        config["pooling_mode"] = pooling
    if of.name in ("CohereForCausalLM", "Glm4MoeForCausalLM"):
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors
    if of.name == "GPTNeoXForCausalLM":
        config["use_parallel_residual"] = bool(_metadata(file, "use_parallel_residual", True))
    if isinstance(sums_to_one := _metadata(file, "expert_weights_norm"), bool) and "norm_topk_prob" in of.fixed:
        config["norm_topk_prob"] = sums_to_one
    refuse_unread(file, of, config)
    return config


def _width(file: Gguf, of: Architecture) -> Any:
    found = _metadata(file, "feed_forward_length")
    if of.has_layer_heads and isinstance(found, list) and found:
        return min(found)  # of layers with KV of their own
    return _number(file, "feed_forward_length", _metadata(file, "expert_feed_forward_length"))


def _layer_heads(file: Gguf, config: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return Gemma 4's settings of layers, `head_dim` being that of layers that attend to all tokens."""
    layers, kinds = config["num_hidden_layers"], config.get("layer_types") or []
    counts = _metadata(file, "attention.head_count_kv")
    counts = counts if isinstance(counts, list) else [_number(file, "attention.head_count_kv")] * len(kinds)
    widths = _metadata(file, "feed_forward_length")
    if not len(kinds) == len(counts) == layers:
        raise GgufError(
            f"{file.path} has {len(counts)} numbers of heads and {len(kinds)} windows for {layers} layers, which must "
            "be as many: download it again"
        )
    own = layers - int(config.get("num_kv_shared_layers", 0))
    of_all = [layer for layer in range(min(own, layers)) if kinds[layer] == "full_attention"]
    embedding = file.tensors.get("per_layer_token_embd.weight")
    sliding = {"rope_type": "default", "rope_theta": _number(file, "rope.freq_base_swa", 10000.0)}
    experts = config.get("num_experts", 0)
    return {
        "global_head_dim": head_dim,
        "num_key_value_heads": max(counts),
        "per_layer_config": {str(layer): {"num_key_value_heads": count} for layer, count in enumerate(counts)},
        "attention_k_eq_v": bool(of_all) and f"blk.{of_all[0]}.attn_v.weight" not in file.tensors,
        "use_double_wide_mlp": isinstance(widths, list) and max(widths) > min(widths),
        "vocab_size_per_layer_input": 0 if embedding is None else embedding.shape[0],
        "hidden_size_per_layer_input": config.get("hidden_size_per_layer_input", 0),
        "enable_moe_block": experts > 0,
        "rope_parameters": {
            "sliding_attention": sliding,
            "full_attention": {**config["rope_parameters"], "rope_theta": config["rope_theta"]},
        },
    }


def _windows(file: Gguf, of: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    window = _number(file, "attention.sliding_window", 0)
    if window > 0 and of.has_windows:
        return {"sliding_window": window, "layer_types": _kinds(file, config["num_hidden_layers"])}
    if 0 < window < config["max_position_embeddings"]:
        raise GgufError(
            f"{file.path} has a sliding window of {window} tokens, and GGUF does not say of which layers: give the "
            "folder or hub id of the model that it was made from"
        )
    return {}


def _pooling(file: Gguf) -> str | None:
    kind = _metadata(file, "pooling_type", 0)
    if kind not in range(len(_POOLINGS)):
        raise GgufError(
            f"{file.path} has {file.architecture}.pooling_type {kind!r:.80}, and those of {', '.join(_POOLINGS[1:])} "
            "(1 to 3) are supported: give the folder or hub id of the model that it was made from"
        )
    return _POOLINGS[kind]


def _query_scalar(of: Architecture, config: dict[str, Any]) -> int:
    is_largest = config["num_hidden_layers"] == _LARGEST[of.name]
    return int(config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"])


def _kv_heads(file: Gguf, of: Architecture, heads: int) -> tuple[Any, list[str] | None]:
    found = _metadata(file, "attention.head_count_kv")
    if of.has_layer_heads:
        return None, None
    if not (of.state_kind and isinstance(found, list) and 0 in found):
        return _number(file, "attention.head_count_kv", heads), None
    some = [count for count in found if count != 0]
    if not some or any(count != some[0] for count in some):
        raise GgufError(f"{file.path} has other heads of keys and values in some layers, which is not supported")
    return some[0], [of.state_kind if count == 0 else "full_attention" for count in found]


def _kinds(file: Gguf, layers: int) -> list[str] | None:
    pattern = _metadata(file, "attention.sliding_window_pattern")
    if pattern is None:
        return None
    if not isinstance(pattern, list):  # the last of each group of n has no window; with 0, all have one
        every = _number(file, "attention.sliding_window_pattern")
        pattern = [every == 0 or layer % every < every - 1 for layer in range(min(layers, _MAX_LAYERS))]
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]


def _rope(file: Gguf, of: Architecture, rotated: int, head_dim: int) -> dict[str, Any]:
    # Without a kind, a factor is that of linear scaling, also under its older name.
    older = _number(file, "rope.scale_linear", 0)
    factor = _number(file, "rope.scaling.factor", older)
    kind = _metadata(file, "rope.scaling.type", "none" if factor in (0, 1) else "linear")
    if ROPE_FACTORS in file.tensors and kind != "none" and factor not in (0, 1):
        raise GgufError(
            f"{file.path} has {file.architecture}.rope.scaling.factor {factor:g} besides a tensor {ROPE_FACTORS!r}, "
            "which is not supported: give the folder or hub id of the model that it was made from"
        )
    if of.has_layer_heads:
        return _proportional(file, rotated, head_dim)
    if (factors := _factors(file, ROPE_FACTORS, rotated)) is not None:
        return {"rope_type": "factors", "factors": factors}
    if (factors := _factors(file, SHORT_FACTORS, rotated)) is not None:
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "original_max_position_embeddings": _number(file, "rope.scaling.original_context_length"),
            "attention_factor": _number(file, "rope.scaling.attn_factor", 1.0),
        }
    if kind == "none":
        return {"rope_type": "default"}
    if factor == 0:
        raise GgufError(
            f"{file.path} has no {file.architecture}.rope.scaling.factor in its metadata: convert the model again"
        )
    given = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        names = {
            "original_max_position_embeddings": "original_context_length",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        given |= {name: found for name, key in names.items() if (found := _number(file, f"rope.scaling.{key}", 0))}
        given |= {**of.yarn, **_numbers(file, of.yarn_numbers)}
        if (share := _number(file, "rope.scaling.attn_factor", 1.0)) != 1:
            given["attention_factor"] = share * (0.1 * math.log(max(given["factor"], 1.0)) + 1)
    return given


def _proportional(file: Gguf, rotated: int, head_dim: int) -> dict[str, Any]:
    pairs = _factors(file, ROPE_FACTORS, rotated) or [1.0] * (rotated // 2)
    turning = sum(factor == 1 for factor in pairs)
    if rotated != head_dim or any(factor not in (1, _STILL) for factor in pairs) or 1 in pairs[turning:]:
        raise GgufError(
            f"{file.path} has factors of rotary positions in {ROPE_FACTORS!r} that are not supported: give the folder "
            "or hub id of the model that it was made from"
        )
    # The next larger number, because the product is rounded down.
    share = math.nextafter(2 * turning / max(head_dim, 1), 2)
    return {"rope_type": "proportional", "partial_rotary_factor": min(1.0, share)}


def _factors(file: Gguf, name: str, rotated: int) -> list[float] | None:
    if (tensor := file.tensors.get(name)) is None:
        return None
    if tensor.shape != (rotated // 2,) or tensor.type.name != "F32":
        raise GgufError(
            f"{file.path} has tensor {name!r} of shape {tensor.shape} and type {tensor.type.name}, which must be "
            f"{rotated // 2} numbers of F32: download it again"
        )
    with tensor.file.open("rb") as opened:
        opened.seek(tensor.offset)
        return [*struct.unpack(f"<{rotated // 2}f", opened.read(tensor.nbytes))]


def _ends(file: Gguf) -> list[int]:
    named = (_token_id(file, f"{key}_token_id") for key in ("eos", "eot", "eom"))
    tokens, kinds = tokens_of(file), file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list):
        kinds = []
    by_text = {text: index for index, text in enumerate(tokens)}
    texts = (by_text.get(text) for text in (_ENDS_OF_PARTS if _ENDS_OF_PARTS[0] in by_text else _ENDS))
    control = (index for index in texts if index is not None and index < len(kinds) and kinds[index] == CONTROL)
    return [index for index in (*named, *control) if index is not None]


def _sampling(file: Gguf) -> dict[str, Any]:
    found = {ours: file.metadata.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
    return {name: value for name, value in found.items() if value is not None}


def _tokenizer(file: Gguf, special: Mapping[str, int | None]) -> dict[str, Any]:
    tokens = tokens_of(file)
    named = {f"{name}_token": tokens[index] for name, index in special.items() if index is not None}
    prefix = "tokenizer.chat_template"
    templates = {"default": file.metadata.get(prefix)}
    templates |= {
        key.removeprefix(f"{prefix}."): text for key, text in file.metadata.items() if key.startswith(f"{prefix}.")
    }
    listed = [{"name": name, "template": text} for name, text in templates.items() if isinstance(text, str)]
    return named | ({"chat_template": listed} if listed else {})


def tokens_of(file: Gguf) -> list[str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise GgufError(f"{file.path} has no tokens (tokenizer.ggml.tokens): give a file that has its tokenizer")
    return tokens


def _token_id(file: Gguf, key: str) -> int | None:
    found = file.metadata.get(f"tokenizer.ggml.{key}")
    if found is None:
        return None
    count = len(tokens_of(file))
    if not isinstance(found, int) or not 0 <= found < count:
        raise GgufError(f"{file.path} has tokenizer.ggml.{key} {found!r:.80}, which must be one of its {count} tokens")
    return found


def _metadata(file: Gguf, key: str, default: Any = None) -> Any:
    return file.metadata.get(f"{file.architecture}.{key}", default)


def _numbers(file: Gguf, keys: Mapping[str, str]) -> dict[str, Any]:
    return {field: _number(file, key) for field, key in keys.items() if _metadata(file, key) is not None}


def _number(file: Gguf, key: str, default: float | None = None) -> Any:
    found = _metadata(file, key, default)
    if isinstance(found, list) and found and all(value == found[0] for value in found):
        found = found[0]  # the same for all layers
    if isinstance(found, list):
        raise GgufError(f"{file.path} has {file.architecture}.{key} of its own for each layer, which is not supported")
    if found is None:
        raise GgufError(f"{file.path} has no {file.architecture}.{key} in its metadata: convert the model again")
    if isinstance(found, bool | str) or not math.isfinite(found):
        raise GgufError(f"{file.path} has {file.architecture}.{key} {found!r:.80}, which must be a number")
    return found
