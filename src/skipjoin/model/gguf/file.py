"""Reader of GGUF headers. Files are untrusted: each size is checked against the file before anything is allocated.

The reader of the package `gguf` takes seconds, as it makes an array object of each token, and follows a damaged count
beyond the end of the file.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

SUFFIX = ".gguf"
_VERSIONS = (2, 3)
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
# Bounds far above those of any model: names and vocabulary of a header, its entries, and the parts of a file.
_MAX_HEADER_BYTES = 1 << 28
_MAX_ELEMENTS = 1 << 24
_MAX_ENTRIES = 1 << 20
_MAX_DIMENSIONS = 4
_MAX_PARTS = 1 << 10
_MAX_ALIGNMENT = 1 << 20
# Bytes of the smallest entry: metadata with an empty name and a value of one byte, and a tensor without dimensions.
_MIN_METADATA, _MIN_TENSOR = 13, 24
# Types of metadata by number, in struct's letters.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


# Path, bytes and time of change of each part.
Identity = tuple[tuple[Path, int, int], ...]


class GgufError(Exception):
    pass


class TensorType(NamedTuple):
    name: str
    elements: int
    size: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}


class StoredTensor(NamedTuple):
    """Place of a tensor: `shape` has rows first, and `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    file: Path
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.elements * self.type.size

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class Gguf:
    """Header of a model: of one file, or of the parts of a split one, whose first part has the metadata."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX and path.is_file()


def model_stem(name: str) -> str:
    found = _PART.fullmatch(name)
    return found["stem"] if found else name.removesuffix(Path(name).suffix)


def first_part(path: Path) -> Path:
    found = _PART.fullmatch(path.name)
    return _part(path, found, 1) if found else path


def _part(path: Path, name: re.Match[str], number: int) -> Path:
    return path.with_name(f"{name['stem']}-{number:05}-of-{name['count']}{path.suffix}")


def read_gguf(path: Path) -> Gguf:
    """Return the header of a file with all its parts; raise `GgufError` for damaged, cut or unknown ones."""
    with _errors(path):
        return _read(path, identity_of(path))


def identity_of(path: Path) -> Identity:
    with _errors(path):
        return tuple((part, part.stat().st_size, part.stat().st_mtime_ns) for part in _parts(path))


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise GgufError(f"{path} cannot be read: {error}") from error


def _parts(path: Path) -> list[Path]:
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count <= _MAX_PARTS:
        raise GgufError(f"{path}: its name must give the number of a part, from 1 to at most {_MAX_PARTS}")
    parts = [_part(path, found, number) for number in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise GgufError(
            f"{path} is one of {count} parts, and {path.parent} lacks {', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}: download all of them"
        )
    return parts


def forget_headers() -> None:
    """Free the header that is kept for the next reader, whose vocabulary takes up to a tenth of a small model."""
    _read.cache_clear()


# A server reads the header for its configuration, tokenizer, template and weights.
@lru_cache(maxsize=1)
def _read(path: Path, parts: Identity) -> Gguf:
    metadata: Mapping[str, Any] = {}
    tensors: dict[str, StoredTensor] = {}
    for number, (part, _, _) in enumerate(parts):
        found, own = _Header(part).read()
        if (count := found.get("split.count", 1)) != len(parts) and (count or len(parts) > 1):
            raise GgufError(
                f"{part} is one of {count} parts by its metadata, and one of {len(parts)} by its name: keep the names "
                "that end with -00001-of-00003.gguf"
            )
        if number == 0:
            metadata = found
        for tensor in own:
            if tensor.name in tensors:
                raise GgufError(f"{part} has tensor {tensor.name!r} twice: download it again")
            tensors[tensor.name] = tensor
    return Gguf(path, metadata, tensors)


class _Header:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = path.stat().st_size
        self._at = 0
        self._data: mmap.mmap | bytes = b""

    def read(self) -> tuple[dict[str, Any], list[StoredTensor]]:
        with self._path.open("rb") as file:
            if not self._size:
                raise self._error("is empty: download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as self._data:
                return self._parse()

    def _parse(self) -> tuple[dict[str, Any], list[StoredTensor]]:
        if self._bytes(4) != b"GGUF":
            raise self._error("is not a GGUF file, because it does not begin with GGUF: download it again")
        version = self._scalar("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            kind = "big-endian" if swapped else f"version {version}"
            raise self._error(
                f"is a {kind} GGUF file; little-endian versions {' and '.join(map(str, _VERSIONS))} can be read: "
                "convert the model again with a current llama.cpp"
            )
        tensor_count = self._count("tensors", self._scalar("Q"), _MIN_TENSOR, _MAX_ENTRIES)
        metadata_count = self._count("metadata entries", self._scalar("Q"), _MIN_METADATA, _MAX_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            name = self._string("a metadata entry's name")
            if name in metadata:
                raise self._error(f"has metadata {name[:80]!r} twice: download it again")
            metadata[name] = self._value(name, self._scalar("I"))
        entries = [self._entry() for _ in range(tensor_count)]
        return metadata, list(self._located(entries, metadata))

    def _entry(self) -> tuple[str, list[int], int, int]:
        name = self._string("a tensor's name")
        dimensions = self._scalar("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._error(
                f"has tensor {name[:80]!r} of {dimensions} dimensions; at most {_MAX_DIMENSIONS} can be read"
            )
        shape = [self._scalar("Q") for _ in range(dimensions)]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _located(
        self, entries: Sequence[tuple[str, list[int], int, int]], metadata: Mapping[str, Any]
    ) -> Iterator[StoredTensor]:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._error(f"has general.alignment {alignment!r:.80}, which must be a power of two")
        start = -(-self._at // alignment) * alignment
        for name, shape, number, offset in entries:
            if (kind := TENSOR_TYPES.get(number)) is None:
                known = ", ".join(kind.name for kind in TENSOR_TYPES.values())
                raise self._error(
                    f"stores tensor {name[:80]!r} as type {number}, which cannot be read; those that can are {known}: "
                    "give a file of another quantization"
                )
            tensor = StoredTensor(name, tuple(reversed(shape)), kind, self._path, start + offset)
            if not all(shape) or shape[0] % kind.elements:
                raise self._error(
                    f"has shape {tensor.shape} for tensor {name[:80]!r}, whose rows must be whole blocks of "
                    f"{kind.elements} numbers: download it again"
                )
            if offset % alignment:
                raise self._error(f"has tensor {name[:80]!r} at {offset}, which is no multiple of {alignment}")
            if (end := tensor.offset + tensor.nbytes) > self._size:
                raise self._error(
                    f"is cut off: tensor {name[:80]!r} ends at byte {end}, and the file at byte {self._size}: download "
                    "it again"
                )
            yield tensor

    def _value(self, name: str, kind: int) -> Any:
        if kind in _SCALARS:
            value = self._scalar(_SCALARS[kind])
            if _SCALARS[kind] != "f":
                return value
            # Here, because its import takes a fifth of the start of each process, of which most read no such file.
            from numpy import float32  # noqa: PLC0415

            return float(str(float32(value)))  # the shortest decimal: checkpoints have 1e-6, not 9.99999997e-07
        if kind == _STRING:
            return self._string(name)
        if kind != _ARRAY:
            raise self._error(f"has metadata {name[:80]!r} of type {kind}, which is unknown: download it again")
        of, count = self._scalar("I"), self._scalar("Q")
        if of == _STRING:
            count = self._count(f"elements of {name[:80]!r}", count, 8, _MAX_ELEMENTS)
            return self._strings(name, count)
        if of not in _SCALARS:
            raise self._error(f"has metadata {name[:80]!r}, an array of type {of}, which cannot be read")
        letter = _SCALARS[of]
        size = struct.calcsize(f"<{letter}")
        count = self._count(f"elements of {name[:80]!r}", count, size, _MAX_ELEMENTS)
        return list(struct.unpack(f"<{count}{letter}", self._bytes(count * size)))

    def _count(self, what: str, count: int, min_bytes: int, most: int) -> int:
        if count > most:
            raise self._error(f"says that it has {count} {what}, and at most {most} can be read: download it again")
        if count * min_bytes > self._size - self._at:
            raise self._cut()
        return count

    def _scalar(self, letter: str) -> Any:
        (value,) = struct.unpack(f"<{letter}", self._bytes(struct.calcsize(f"<{letter}")))
        return value

    def _strings(self, what: str, count: int) -> list[str]:
        data, at, last = self._data, self._at, min(self._size, _MAX_HEADER_BYTES)
        found = []
        try:
            for _ in range(count):
                begin = at + 8
                end = begin + int.from_bytes(data[at:begin], "little")
                if end > last:
                    break
                found.append(data[begin:end].decode())
                at = end
        except UnicodeDecodeError:
            pass
        self._at = at
        if len(found) < count:
            self._string(what)  # raises what is wrong with it
        return found

    def _string(self, what: str) -> str:
        try:
            return self._bytes(self._scalar("Q")).decode()
        except UnicodeDecodeError as error:
            raise self._error(f"has text that is not UTF-8 in {what[:80]}: download it again") from error

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise self._cut()
        if end > _MAX_HEADER_BYTES:
            raise self._error(f"has a header beyond {_MAX_HEADER_BYTES >> 20} MiB, far above that of any model")
        found = self._data[self._at : end]
        self._at = end
        return found

    def _cut(self) -> GgufError:
        return self._error(f"is cut off in its header, at byte {self._size}: download it again")

    def _error(self, what: str) -> GgufError:
        return GgufError(f"{self._path} {what}")
