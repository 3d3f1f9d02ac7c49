from __future__ import annotations

import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import gguf
import numpy as np
import torch

from skipjoin.model.config import ModelError
from skipjoin.model.gguf.architectures import architecture_of
from skipjoin.model.gguf.file import Gguf, GgufError, StoredTensor, read_gguf
from skipjoin.model.weight_files import Source
from skipjoin.model.weights import Weights

_log = logging.getLogger(__name__)
# Numbers that a thread widens at a time, by way of float32.
_CHUNK = 1 << 20
_FLOATS = ("F32", "F16", "BF16")


class GgufWeights(Weights):
    """Weights of a GGUF file, widened to the model's type one tensor at a time."""

    def __init__(self, source: Source) -> None:
        try:
            self._file = read_gguf(source.files.folder)
            self._architecture = architecture_of(self._file)
        except GgufError as error:
            raise ModelError(str(error)) from error
        self._config, self._dtype, self._device = source.config, source.dtype, source.device
        self._progress = source.progress
        self._taken = 0
        if text := widening(self._file, source.dtype, source.spec.quantization):
            _log.info("%s", text)

    def take(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        stored_name = self._architecture.stored_name(name)
        if (tensor := self._file.tensors.get(stored_name)) is None:
            raise ModelError(f"{self._file.path} has no tensor {stored_name!r}: download it again")
        if tensor.shape != shape:
            raise ModelError(
                f"{tensor.file}: {stored_name} has shape {tensor.shape}, but the metadata imply {shape}: download it "
                "again"
            )
        order = self._architecture.order(stored_name, shape[0], self._config.num_heads, self._config.num_kv_heads)
        wanted = np.arange(shape[0]) if order is None else order
        if rows is not None:
            wanted = wanted[rows.start : rows.stop]
        if len(shape) == 1:
            found = widened(tensor, np.zeros(1, np.int64), None, self._dtype)[0][torch.from_numpy(wanted)]
        else:
            found = widened(tensor, wanted, columns, self._dtype)
        self._taken += 1
        if self._progress is not None:
            self._progress(self._taken, len(self._file.tensors))
        return found.to(self._device)


def widened(tensor: StoredTensor, rows: np.ndarray, columns: range | None, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of a stored tensor as numbers of a type, in memory of its own."""
    width = tensor.shape[-1]
    wanted = slice(None) if columns is None else slice(columns.start, columns.stop)
    result = torch.empty(len(rows), width if columns is None else len(columns), dtype=dtype)
    stored = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (tensor.nbytes // tensor.row_bytes, tensor.row_bytes))
    kind = gguf.GGMLQuantizationType[tensor.type.name]

    def widen(start: int, stop: int) -> None:
        with np.errstate(all="ignore"):  # scales of damaged files
            numbers = gguf.dequantize(stored[rows[start:stop]], kind)
        result[start:stop] = torch.from_numpy(numbers[:, wanted])

    step = max(1, _CHUNK // width)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for done in [pool.submit(partial(widen, at, at + step)) for at in range(0, len(rows), step)]:
            done.result()
    return result


def widening(file: Gguf, dtype: torch.dtype, quantization: str = "none") -> str:
    """Return a sentence that says which tensors are widened and what memory that takes, or an empty text."""
    found = [tensor for tensor in file.tensors.values() if tensor.type.name not in _FLOATS]
    if not found:
        return ""
    counts = Counter(tensor.type.name for tensor in found).most_common()
    kinds = " and ".join(f"{count} {name}" for name, count in counts)
    stored = sum(tensor.nbytes for tensor in found) / 1e6
    kept = sum(tensor.elements for tensor in found) * dtype.itemsize / 1e6
    sizes = f"to {str(dtype).removeprefix('torch.')}, which makes {kept:.1f} MB of {stored:.1f} MB"
    then = "; those of products are then rounded to 8 bits" if quantization == "int8" else ""
    return f"{file.path.name}: {kinds} tensors are widened {sizes}{then}"
