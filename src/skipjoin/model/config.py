"""Configuration of a model folder: shapes, family and special tokens, as one frozen value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipjoin.model.rope import RopeSettings, is_number, parse_rope

# Architecture name in config.json -> model family.
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "llama",
    "Qwen3ForCausalLM": "llama",
    "OPTForCausalLM": "opt",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Starcoder2ForCausalLM": "starcoder2",
}
_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "opt": "OPTForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
_ACTIVATIONS = {
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
DTYPES = ("float32", "bfloat16", "float16")
# Upper bounds of integers in config.json, far above those of any model. A larger one means a damaged file, and would
# exhaust the machine's memory before it is detected. All must be at least 1, except `_MAY_BE_ZERO`.
_LARGEST = {
    "num_hidden_layers": 1 << 14,
    "max_window_layers": 1 << 14,
    "hidden_size": 1 << 20,
    "word_embed_proj_dim": 1 << 20,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "intermediate_size": 1 << 24,
    "ffn_dim": 1 << 24,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 30,
    "sliding_window": 1 << 30,
}
_MAY_BE_ZERO = ("max_window_layers", "sliding_window", "word_embed_proj_dim")
# Bounds of the epsilon that is added to a variance: a smaller one is 0 in float32, and a larger one drowns the
# variance.
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon")
_LEAST_EPSILON, _LARGEST_EPSILON = 1e-30, 1.0
_POSITIVE = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_positions",
)


class ModelError(Exception):
    """A model, tokenizer or folder cannot be used; the message gives the reason and a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only model.

    Attributes:
        family: Family that implements it: "llama" (also Mistral, Qwen2, Qwen3), "opt", "gpt_neox" or "starcoder2".
        head_dim: Values per attention head; num_heads * head_dim need not be hidden_size.
        windows: Attention window of each layer in tokens, the current one included; 0 for full attention.
        rope: Rotary embedding; None if positions are learned.
        dtype_name: Type in which the weights were saved.
        embed_dim: Width of the token embedding: hidden_size except in OPT-350m.
    """

    architecture: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tie_embeddings: bool
    activation: str
    rope: RopeSettings | None
    windows: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    dtype_name: str
    embed_dim: int
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_before: bool = True
    final_norm: bool = True
    norm_affine: bool = True
    parallel_residual: bool = False

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read a model folder's `config.json`, and `generation_config.json` for end-of-sequence ids.

        Raises:
            ModelError: If the folder or file is missing, the JSON is broken, or the model is not supported.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a folder")
        raw = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
        return cls.from_dict(raw, extra_eos=eos)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, extra_eos: Any = None) -> ModelConfig:
        """Parse the contents of a `config.json`.

        Args:
            extra_eos: More end-of-sequence ids.

        Raises:
            ModelError: If the model is not supported.
        """
        _check_numbers(raw)
        architecture = _architecture(raw)
        family = _ARCHITECTURES[architecture]
        try:
            values = _FAMILY_FIELDS[family](raw, architecture)
            common = _common_fields(raw, values["num_layers"], extra_eos)
            config = cls(architecture=architecture, family=family, **(common | values))
        except KeyError as error:
            raise ModelError(f"config.json of this {architecture} has no {error.args[0]!r}") from error
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ModelError(f"config.json of this {architecture} cannot be read: {error}") from error
        config._check()
        return config

    def _check(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly"
            )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a model folder, or raise `ModelError`."""
    if not path.is_file():
        raise ModelError(f"{path.parent} has no {path.name}: it is not a model folder in Hugging Face format")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ModelError(f"{path} cannot be read: its values are nested too deeply") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _check_numbers(raw: Mapping[str, Any]) -> None:
    for name, largest in _LARGEST.items():
        value = raw.get(name)
        if value is None:  # default, or a field that the family does not use
            continue
        least = 0 if name in _MAY_BE_ZERO else 1
        if not (is_number(value) and least <= value <= largest and value == int(value)):
            raise ModelError(f"{name} in config.json must be an integer in [{least}, {largest}], got {value!r:.80}")
    for name in _EPSILONS:
        value = raw.get(name)
        if value is not None and not (is_number(value) and _LEAST_EPSILON <= value <= _LARGEST_EPSILON):
            raise ModelError(
                f"{name} in config.json must be a number in [{_LEAST_EPSILON:g}, {_LARGEST_EPSILON:g}], "
                f"got {value!r:.80}"
            )


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or [_MODEL_TYPES.get(str(raw.get("model_type")), raw.get("model_type"))]
    if not isinstance(names, list):
        raise ModelError(f"architectures in config.json must be a list of names, got {names!r:.80}")
    for name in names:
        if isinstance(name, str) and name in _ARCHITECTURES:
            return name
    supported = ", ".join(_ARCHITECTURES)
    raise ModelError(f"architecture {', '.join(map(str, names))} is not supported; supported are {supported}")


def _common_fields(raw: Mapping[str, Any], num_layers: int, extra_eos: Any) -> dict[str, Any]:
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if raw.get("quantization_config"):
        raise ModelError("quantized weights are not supported; supported are " + ", ".join(DTYPES))
    eos = dict.fromkeys([*_token_ids(raw.get("eos_token_id")), *_token_ids(extra_eos)])
    return {
        "eos_token_ids": tuple(eos),
        "bos_token_id": raw.get("bos_token_id"),
        "pad_token_id": raw.get("pad_token_id"),
        "dtype_name": dtype if dtype in DTYPES else "float32",
        "windows": (0,) * num_layers,
        "embed_dim": int(raw["hidden_size"]),
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": int(raw["hidden_size"]),
        "num_heads": int(raw["num_attention_heads"]),
    }


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list | tuple) else (int(value),)


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _llama_fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    heads = int(raw["num_attention_heads"])
    layers = int(raw["num_hidden_layers"])
    # Missing fields take the architecture's default.
    kv_default = {"MistralForCausalLM": 8, "Qwen2ForCausalLM": 32, "Qwen3ForCausalLM": 32}.get(architecture)
    head_dim = raw.get("head_dim", 128 if architecture == "Qwen3ForCausalLM" else None)
    head_dim = int(head_dim or raw["hidden_size"] // heads)
    max_positions = int(raw["max_position_embeddings"])
    bias = bool(raw.get("attention_bias", False))
    if _activation(raw.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"activation {raw['hidden_act']!r} is not supported in gated layers, only silu is")
    return {
        "num_layers": layers,
        "num_kv_heads": int(raw.get("num_key_value_heads", kv_default) or heads),
        "head_dim": head_dim,
        "intermediate_size": int(raw["intermediate_size"]),
        "max_positions": max_positions,
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "tie_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "activation": "silu",
        "rope": _rope(raw, head_dim, max_positions, 1.0),
        "windows": _windows(raw, architecture, layers),
        "attention_bias": bias or architecture == "Qwen2ForCausalLM",
        "output_bias": bias and architecture != "Qwen2ForCausalLM",
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "qk_norm": architecture == "Qwen3ForCausalLM",
    }


def _windows(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Return each layer's attention window: all layers of Mistral, and the layers that config.json names for Qwen."""
    if architecture == "MistralForCausalLM":
        return (int(raw.get("sliding_window", 4096) or 0),) * layers
    window = int(raw.get("sliding_window", 4096) or 0) if raw.get("use_sliding_window") else 0
    if not architecture.startswith("Qwen") or not window:
        return (0,) * layers
    first = int(raw.get("max_window_layers", 28))
    kinds = raw.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])


def _opt_fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    before = bool(raw.get("do_layer_norm_before", True))
    bias = bool(raw.get("enable_bias", True))
    return {
        "num_layers": int(raw["num_hidden_layers"]),
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "intermediate_size": int(raw["ffn_dim"]),
        "max_positions": int(raw["max_position_embeddings"]),
        "norm_eps": 1e-5,
        "tie_embeddings": bool(raw.get("tie_word_embeddings", True)),
        "activation": _activation(raw.get("activation_function", "relu")),
        "rope": None,
        "embed_dim": int(raw.get("word_embed_proj_dim") or hidden),
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "norm_before": before,
        "final_norm": before and not raw.get("_remove_final_layer_norm", False),
        "norm_affine": bool(raw.get("layer_norm_elementwise_affine", True)),
    }


def _gpt_neox_fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    max_positions = int(raw["max_position_embeddings"])
    bias = bool(raw.get("attention_bias", True))
    return {
        "num_layers": int(raw["num_hidden_layers"]),
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "intermediate_size": int(raw["intermediate_size"]),
        "max_positions": max_positions,
        "norm_eps": float(raw.get("layer_norm_eps", 1e-5)),
        "tie_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "activation": _activation(raw.get("hidden_act", "gelu")),
        "rope": _rope(raw, hidden // heads, max_positions, 0.25),
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": True,
        "parallel_residual": bool(raw.get("use_parallel_residual", True)),
    }


def _starcoder2_fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    heads, hidden, layers = (int(raw[name]) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    max_positions = int(raw["max_position_embeddings"])
    bias = bool(raw.get("use_bias", True))
    return {
        "num_layers": layers,
        "num_kv_heads": int(raw.get("num_key_value_heads", 2)),
        "head_dim": hidden // heads,
        "intermediate_size": int(raw["intermediate_size"]),
        "max_positions": max_positions,
        "norm_eps": float(raw.get("norm_epsilon", 1e-5)),
        "tie_embeddings": bool(raw.get("tie_word_embeddings", True)),
        "activation": _activation(raw.get("hidden_act", "gelu_pytorch_tanh")),
        "rope": _rope(raw, hidden // heads, max_positions, 1.0),
        "windows": (int(raw.get("sliding_window") or 0),) * layers,
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
    }


def _rope(raw: Mapping[str, Any], head_dim: int, max_positions: int, default_share: float) -> RopeSettings:
    try:
        return parse_rope(raw, head_dim, max_positions, default_share)
    except ValueError as error:
        raise ModelError(str(error)) from error


_FAMILY_FIELDS = {
    "llama": _llama_fields,
    "opt": _opt_fields,
    "gpt_neox": _gpt_neox_fields,
    "starcoder2": _starcoder2_fields,
}
