from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import transformers
from transformers.models.auto import modeling_auto as auto

from skipjoin.model.config import StateSettings
from skipjoin.model.config_fields import LARGEST, check_sizes
from skipjoin.model.errors import ModelError
from skipjoin.model.fallback.trace import Traced, trace, without
from skipjoin.model.family import same_name
from skipjoin.model.weight_files import quantization_of

# Entries of config.json that are not the model's: they choose code and kernels, or types that `dtype` chooses.
_NOT_READ = ("auto_map", "attn_implementation", "experts_implementation", "dtype", "torch_dtype")
# Upper bound of integers in config.json whose names begin so, since each unit may be a module.
_COUNTS = ("num_", "n_")
_LARGEST_COUNT = 1 << 20
# Kinds of rotary frequencies that depend on the length of a request, with the field that has the length from which
# they change.
_CHANGING = {"longrope": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}


# Positions of the training of models without a field for it. Linear biases and states have no bound.
_UNBOUNDED = {"bloom": 2048, "mamba": 2048, "mamba2": 2048, "falcon_mamba": 8192, "recurrent_gemma": 8192}
# Heads, key-value heads and length of a head in the KV of models without attention, whose blocks only count tokens.
_NO_ATTENTION = (1, 1, 64)
# Language models of those with another name.
_TEXT_OF = {"FuyuForCausalLM": "PersimmonForCausalLM"}
# Classes that are no decoder of texts of their own.
_NEEDS = {
    "Gemma4AssistantForCausalLM": "it drafts for another model, whose KV it reads",
    "Gemma4UnifiedAssistantForCausalLM": "it drafts for another model, whose KV it reads",
    "BltForCausalLM": "its layers work on patches of bytes, whose lengths depend on the text",
    "ReformerModelWithLMHead": "its attention cannot be replaced",
    "WhisperForCausalLM": "it needs an encoder",
}


class Settings(NamedTuple):
    kind: type[Any]
    config: Any
    traced: Traced


def version() -> str:
    return transformers.__version__


def find(names: list[Any], model_type: str | None) -> str | None:
    """Return the first of the architectures that transformers has as a causal decoder, or None.

    If the model also sees or hears, this is its language model's.
    """
    known = _known()
    # Others that also see or hear have a language model of another architecture, which their `text_config` names.
    texts = [str(name).replace("ForConditionalGeneration", "ForCausalLM") for name in names]
    texts = [_TEXT_OF.get(name, name) for name in texts]
    found = next((name for name in texts if name in known.values()), None)
    found = found or next((same for name in texts if (same := same_name(name, known.values())) is not None), None)
    return found if names else known.get(model_type or "")


def decoders() -> list[str]:
    return [*_known().values()]


def wholes() -> dict[str, str]:
    tables = (
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    )
    own = _known().values()
    return {kind: name for table in tables for kind, name in table.items() if name not in own}


def _known() -> dict[str, str]:
    # One is listed with models that see only.
    found = [*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items(), ("mistral4", "Mistral4ForCausalLM")]
    return {kind: name if isinstance(name, str) else name[0] for kind, name in found}


def fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    if quantization_of(raw):
        raise ModelError(
            f"quantized weights are not supported for {architecture}, which has no family of Skipjoin's own: give the "
            "model that it was made from; --quantization int8 stores that in 8 bits"
        )
    # The type may be that of a part of another model.
    read = {name: value for name, value in _read(raw).items() if name != "model_type"}
    source = json.dumps({**read, "architectures": [architecture]}, sort_keys=True)
    settings = settings_of(source)
    config, traced = settings.config.get_text_config(), settings.traced
    calls = [call for _, call in traced.attentions]
    shapes = [(call.heads, call.kv_heads, max(call.dim, call.value_dim)) for call in calls] or [_NO_ATTENTION]
    heads, kv_heads, dim = (max(counts) for counts in zip(*shapes, strict=True))
    layers = len(calls) + len(traced.mixers)
    if any(kv_heads % call.kv_heads for call in calls):
        raise ModelError(f"layers of {architecture} have numbers of key-value heads that do not divide each other")
    return {
        "num_layers": layers,
        "hidden_size": int(config.hidden_size),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "intermediate_size": _intermediate_size(config),
        "vocab_size": int(config.vocab_size),
        "max_positions": _max_positions(config, architecture),
        "norm_eps": 0.0,
        "tie_embeddings": False,
        "activation": "",
        "rope": None,
        "windows": tuple(call.window for call in calls) + (0,) * len(traced.mixers),
        "states": StateSettings(layers=tuple(range(len(calls), layers)), **traced.state._asdict())
        if traced.mixers
        else None,
        "chunks": tuple({call.chunk for call in calls} - {0}),
        "has_position_keys": any(call.has_slopes for call in calls),
        "source": source,
    }


def _read(raw: Mapping[str, Any]) -> dict[str, Any]:
    # Numbers such as infinities are objects with the name __float__.
    named = {name: raw[name] for name in raw if name not in _NOT_READ and (name[:1] != "_" or name[:2] == "__")}
    return {name: _read(value) if isinstance(value, Mapping) else value for name, value in named.items()}


@lru_cache(maxsize=4)
def settings_of(source: str) -> Settings:
    """Return the settings in `ModelConfig.source`, which the caller must copy before it changes them."""
    raw = json.loads(source)
    (architecture,) = raw["architectures"]
    try:
        if (why := _NEEDS.get(architecture)) is not None:
            raise ModelError(why)
        kind = getattr(transformers, architecture)
        usual = kind.config_class.attribute_map.items()
        check_sizes(raw, {theirs: LARGEST[name] for name, theirs in usual if name in LARGEST})
        _check_counts(raw)
        config = kind.config_class.from_dict(_floats_in(_with_rope_of_attention(raw)))
        if config.model_type == "rwkv":
            # transformers would divide weights in place for the range of float16. Norms undo that, their epsilon aside.
            config.rescale_every = 0
        if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
            raise ModelError("it needs an encoder")
        traced = trace(kind, copy.deepcopy(config))
        return Settings(without(kind, traced.unused), config, traced)
    except Exception as error:  # transformers raises anything for a config.json that it cannot use
        raise refusal(architecture, error) from error


def _with_rope_of_attention(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the base of rotary positions in Dbrx's `attn_config`, in whose place transformers has a default."""
    theta = raw["attn_config"].get("rope_theta") if raw["architectures"] == ["DbrxForCausalLM"] else None
    given = {"rope_type": "default", **(raw.get("rope_parameters") or {}), "rope_theta": theta}
    return raw if theta is None else {**raw, "rope_parameters": given}


def refusal(architecture: str, error: Exception) -> ModelError:
    if isinstance(error, KeyError):
        why: object = f"its code finds no {error} in config.json"
    else:
        why = error if isinstance(error, ModelError) else f"its code fails with {type(error).__name__}: {error}"
    return ModelError(
        f"{architecture} has no family of Skipjoin's own, and cannot run through transformers {version()}: "
        f"{' '.join(str(why).split()):.300}"
    )


def _floats_in(value: Any) -> Any:
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _floats_in(part) for name, part in value.items()}
    return [_floats_in(part) for part in value] if isinstance(value, list) else value


def _check_counts(raw: Mapping[str, Any]) -> None:
    for name, value in raw.items():
        if name.startswith(_COUNTS) and isinstance(value, int) and value > _LARGEST_COUNT:
            raise ModelError(f"{name} in config.json must be at most {_LARGEST_COUNT}, got {value!r:.80}")
        if isinstance(value, Mapping):
            _check_counts(value)


def _intermediate_size(config: Any) -> int:
    found = getattr(config, "intermediate_size", None)
    return found if isinstance(found, int) and found > 0 else 4 * int(config.hidden_size)


def _max_positions(config: Any, architecture: str) -> int:
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    most = next((found for name in names if (found := getattr(config, name, None)) is not None), None)
    if most is None and config.model_type in _UNBOUNDED:
        most = _UNBOUNDED[config.model_type]
    if not isinstance(most, int):
        raise ModelError(f"config.json of this {architecture} has no max_position_embeddings")
    if config.model_type == "doge":  # which leaves out keys of longer texts
        most = min(most, config.keep_window_size)
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):
        if (field := _CHANGING.get(kind.get("rope_type", ""))) is not None:
            most = min(most, int(kind.get(field) or getattr(config, field, None) or most))
    return most
