from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from skipjoin.model.errors import AdapterError, ModelError
from skipjoin.model.safetensors_weights import STORED, SafetensorsFiles
from skipjoin.model.settings_files import read_settings
from skipjoin.model.weight_files import check_inside

_CONFIG, _WEIGHTS, _PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# More would only be slow: adapters have a few dozen, and PEFT's default is 8.
MAX_RANK = 512
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_OUTSIDE_LAYERS = re.compile(r"(^|\.)(embed\w*|wte|wpe|lm_head|output|score)(\.|$)|lora_embedding|modules_to_save")
# Settings that change more than the products of an adapter's layers, unless they are empty.
_UNSUPPORTED = (
    *("modules_to_save", "use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "alora_invocation_tokens"),
    *("trainable_token_indices", "target_parameters", "layer_replication", "velora_config", "arrow_config"),
)
# How adapters may be initialized. Other ways change the weights of the model, too.
_INITIAL = (None, True, False, "gaussian", "eva", "orthogonal")


class Pair(NamedTuple):
    """`scale` * B @ A, which is added to a weight [out, in]."""

    down: str
    up: str
    inputs: int
    outputs: int
    rank: int
    scale: float


class AdapterFile:
    """Adapter in a folder. Raises `AdapterError` if it cannot be read or is not supported."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        try:
            self._check_files()
            self._settings = read_settings(self._folder, _CONFIG)
            self._check_settings()
            self._tensors = SafetensorsFiles(self._folder, (_WEIGHTS,))
            self.pairs = self._read_pairs()
        except AdapterError:
            raise
        except ModelError as error:
            raise AdapterError(str(error)) from error

    def read(self, name: str) -> torch.Tensor:
        try:
            return self._tensors.read(name, None).float()
        except ModelError as error:
            raise AdapterError(str(error)) from error

    def error(self, what: str) -> AdapterError:
        return AdapterError(f"{self._folder} {what}")

    def _check_files(self) -> None:
        if not self._folder.is_dir():
            raise self.error("is not a folder: an adapter is one, with the files that PEFT writes")
        for name in (_CONFIG, _WEIGHTS):
            if not (self._folder / name).is_file():
                pickled = f"; {_PICKLED} is pickled: save it as safetensors" if self._has_pickle else ""
                raise self.error(f"has no {name}, so it is no adapter of PEFT{pickled}")
            check_inside(self._folder, name)

    @property
    def _has_pickle(self) -> bool:
        return (self._folder / _PICKLED).is_file()

    def _check_settings(self) -> None:
        of = self._settings
        for name, only in (("peft_type", ("LORA",)), ("bias", ("none",)), ("init_lora_weights", _INITIAL)):
            value = of.get(name, only[0])
            if not any(value is choice or (isinstance(value, str) and value == choice) for choice in only):
                allowed = " or ".join(str(choice) for choice in only if choice is not None)
                raise self.error(f"has {name} {value!r:.80} in {_CONFIG}, and only {allowed} is supported")
        for name in _UNSUPPORTED:
            if value := of.get(name):
                raise self.error(f"has {name} {value!r:.80} in {_CONFIG}, which is not supported")
        for name in ("r", "lora_alpha"):
            if isinstance(value := of.get(name), bool) or not isinstance(value, int | float) or not 0 < value < 1 << 31:
                raise self.error(f"must have a positive {name} in {_CONFIG}, got {value!r:.80}")
        for name in ("rank_pattern", "alpha_pattern"):
            found = of.get(name) or {}
            if not (isinstance(found, dict) and all(isinstance(number, int | float) for number in found.values())):
                raise self.error(f"must have a number for each name in {name} of {_CONFIG}, got {found!r:.80}")

    def _read_pairs(self) -> Mapping[str, Pair]:
        names: dict[str, dict[str, str]] = {}
        for tensor in self._tensors.where:
            found = _TENSOR.fullmatch(tensor)
            if _OUTSIDE_LAYERS.search(tensor):
                raise self.error(f"has tensor {tensor}: adapters of embeddings and of the output are not supported")
            if found is None:
                raise self.error(f"has tensor {tensor}: only lora_A.weight and lora_B.weight are supported")
            names.setdefault(found[1], {})[found[2]] = tensor
        if not names:
            raise self.error(f"has no tensor in {_WEIGHTS}")
        return {module: self._pair(module, names[module]) for module in sorted(names)}

    def _pair(self, module: str, names: Mapping[str, str]) -> Pair:
        if len(names) < 2:
            raise self.error(f"has only one of lora_A and lora_B of {module}")
        down, up = (self._shape(names[part]) for part in "AB")
        rank, alpha = self._of("rank_pattern", module, "r"), self._of("alpha_pattern", module, "lora_alpha")
        if down[0] != rank or up[1] != rank:
            raise self.error(
                f"has lora_A of shape {down} and lora_B of shape {up} for {module}, but {_CONFIG} implies rank {rank:g}"
            )
        if rank > MAX_RANK:
            raise self.error(f"has rank {rank:g} for {module}, which must be at most {MAX_RANK}")
        scale = alpha / (math.sqrt(rank) if self._settings.get("use_rslora") else rank)
        return Pair(names["A"], names["B"], down[1], up[0], int(rank), scale)

    def _shape(self, name: str) -> tuple[int, int]:
        tensor = self._tensors.opened(name)
        if tensor.get_dtype() not in STORED:
            raise self.error(f"has type {tensor.get_dtype()} for {name}; supported are {', '.join(STORED)}")
        shape: list[int] = tensor.get_shape()
        if len(shape) != 2 or 0 in shape:
            raise self.error(f"has shape {tuple(shape)} for {name}, which must be a matrix")
        return shape[0], shape[1]

    def _of(self, patterns: str, module: str, default: str) -> float:
        value: Any = self._settings[default]
        for pattern, own in (self._settings.get(patterns) or {}).items():
            try:
                if re.match(rf"(.*\.)?({pattern})$", module):
                    return float(own)
            except re.error as error:
                raise self.error(
                    f"has {pattern!r:.80} in {patterns} of {_CONFIG}, no regular expression: {error}"
                ) from None
        return float(value)
