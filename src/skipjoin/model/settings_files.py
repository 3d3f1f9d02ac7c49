from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skipjoin.model.errors import ModelError
from skipjoin.model.gguf.file import GgufError, is_gguf
from skipjoin.model.gguf.settings import gguf_settings


def read_settings(model: Path, name: str, *, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a JSON file of a model's folder, or its equivalent from the metadata of a GGUF file.

    Raises:
        ModelError: If it cannot be read, or is missing and there is no `default`.
    """
    if is_gguf(model):
        try:
            return gguf_settings(model)[name]
        except GgufError as error:
            raise ModelError(str(error)) from error
    if default is not None and not (model / name).is_file():
        return default
    return read_json(model / name)


def read_json(path: Path) -> dict[str, Any]:
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
