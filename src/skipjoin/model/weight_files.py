from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from skipjoin.model.config import ModelConfig
from skipjoin.model.errors import ModelError
from skipjoin.model.gguf.file import is_gguf
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.settings_files import read_json, read_settings

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
# The only file with weights where a repository has it. Others beside it, such as consolidated.safetensors, are copies
# for other programs.
SINGLE = "model.safetensors"
# Names of settings of quantized weights in older files of compressed-tensors, in those of MLX, and of the file of
# NVIDIA's ModelOpt.
_OLDER_QUANTIZATION, _OF_MLX, _MODELOPT = "compression_config", "quantization", "hf_quant_config.json"
# Layouts of AutoRound by their names there, in terms of those that it took from others.
_GPTQ, _AWQ = {"quant_method": "gptq"}, {"quant_method": "awq"}
_GPTQ_2 = {**_GPTQ, "checkpoint_format": "gptq_v2"}
_AUTO_ROUND: Mapping[object, Mapping[str, str]] = {
    "auto": _GPTQ,
    "auto_round:gptq": _GPTQ,
    "auto_round:auto_gptq": _GPTQ,
    "auto_round": _GPTQ_2,
    "auto_round:gptqmodel": _GPTQ_2,
    "auto_round:awq": _AWQ,
    "auto_round:auto_awq": _AWQ,
}
# Maximum length of a file name in most file systems, which raise an error beyond it.
_MAX_NAME = 255


# Called with (tensors loaded, tensors in the folder); a pipeline stage does not need all of them.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model folder or GGUF file before its weights are read, which may be on the hub or not needed."""

    folder: Path
    config: Mapping[str, Any]
    has_weights: bool = True

    @classmethod
    def of(cls, folder: Path, *, has_weights: bool = True) -> ModelFiles:
        return cls(folder, read_settings(folder, "config.json"), has_weights)

    @property
    def quantization(self) -> Any:
        """Settings of quantized weights, of the whole model, the served part, or another file."""
        if (found := quantization_of(self.config)) is not None:
            return found
        if not (self.has_weights and (self.folder / _MODELOPT).is_file()):
            return None
        settings = read_json(self.folder / _MODELOPT).get("quantization")
        return {**(settings if isinstance(settings, Mapping) else {}), "quant_method": "modelopt"}

    def names(self, *patterns: str) -> list[str]:
        return sorted(file.name for pattern in patterns for file in self.folder.glob(pattern) if file.is_file())

    def may_have(self, *patterns: str) -> bool:
        return not self.has_weights or bool(self.names(*patterns))


class Source(NamedTuple):
    files: ModelFiles
    spec: LoadSpec
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    progress: Progress | None = None
    seed: int = 0
    reads_codes: bool = False


def quantization_of(config: Mapping[str, Any]) -> Any:
    """Return the settings of quantized weights in config.json, or None. Those of MLX name no method there."""
    text = config.get("text_config")
    for settings in (config, text if isinstance(text, Mapping) else {}):
        found = settings.get("quantization_config") or settings.get(_OLDER_QUANTIZATION) or settings.get(_OF_MLX)
        if isinstance(found, Mapping) and "quant_method" not in found and isinstance(settings.get(_OF_MLX), Mapping):
            return {**found, "quant_method": "mlx"}
        if isinstance(found, Mapping) and (layout := _AUTO_ROUND.get(_packing(found))) is not None:
            return {**found, **layout}
        if found:
            return found
    return None


def _packing(settings: Mapping[str, Any]) -> object:
    is_auto_round = settings.get("quant_method") in ("auto-round", "intel/auto-round")
    return settings.get("packing_format", "auto") if is_auto_round else None


def indexed_files(index: Path) -> list[str]:
    return sorted({*_read_weight_map(index).values()})


def read_weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_weight_map(index)
    folder = index.parent
    names = sorted({*weight_map.values()})
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(f"{folder} lacks {', '.join(missing)}, named in its index")
    for name in names:
        check_inside(folder, name)
    return weight_map


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map: Any = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"weight_map in {index} must give the name of a file for each tensor")
    for name in {*weight_map.values()}:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name or len(name) > _MAX_NAME:
            raise ModelError(f"weight_map in {index} must name files inside its folder, got {name!r}")
    return weight_map


def check_inside(folder: Path, name: str) -> None:
    """Raise `ModelError` if a file links to one outside the folder, except to the hub's cache of blobs."""
    target = (folder / name).resolve()
    blobs = target.parent
    is_blob = blobs.name == "blobs" and blobs.parent.name.startswith("models--")
    if not is_blob and not target.is_relative_to(folder.resolve()):
        raise ModelError(
            f"{folder / name} must not be a link to a file outside its folder, which is {target}: copy that file, or "
            "make a hard link"
        )


def safetensors_files(folder: Path) -> list[Path]:
    single = folder / SINGLE
    files = [single] if single.is_file() else sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    for file in files:
        check_inside(folder, file.name)
    return files


def check_tokenizer_files(folder: Path) -> None:
    if is_gguf(folder):
        return  # its header is checked as a whole
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        raise ModelError(
            f"{folder} has no tokenizer files (tokenizer.json, vocab.json with merges.txt, or tokenizer.model)"
        )
