from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from skipjoin.model.config_fields import DTYPES
from skipjoin.model.errors import ModelError
from skipjoin.model.family import Family, family_named
from skipjoin.model.weight_files import INDEX, Source, read_weight_map, safetensors_files
from skipjoin.model.weights import Weights, type_of, wanted_part

# Stored tensor types that can be weights, and the nearest supported ones. Others are quantized, or no numbers.
STORED = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Bytes of tensors that are read from mapped files before these are closed.
_MAPPED_BYTES = 64 << 20


class SafetensorsFiles:
    """A folder's safetensors files, opened as needed; `where` has the file of each tensor.

    Tensors keep the pages of their mapped file in memory, so files are closed from time to time.
    """

    def __init__(self, folder: Path, names: Sequence[str] = ()) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._read_bytes = 0
        try:
            self.where = self._tensors_of(names) if names else self._locate()
        except (SafetensorError, OSError) as error:
            raise ModelError(f"the weights in {self._folder} cannot be read: {error}") from error

    def opened(self, name: str) -> Any:
        with self._errors(name):
            return self._open(self.where[name]).get_slice(name)

    def read(self, name: str, wanted: tuple[slice, ...] | None) -> torch.Tensor:
        if self._read_bytes > _MAPPED_BYTES:
            self._files.clear()
            self._read_bytes = 0
        with self._errors(name):
            file = self._open(self.where[name])
            tensor: torch.Tensor = (
                file.get_tensor(name) if wanted is None else file.get_slice(name)[wanted].contiguous()
            )
        self._read_bytes += tensor.nbytes
        return tensor if tensor.dim() > 1 else tensor.clone()  # those of norms are kept

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self._folder / self.where[name]} cannot be read: {error}") from error

    def _open(self, file: str) -> Any:
        if file not in self._files:
            # safetensors says of a file that must not be read that it is missing.
            (self._folder / file).open("rb").close()
            self._files[file] = safe_open(self._folder / file, framework="pt")
        return self._files[file]

    def _locate(self) -> dict[str, str]:
        index = self._folder / INDEX
        if not index.is_file():
            files = safetensors_files(self._folder)
            if not files:
                raise ModelError(f"{self._folder} has no .safetensors file")
            return self._tensors_of([file.name for file in files])
        # Tools that merge or edit models leave an index that lacks tensors, or names another file for them. It decides
        # between files that both have one.
        indexed = read_weight_map(index)
        held = {file: self._tensors_of([file]) for file in sorted({*indexed.values()})}
        found = {name: file for tensors in held.values() for name, file in tensors.items()}
        return found | {name: file for name, file in indexed.items() if name in held[file]}

    def _tensors_of(self, files: Sequence[str]) -> dict[str, str]:
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118


def stored_dtype(folder: Path) -> str:
    elements: Counter[str] = Counter()
    files = SafetensorsFiles(folder)
    for name in files.where:
        tensor = files.opened(name)
        elements[STORED.get(tensor.get_dtype(), "")] += math.prod(tensor.get_shape())
    return max(DTYPES, key=lambda name: elements[name])


def has_own_output(folder: Path, family: Family) -> bool:
    """Return whether the files hold another output matrix than the embedding.

    transformers 5 then unties them, whatever config.json says.
    """
    files = SafetensorsFiles(folder)
    names = [
        next((stored for stored in stored_names(name, family.prefix) if stored in files.where), "")
        for name in (family.decoder.EMBEDDING, family.decoder.OUTPUT)
    ]
    if not all(names) or len({tuple(files.opened(name).get_shape()) for name in names}) > 1:
        return False
    embedding, output = (files.read(name, None) for name in names)
    return not torch.equal(embedding, output.to(embedding.dtype))


def stored_names(name: str, prefix: str) -> tuple[str, ...]:
    """Return the names that a tensor may have: also in a bare decoder, or in a model that has it as a part."""
    bare = name.removeprefix(prefix)
    parts = f"model.language_model.{bare}", f"language_model.{name}", f"model.text_model.{bare}", f"thinker.{name}"
    found = name, bare, *parts, f"model.{name}"  # also saved from an object that has the model as its attribute
    return found if "LayerNorm." not in name else (*found, *map(_converted, (name, bare)))


def _converted(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


class FolderWeights(Weights):
    def __init__(self, source: Source) -> None:
        self._folder, self._dtype, self._device = source.files.folder, source.dtype, source.device
        self.checkpoint = self._folder
        self._prefix = family_named(source.config.family).prefix
        self._progress = source.progress
        self._taken: set[str] = set()
        self._files = SafetensorsFiles(self._folder)

    def take(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        tensor = self.stored(name, *shape, rows=rows, columns=columns, types=tuple(STORED))
        return tensor.to(device=self._device, dtype=type_of(name, self._dtype))

    def has(self, name: str) -> bool:
        return self.named(name) is not None

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        stored = self.named(name)
        return None if stored is None else tuple(self._files.opened(stored).get_shape())

    def named(self, name: str) -> str | None:
        return next((stored for stored in stored_names(name, self._prefix) if stored in self._files.where), None)

    def stored(
        self, name: str, *shape: int, types: Sequence[str], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        """Return a tensor as it is stored; its type must be one of `types`, named as in the file."""
        where = self._files.where
        if (known := self.named(name)) is None:
            near = min((other for other in where if other.endswith(f".{name}")), key=len, default="")
            raise ModelError(f"{self._folder} has no tensor {name!r}{f', but {near!r}' if near else ''}")
        stored = self._files.opened(known)
        if stored.get_dtype() not in types:
            raise ModelError(f"{self._folder}: {name} has type {stored.get_dtype()}; supported are {', '.join(types)}")
        found = tuple(stored.get_shape())
        if found != shape:
            raise ModelError(f"{self._folder}: {name} has shape {found}, but config.json implies {shape}")
        tensor = self._files.read(known, wanted_part(shape, rows, columns))
        self._taken.add(known)
        if self._progress is not None:
            self._progress(len(self._taken), len(where))
        return tensor
