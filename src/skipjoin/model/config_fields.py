from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from skipjoin.model.errors import ModelError
from skipjoin.model.rope import MAX_POSITIONS, RopeSettings, is_number, parse_rope

_ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
DTYPES = ("float32", "bfloat16", "float16")
# Other names that config.json may have, and the type that is used.
_OTHER_DTYPES = {"float": "float32", "half": "float16", "float64": "float32", "double": "float32"}
MAX_EXPERTS = 1 << 12
# Upper bounds of integers in config.json, far above those of any model. A larger one means a damaged file, and would
# exhaust the machine's memory before it is detected. All must be at least 1, except `_MAY_BE_ZERO`.
LARGEST = {
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
    "max_position_embeddings": MAX_POSITIONS,
    "sliding_window": 1 << 30,
    "num_experts": MAX_EXPERTS,
    "num_local_experts": MAX_EXPERTS,
    "num_experts_per_tok": MAX_EXPERTS,
    "moe_intermediate_size": 1 << 24,
}
_MAY_BE_ZERO = (
    *("max_window_layers", "sliding_window", "word_embed_proj_dim", "num_experts", "num_local_experts", "head_dim"),
    *("num_experts_per_tok", "type_vocab_size", "shared_intermediate_size"),
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input", "num_kv_shared_layers"),
    *("num_dense_layers", "q_lora_rank"),
)
# Of each layer, in decoders that transformers' code runs.
_MAY_BE_LISTED = ("intermediate_size", "moe_intermediate_size", "moe_topk")
# Bounds of the epsilon that is added to a variance: a smaller one is 0 in float32, and a larger one drowns the
# variance.
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
_MIN_EPSILON, _LARGEST_EPSILON = 1e-30, 1.0
# Fields of `ModelConfig` and their names in config.json, unless a family reads them by other names.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
}


def check_sizes(raw: Mapping[str, Any], bounds: Mapping[str, int]) -> None:
    for name, largest in bounds.items():
        value = raw.get(name)
        if value is None:  # default, or a field that the family does not use
            continue
        least = 0 if name in _MAY_BE_ZERO else 1
        values = value if name in _MAY_BE_LISTED and isinstance(value, list) and value else [value]
        if not all(is_number(number) and least <= number <= largest and number == int(number) for number in values):
            raise ModelError(f"{name} in config.json must be an integer in [{least}, {largest}], got {value!r:.80}")


def check_numbers(raw: Mapping[str, Any]) -> None:
    # Doge without experts has a number of them that is not used.
    has_experts = raw.get("is_moe") is not False
    check_sizes(raw, {name: most for name, most in LARGEST.items() if has_experts or name != "num_experts"})
    for name in _EPSILONS:
        value = raw.get(name)
        if value is not None and not (is_number(value) and _MIN_EPSILON <= value <= _LARGEST_EPSILON):
            raise ModelError(
                f"{name} in config.json must be a number in [{_MIN_EPSILON:g}, {_LARGEST_EPSILON:g}], got {value!r:.80}"
            )


def layer_kinds(raw: Mapping[str, Any], layers: int, default: Callable[[int], bool]) -> tuple[bool, ...]:
    """Return whether each layer attends to a window; `default` is for a file without `layer_types`."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return tuple(map(default, range(layers)))
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ModelError(f"layer_types in config.json must be {layers} of {', '.join(known)}, got {kinds!r:.80}")
    return tuple(kind == "sliding_attention" for kind in kinds)


def every(interval: Any) -> Callable[[int], bool]:
    """Return a function that is false for every `interval`-th layer."""
    size = int(interval or 0)
    return lambda index: bool(size) and (index + 1) % size != 0


def dtype_name(raw: Mapping[str, Any]) -> str | None:
    for field in ("dtype", "torch_dtype"):
        value = raw.get(field)
        if value in (None, "", "auto"):
            continue
        name = value.removeprefix("torch.") if isinstance(value, str) else ""
        name = _OTHER_DTYPES.get(name, name)
        if name not in DTYPES:
            raise ModelError(
                f"{field} in config.json must be one of {', '.join(DTYPES)}, got {value!r:.80}; "
                "without it, the weight files decide"
            )
        return name
    return None


def token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list | tuple) else (int(value),)


def factor(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name, default)
    if not (is_number(value) and value > 0):
        raise ModelError(f"{name} in config.json must be a finite number above 0, got {value!r:.80}")
    return float(value)


def cap(raw: Mapping[str, Any], name: str) -> float:
    return 0.0 if raw.get(name) is None else factor(raw, name, 0.0)


def activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def rope_of_kind(raw: Mapping[str, Any], kind: str, theta: str, default: float) -> dict[str, Any]:
    """Return `raw` with rotary settings of layers of one kind, nested or, in older files, with the base `theta`."""
    found = {name: value for name, value in raw.items() if name not in ("rope_parameters", "rope_scaling")}
    nested = raw.get("rope_parameters") or {}
    if isinstance(nested, Mapping):
        has_kinds = any(isinstance(setting, Mapping) for setting in nested.values())
        nested = nested.get(kind) or {} if has_kinds or kind != "full_attention" else nested
    found["rope_parameters"] = nested
    if kind == "full_attention" and raw.get("rope_scaling") is not None:
        found["rope_scaling"] = raw["rope_scaling"]
    return {**found, "rope_theta": raw.get(theta) or default}


def rope(raw: Mapping[str, Any], head_dim: int, max_positions: int, default_share: float) -> RopeSettings:
    try:
        return parse_rope(raw, head_dim, max_positions, default_share)
    except ValueError as error:
        raise ModelError(str(error)) from error
