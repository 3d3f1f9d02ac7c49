"""Decides what a model is served for, and how its hidden states become vectors.

Models of sentence-transformers list their parts in modules.json, and GGUF files may name a pooling. Otherwise, an
encoder uses the mean, and a decoder the last token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from skipjoin.model.config import DenseSettings, ModelConfig, PoolingSettings, part_settings
from skipjoin.model.config_fields import check_sizes
from skipjoin.model.errors import ModelError
from skipjoin.model.family import CLASSIFIER, is_bare
from skipjoin.model.gguf.file import is_gguf
from skipjoin.model.settings_files import read_json, read_settings
from skipjoin.model.weight_files import SINGLE, ModelFiles, check_inside
from skipjoin.pooling import Task

# Older names, which are true or false each, and `pooling_mode`.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_NAMES = {"cls": "cls", "mean": "mean", "last": "last", "lasttoken": "last"}
# Parts in their order; there may be several of the third.
_SUPPORTED = ("Transformer", "Pooling", "Dense", "Normalize")
_DENSE_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
_LARGEST_WIDTH = 1 << 20
_ACTIVATIONS = {"Sigmoid": True, "Identity": False}


def pooling_of(files: ModelFiles, config: ModelConfig, task: str) -> PoolingSettings | None:
    """Return how a model makes vectors, or None if it generates.

    Raises:
        ModelError: If it cannot do the task, or its files ask for what is not supported.
    """
    names = part_settings(files.config, "thinker_config").get("architectures") or ()
    name = next((name for name in names if isinstance(name, str)), config.architecture)
    modules, stored = _modules(files), files.config.get("pooling_mode") if is_gguf(files.folder) else None
    chosen = _choose(name, config, has_modules=bool(modules or stored)) if task == "auto" else Task(task)
    is_causal = not (files.config.get("is_causal") is False or files.config.get("use_bidirectional_attention"))
    if chosen is not Task.GENERATE and not (config.is_encoder or is_causal):
        raise ModelError(
            f"tokens of this {name} attend to later ones (is_causal or use_bidirectional_attention in config.json), "
            "which is supported for encoders only"
        )
    if chosen is Task.EMBED:
        if stored is not None:
            return PoolingSettings(task=Task.EMBED, how=_mode(files.config, str(files.folder)), normalize=True)
        return _embedding(files, config, modules)
    if chosen is Task.SCORE:
        return _score(files, config, name)
    if config.is_encoder:
        raise ModelError(f"task generate needs a decoder, and {name} is an encoder: leave task auto, or set embed")
    return None


def _choose(name: str, config: ModelConfig, *, has_modules: bool) -> Task:
    if name.endswith(CLASSIFIER):
        return Task.SCORE
    return Task.EMBED if config.is_encoder or has_modules or is_bare(name) else Task.GENERATE


def _modules(files: ModelFiles) -> list[tuple[str, str]]:
    file = files.folder / "modules.json"
    if is_gguf(files.folder) or not file.is_file():
        return []
    try:
        parts = json.loads(file.read_text(encoding="utf-8"))
        found = [(part["type"].rpartition(".")[2], str(part.get("path", ""))) for part in parts]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} must list parts with a type and a path: {error}") from error
    if other := {kind for kind, _ in found} - set(_SUPPORTED):
        raise ModelError(f"{file} has a part {sorted(other)[0]}; supported are {', '.join(_SUPPORTED)}")
    order = [_SUPPORTED.index(kind) for kind, _ in found]
    if order != sorted(order) or len(set(order) - {2}) + order.count(2) != len(order):
        raise ModelError(f"{file} must have its parts in the order {', '.join(_SUPPORTED)}, with any number of Dense")
    return found


def _embedding(files: ModelFiles, config: ModelConfig, modules: Sequence[tuple[str, str]]) -> PoolingSettings:
    if not modules:
        return PoolingSettings(task=Task.EMBED, how="mean" if config.is_encoder else "last", normalize=True)
    dense: list[DenseSettings] = []
    how, width = "mean", config.hidden_size
    for kind, path in modules:
        folder = (files.folder / path).resolve()
        if not folder.is_relative_to(files.folder.resolve()):
            raise ModelError(f"modules.json in {files.folder} must name folders inside, got {path!r}")
        if kind == "Pooling":
            how = _mode(read_json(folder / "config.json"), str(folder / "config.json"))
        if kind == "Dense":
            dense.append(_dense(folder, width))
            width = dense[-1].outputs
    length = read_settings(files.folder, "sentence_bert_config.json", default={}).get("max_seq_length")
    return PoolingSettings(
        task=Task.EMBED,
        how=how,
        normalize="Normalize" in dict(modules),
        max_tokens=length if isinstance(length, int) and length > 0 else None,
        # Random weights have random vectors of the model's width.
        dense=tuple(dense) if files.has_weights else (),
    )


def _dense(folder: Path, inputs: int) -> DenseSettings:
    raw, file = read_json(folder / "config.json"), folder / SINGLE
    check_sizes(raw, {"in_features": _LARGEST_WIDTH, "out_features": _LARGEST_WIDTH})
    activation = str(raw.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _DENSE_ACTIVATIONS or raw.get("in_features") != inputs or "out_features" not in raw:
        raise ModelError(
            f"{folder / 'config.json'} must have in_features {inputs}, out_features and an activation_function of "
            f"{', '.join(_DENSE_ACTIVATIONS)}; got {raw.get('in_features')!r:.20}, {raw.get('out_features')!r:.20} and "
            f"{activation:.80}"
        )
    if not file.is_file():
        raise ModelError(f"{folder} has no {SINGLE}: load and save it once with sentence-transformers, which writes it")
    check_inside(folder, SINGLE)
    return DenseSettings(
        file=str(file),
        inputs=inputs,
        outputs=int(raw["out_features"]),
        has_bias=bool(raw.get("bias", True)),
        activation=activation,
    )


def _mode(raw: Mapping[str, Any], where: str) -> str:
    asked = raw.get("pooling_mode")
    names = [asked] if isinstance(asked, str) else [mode for field, mode in _MODES.items() if raw.get(field)]
    if len(names) == 1 and names[0] in _NAMES:
        return _NAMES[names[0]]
    raise ModelError(f"{where} must have one pooling mode of {', '.join(_NAMES)}, got {', '.join(names) or 'none'}")


def _answers(files: ModelFiles, config: ModelConfig) -> tuple[int, ...]:
    file = files.folder / "tokenizer.json"
    if config.logit_cap or not file.is_file():
        raise ModelError("task score needs tokenizer.json, and a decoder without soft caps of logits")
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for damaged files
        raise ModelError(f"{file} cannot be read: {error}") from error
    found = [token for word in ("yes", "no") if (token := backend.token_to_id(word)) is not None]
    if len(found) < 2:
        raise ModelError(f"task score needs a decoder with the tokens yes and no, and {file} lacks one")
    return tuple(found)


def _score(files: ModelFiles, config: ModelConfig, name: str) -> PoolingSettings:
    raw = files.config
    if config.is_encoder and config.family in ("llama", "gemma"):
        raise ModelError(f"task score needs a decoder or an encoder, and tokens of this {name} attend to later ones")
    if not (config.is_encoder or name.endswith(CLASSIFIER)):
        return PoolingSettings(task=Task.SCORE, how="last", answers=_answers(files, config), squashes=True)
    if not name.endswith(CLASSIFIER):
        raise ModelError(
            f"task score needs a model with a head for scores (...{CLASSIFIER}), and {name} has none; "
            "with task embed, /score and /rerank compare embeddings"
        )
    labels = raw.get("id2label")
    count = len(labels) if isinstance(labels, Mapping) else raw.get("num_labels", 2)
    if count != 1:
        raise ModelError(f"{name} must have 1 label (id2label in config.json) to score pairs, got {count}")
    if not config.is_encoder:
        return PoolingSettings(task=Task.SCORE, how="last", head="decoder", squashes=_squashes(raw))
    is_modern = config.family == "modernbert"
    how = raw.get("classifier_pooling", "cls") if is_modern else "cls"
    activation = raw.get("classifier_activation", "gelu") if is_modern else "gelu"
    if how not in ("cls", "mean") or activation != "gelu":
        raise ModelError(
            f"classifier_pooling of {name} must be cls or mean, and classifier_activation gelu, got {how!r:.80} and "
            f"{activation!r:.80}"
        )
    has_bias = bool(raw.get("classifier_bias", False)) if is_modern else True
    return PoolingSettings(task=Task.SCORE, how=how, head=config.family, head_bias=has_bias, squashes=_squashes(raw))


def _squashes(raw: Mapping[str, Any]) -> bool:
    nested = raw.get("sentence_transformers")
    named = nested.get("activation_fn") if isinstance(nested, Mapping) else None
    named = named or raw.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(named).rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise ModelError(f"the activation of scores must be one of {', '.join(_ACTIVATIONS)}, got {named!r:.80}")
    return _ACTIVATIONS[kind]
