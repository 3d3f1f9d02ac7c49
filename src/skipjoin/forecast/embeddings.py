from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from skipjoin.forecast.encode import SEEN, Hashed, unit
from skipjoin.forecast.mass import Array
from skipjoin.options import ConfigError

# Wider embeddings are projected onto this many random directions, which nearly preserves angles.
_MAX_WIDTH = 256
# Rows read at a time, since a float32 copy of a large matrix would not fit next to the model.
_ROWS = 8192
# Names of the matrix in different model families, with and without a head.
_NAMES = (
    "model.embed_tokens.weight",
    "embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    "gpt_neox.embed_in.weight",
    "embed_in.weight",
    "transformer.wte.weight",
    "wte.weight",
)
_FLOATS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "F64": np.dtype("<f8")}


class MeanEmbeddings:
    """Encoder that averages the input embeddings of a prompt's tokens, centered over the vocabulary."""

    batch = 1

    def __init__(self, folder: str | Path) -> None:
        file, name = _find(Path(folder))
        matrix = _read(file, name)
        self._matrix: Array = (matrix - matrix.mean(axis=0)).astype(np.float16)
        self.width = matrix.shape[1]
        self.name = f"embeddings-{self.width}"

    def encode(self, prompts: Sequence[Sequence[int]], features: Sequence[Hashed]) -> Array:
        return np.array([self._mean(prompt) for prompt in prompts], np.float32).reshape(-1, self.width)

    def _mean(self, prompt: Sequence[int]) -> Array:
        tokens = np.asarray([*prompt[: SEEN // 2], *prompt[max(SEEN // 2, len(prompt) - SEEN // 2) :]], dtype=np.int64)
        known = tokens[(tokens >= 0) & (tokens < len(self._matrix))]
        if not len(known):
            return np.zeros(self.width, np.float32)
        return unit(self._matrix[known].mean(axis=0, dtype=np.float32))


def _find(folder: Path) -> tuple[Path, str]:
    if not folder.is_dir():
        raise ConfigError(f"forecast_encoder: embeddings of {folder}: there is no such folder")
    try:
        for file in _files(folder):
            with safe_open(file, framework="numpy") as tensors:
                for name in _NAMES:
                    if name in tensors.keys():  # noqa: SIM118
                        return file, name
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"forecast_encoder: {folder} cannot be read: {error}") from error
    raise ConfigError(f"forecast_encoder: {folder} has no embedding matrix; known are {', '.join(_NAMES)}")


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        where = json.loads(index.read_text()).get("weight_map", {})
        return [folder / where[name] for name in _NAMES if name in where]
    return sorted(folder.glob("*.safetensors"))


def _read(file: Path, name: str) -> Array:
    with file.open("rb") as source:
        size = int.from_bytes(source.read(8), "little")
        described = json.loads(source.read(size))[name]
        rows, width = described["shape"]
        source.seek(8 + size + described["data_offsets"][0])
        project = projection(width)
        parts = [
            _numbers(source, described["dtype"], min(_ROWS, rows - start), width, file) @ project
            for start in range(0, rows, _ROWS)
        ]
    return np.concatenate(parts)


def projection(width: int, most: int = _MAX_WIDTH) -> Array:
    if width <= most:
        return np.eye(width, dtype=np.float32)
    drawn = np.random.default_rng(width).standard_normal((width, most), dtype=np.float32)
    return drawn / np.float32(np.sqrt(most))


def _numbers(source: Any, kind: str, rows: int, width: int, file: Path) -> Array:
    if kind == "BF16":
        halves = np.frombuffer(source.read(rows * width * 2), "<u2").astype(np.uint32)
        return (halves << np.uint32(16)).view(np.float32).reshape(rows, width)
    if kind not in _FLOATS:
        raise ConfigError(f"forecast_encoder: embeddings of type {kind} in {file} cannot be read")
    kept = _FLOATS[kind]
    numbers = np.frombuffer(source.read(rows * width * kept.itemsize), kept)
    return np.asarray(numbers.astype(np.float32).reshape(rows, width))
