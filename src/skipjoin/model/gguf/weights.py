from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import torch

from skipjoin.model import groups
from skipjoin.model.config import ModelError
from skipjoin.model.gguf.architectures import architecture_of
from skipjoin.model.gguf.file import Gguf, GgufError, StoredTensor, read_gguf
from skipjoin.model.gguf.groups import LAYOUTS, Layout
from skipjoin.model.groups import GroupedMatrix
from skipjoin.model.weight_files import Source
from skipjoin.model.weights import Matrix, Weights

_log = logging.getLogger(__name__)
# Numbers that a thread widens at a time, by way of float32.
_CHUNK = 1 << 20
_FLOATS = ("F32", "F16", "BF16")


class GgufWeights(Weights):
    """Weights of a GGUF file: in codes where products read them, and widened to the model's type elsewhere."""

    def __init__(self, source: Source) -> None:
        try:
            self._file = read_gguf(source.files.folder)
            self._architecture = architecture_of(self._file)
        except GgufError as error:
            raise ModelError(str(error)) from error
        self._config, self._dtype, self._device = source.config, source.dtype, source.device
        self._reads_codes = source.reads_codes
        self._progress = source.progress
        self._taken = 0
        self._coded: Counter[str] = Counter()
        if text := widening(self._file, source.dtype, source.spec.quantization, reads_codes=source.reads_codes):
            _log.info("%s", text)

    def grouped(self, matrix: Matrix, inputs: int, columns: range | None = None) -> GroupedMatrix | None:
        tensor, order = self._found(f"{matrix.name}.weight", (matrix.out, inputs))
        layout = LAYOUTS.get(tensor.type.name) if self._reads_codes else None
        if layout is None:
            return None
        whole = coded(tensor, layout, order[matrix.rows.start : matrix.rows.stop])
        found = whole if columns is None else whole.columns(columns)
        if found is None:
            return None
        self._coded[tensor.type.name] += found.codes.numel()
        self.label = self._coded.most_common(1)[0][0]
        self._count(matrix.name)
        return found

    def take(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        tensor, order = self._found(name, shape)
        wanted = order if rows is None else order[rows.start : rows.stop]
        if len(shape) == 1:
            offset = self._architecture.norm_offset if "norm" in name else 0.0
            found = widened(tensor, np.zeros(1, np.int64), None, torch.float32 if offset else self._dtype)[0]
            found = (found - offset if offset else found)[torch.from_numpy(wanted)].to(self._dtype)
        else:
            found = widened(tensor, wanted, columns, self._dtype)
        self._count(name)
        return found.to(self._device)

    def _found(self, name: str, shape: tuple[int, ...]) -> tuple[StoredTensor, np.ndarray]:
        """Return a tensor, and the row in the file of each of its rows."""
        stored_name = self._architecture.stored_name(name)
        if (tensor := self._file.tensors.get(stored_name)) is None:
            raise ModelError(f"{self._file.path} has no tensor {stored_name!r}: download it again")
        expert, whole = self._architecture.expert(name), shape
        if expert is not None and self._config.experts is not None:
            whole = (self._config.experts.count, *shape)
        if tensor.shape != whole:
            raise ModelError(
                f"{tensor.file}: {stored_name} has shape {tensor.shape}, but the metadata imply {whole}: download it "
                "again"
            )
        order = self._architecture.order(stored_name, shape[0], self._config.num_heads, self._config.num_kv_heads)
        return tensor, (np.arange(shape[0]) if order is None else order) + (expert or 0) * shape[0]

    def _count(self, name: str) -> None:
        self._taken += not self._architecture.expert(f"{name}.")  # a tensor has all experts
        if self._progress is not None:
            self._progress(self._taken, len(self._file.tensors))


def coded_bytes(source: Source, name: str, outputs: int, inputs: int) -> int | None:
    """Return the bytes of a matrix in codes, or None if it is widened."""
    file = read_gguf(source.files.folder)
    tensor = file.tensors.get(architecture_of(file).stored_name(f"{name}.weight"))
    layout = None if tensor is None or not source.reads_codes else LAYOUTS.get(tensor.type.name)
    if layout is None or inputs % layout.group:
        return None
    return groups.coded_bytes(
        outputs, inputs, bits=layout.bits, group=layout.group, scale_bytes=layout.scale_bytes,
        has_minimums=layout.has_minimums,
    )  # fmt: skip


def coded(tensor: StoredTensor, layout: Layout, rows: np.ndarray) -> GroupedMatrix:
    """Return rows of a stored tensor in codes."""
    width, count = tensor.shape[-1], tensor.row_bytes // tensor.type.size
    stored = _stored(tensor).reshape(-1, count, tensor.type.size)
    codes = np.empty((len(rows), width), np.uint8)
    scales = np.empty((len(rows), width // layout.group), np.float16 if layout.scale_bytes == 2 else np.float32)
    minimums = np.empty_like(scales) if layout.has_minimums else None

    def read(part: slice) -> None:
        found = layout.parts(stored[rows[part]])
        for to, values in ((codes, found.codes), (scales, found.scales), (minimums, found.minimums)):
            if to is not None and values is not None:
                to[part] = values.reshape(len(values), -1)

    _in_threads(read, len(rows), width)
    return GroupedMatrix(
        torch.from_numpy(codes.view(np.int8) if layout.bits == 8 else codes),
        torch.from_numpy(scales),
        layout.group,
        layout.bits,
        None if minimums is None else torch.from_numpy(minimums),
        layout.offset,
        layout.values,
    )


def _stored(tensor: StoredTensor) -> np.ndarray:
    return np.memmap(tensor.file, np.uint8, "r", tensor.offset, (tensor.nbytes // tensor.row_bytes, tensor.row_bytes))


def _in_threads(work: Callable[[slice], None], rows: int, width: int) -> None:
    step = max(1, _CHUNK // width)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for done in [pool.submit(work, slice(at, at + step)) for at in range(0, rows, step)]:
            done.result()


def widened(tensor: StoredTensor, rows: np.ndarray, columns: range | None, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of a stored tensor as numbers of a type, in memory of its own."""
    width = tensor.shape[-1]
    wanted = slice(None) if columns is None else slice(columns.start, columns.stop)
    result = torch.empty(len(rows), width if columns is None else len(columns), dtype=dtype)
    stored = _stored(tensor)
    kind = gguf.GGMLQuantizationType[tensor.type.name]

    def widen(part: slice) -> None:
        with np.errstate(all="ignore"):  # scales of damaged files
            numbers = gguf.dequantize(stored[rows[part]], kind)
        result[part] = torch.from_numpy(numbers[:, wanted])

    _in_threads(widen, len(rows), width)
    return result


def widening(file: Gguf, dtype: torch.dtype, quantization: str = "none", *, reads_codes: bool = False) -> str:
    """Return a sentence that says which tensors are widened and what memory that takes, or an empty text."""
    kept = {*_FLOATS, *(LAYOUTS if reads_codes and quantization == "none" else ())}
    found = [tensor for tensor in file.tensors.values() if tensor.type.name not in kept]
    if not found:
        return ""
    counts = Counter(tensor.type.name for tensor in found).most_common()
    kinds = " and ".join(f"{count} {name}" for name, count in counts)
    stored = sum(tensor.nbytes for tensor in found) / 1e6
    wide = sum(tensor.elements for tensor in found) * dtype.itemsize / 1e6
    sizes = f"to {str(dtype).removeprefix('torch.')}, which makes {wide:.1f} MB of {stored:.1f} MB"
    then = "; those of products are then rounded to 8 bits" if quantization == "int8" else ""
    return f"{file.path.name}: {kinds} tensors are widened {sizes}{then}"
