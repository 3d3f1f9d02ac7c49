"""Encoders that need files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
_OWN_CODE = "it needs code of the encoder's own (auto_map), which Skipjoin never runs"
# Returns the text of a prompt's tokens.
TextOf = Callable[[Sequence[int]], str]
_FLOATS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "F64": np.dtype("<f8")}


class MeanEmbeddings:
    """Encoder that averages the input embeddings of a prompt's tokens, centered over the vocabulary."""

    def __init__(self, folder: str | Path) -> None:
        file, name = _find(Path(folder))
        matrix = _read(file, name)
        self._matrix: Array = (matrix - matrix.mean(axis=0)).astype(np.float16)
        self.width = matrix.shape[1]
        self.name = f"embeddings-{self.width}"

    def encode(self, prompt: Sequence[int], features: Hashed) -> Array:
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
    """Return a (vocabulary, width) matrix as float32, read in parts and projected if wide."""
    with file.open("rb") as source:
        size = int.from_bytes(source.read(8), "little")
        described = json.loads(source.read(size))[name]
        rows, width = described["shape"]
        source.seek(8 + size + described["data_offsets"][0])
        project = _projection(width)
        parts = [
            _numbers(source, described["dtype"], min(_ROWS, rows - start), width, file) @ project
            for start in range(0, rows, _ROWS)
        ]
    return np.concatenate(parts)


def _projection(width: int) -> Array:
    if width <= _MAX_WIDTH:
        return np.eye(width, dtype=np.float32)
    drawn = np.random.default_rng(width).standard_normal((width, _MAX_WIDTH), dtype=np.float32)
    return drawn / np.float32(np.sqrt(_MAX_WIDTH))


def _numbers(source: Any, kind: str, rows: int, width: int, file: Path) -> Array:
    """Read rows as float32. numpy has no bfloat16, which is the upper half of a float32."""
    if kind == "BF16":
        halves = np.frombuffer(source.read(rows * width * 2), "<u2").astype(np.uint32)
        return (halves << np.uint32(16)).view(np.float32).reshape(rows, width)
    if kind not in _FLOATS:
        raise ConfigError(f"forecast_encoder: embeddings of type {kind} in {file} cannot be read")
    kept = _FLOATS[kind]
    numbers = np.frombuffer(source.read(rows * width * kept.itemsize), kept)
    return np.asarray(numbers.astype(np.float32).reshape(rows, width))


class HuggingFaceEncoder:
    """Encoder that averages the last hidden states of a model such as BERT on the CPU.

    It needs `text_of`, because it has another tokenizer than the served model.
    """

    def __init__(self, folder: str | Path, text_of: TextOf) -> None:
        if not Path(folder).is_dir():
            raise ConfigError(f"forecast_encoder: {folder} is neither hashed, embeddings nor a folder")
        # Imported here because they are slow to load and only this encoder needs them.
        import torch  # noqa: PLC0415
        from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            self._model = AutoModel.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, trust_remote_code=False
            ).eval()
        except (OSError, ValueError, KeyError) as error:
            reason = _OWN_CODE if "trust_remote_code" in str(error) else error
            raise ConfigError(f"forecast_encoder: {folder} cannot be read: {reason}") from error
        self._torch, self._text_of = torch, text_of
        self._project = _projection(int(self._model.config.hidden_size))
        self.width = self._project.shape[1]
        self._most = min(SEEN, int(getattr(self._model.config, "max_position_embeddings", SEEN)))
        self.name = f"{Path(folder).name}-{self.width}"

    def encode(self, prompt: Sequence[int], features: Hashed) -> Array:
        inputs = self._tokenizer(self._text_of(prompt), return_tensors="pt", truncation=True, max_length=self._most)
        if not inputs["input_ids"].numel():
            return np.zeros(self.width, np.float32)
        with self._torch.inference_mode():
            states = self._model(**inputs).last_hidden_state[0]
        return unit(states.float().mean(dim=0).numpy() @ self._project)
