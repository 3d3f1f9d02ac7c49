from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from skipjoin.model.errors import ModelError
from skipjoin.model.folder import BIN_INDEX, bin_files
from skipjoin.model.weight_files import INDEX

# Called with (files done, total files).
Progress = Callable[[int, int], None]

_COPIED = ("*.json", "*.txt", "*.model", "*.jinja")


def convert_folder(source: str | Path, target: str | Path, progress: Progress | None = None) -> Path:
    source, target = Path(source), Path(target)
    files = bin_files(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} exists and is not an empty folder; choose another target")
    target.mkdir(parents=True, exist_ok=True)
    written: dict[str, str] = {}
    total = 0
    for number, file in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = _unshared(_read_bin(file), written)
        save_file(tensors, target / name, metadata={"format": "pt"})
        written |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        if progress is not None:
            progress(number, len(files))
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": written}
        (target / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.name != BIN_INDEX:
                shutil.copyfile(file, target / file.name)
    return target


def _read_bin(file: Path) -> dict[str, torch.Tensor]:
    try:
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_zip(file))
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        raise ModelError(f"{file} holds something other than plain tensors, or is damaged: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise ModelError(f"{file} is not a table of named tensors")
    return loaded


def _is_zip(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(4) == b"PK\x03\x04"


def _unshared(tensors: dict[str, torch.Tensor], known: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return contiguous tensors that share no memory; a tied one under each name, as a missing name means damage."""
    result: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if name in known:
            continue
        storage = tensor.untyped_storage().data_ptr()
        shares = storage in seen
        seen.add(storage)
        result[name] = tensor.clone() if shares or not tensor.is_contiguous() else tensor.contiguous()
    return result
