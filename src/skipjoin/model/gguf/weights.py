from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import gguf
import numpy as np
import torch

from skipjoin.model import groups
from skipjoin.model.errors import ModelError
from skipjoin.model.gguf.architecture import JOINED_QKV, QKV, Heads, Recurrence
from skipjoin.model.gguf.file import Gguf, GgufError, StoredTensor, read_gguf
from skipjoin.model.gguf.groups import LAYOUTS, unpacked
from skipjoin.model.gguf.recognize import architecture_of
from skipjoin.model.groups import GroupedMatrix
from skipjoin.model.ops.base import LayerOps, Linear
from skipjoin.model.weight_files import Source
from skipjoin.model.weights import Matrix, Stack, Weights, type_of


class Place(NamedTuple):
    """Tensor, its dimensions before a matrix's, and the row at which the wanted one begins, with `rows` of its own."""

    tensor: StoredTensor
    lead: tuple[int, ...]
    first: int = 0
    rows: int | None = None


def place_of(file: Gguf, name: str, lead: tuple[int, ...], expert: int, heads: Heads) -> Place | None:
    """Return where a file has a tensor: alone, in one of queries, keys and values, or for each expert."""
    if (tensor := file.tensors.get(name)) is not None:
        return Place(tensor, lead)
    part, kind = name.rpartition(".")[::2]
    if lead and (tensor := file.tensors.get(f"{part.removesuffix('_exps')}.{expert}.{kind}")) is not None:
        return Place(tensor, ())
    layer, _, inner = part.rpartition(".")
    if inner not in QKV or (tensor := file.tensors.get(f"{layer}.{JOINED_QKV}.{kind}")) is None:
        return None
    size = tensor.shape[0] // (heads.queries + 2 * heads.keys)
    counts = {"attn_q": heads.queries, "attn_k": heads.keys, "attn_v": heads.keys}
    before = {"attn_q": 0, "attn_k": heads.queries, "attn_v": heads.queries + heads.keys}
    return Place(tensor, (), before[inner] * size, counts[inner] * size)


_log = logging.getLogger(__name__)
# Numbers that a thread widens at a time, by way of float32.
_CHUNK = 1 << 20
_FLOATS = ("F32", "F16", "BF16")


class GgufWeights(Weights):
    """Weights of a GGUF file: in codes where products read them, and widened elsewhere."""

    def __init__(self, source: Source) -> None:
        try:
            self._file = read_gguf(source.files.folder)
            self._architecture = architecture_of(self._file)
        except GgufError as error:
            raise ModelError(str(error)) from error
        self._config, self._dtype, self._device = source.config, source.dtype, source.device
        self._reads_codes = source.reads_codes
        self._progress = source.progress
        states = source.config.states
        recurrence = None
        if states is not None:
            recurrence = Recurrence(states.heads, states.key_heads, states.key_dim, states.value_dim)
        self._heads = Heads(source.config.num_heads, source.config.num_kv_heads, recurrence)
        self._taken = 0
        self._coded_numbers: Counter[str] = Counter()
        if text := widening(self._file, source.dtype, source.spec.quantization, reads_codes=source.reads_codes):
            _log.info("%s", text)

    def grouped(self, matrix: Matrix, inputs: int, columns: range | None = None) -> GroupedMatrix | None:
        rows = self._rows(f"{matrix.name}.weight", (matrix.out, inputs))
        found = self._coded(rows, rows.order[matrix.rows.start : matrix.rows.stop], columns)
        if found is not None:
            self._count(matrix.name, rows)
        return found

    def stacked(
        self, ops: LayerOps, stack: Stack, bias: torch.Tensor | None, activation: str | None = None
    ) -> list[Linear]:
        made: list[Linear] = []
        for index in range(stack.experts):
            rows = self._rows(stack.name, (stack.out, stack.inputs), index)
            wanted = rows.order if stack.rows is None else rows.order[stack.rows.numpy()]
            shift = None if bias is None else bias[index]
            if (coded := self._coded(rows, wanted, stack.columns)) is not None:
                made.append(ops.grouped([coded], shift, activation))
            else:
                weight = rows.widened(wanted, stack.columns, self._dtype).to(self._device)
                made.append(self.product(ops, weight, shift, activation))
        self._count(stack.name, rows)
        return made

    def take(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        of = self._rows(name, shape)
        wanted = of.order if rows is None else of.order[rows.start : rows.stop]
        if len(shape) == 1:
            wanted = wanted + of.parts[0][1].start
            found = self._architecture.original(of.names[0], of.vector(torch.float32))[torch.from_numpy(wanted)]
        elif self._architecture.is_bias_of_experts(name):
            biases = (widened(tensor, np.arange(shape[0]), None, self._dtype) for tensor, _ in of.parts)
            found = torch.cat(list(biases), dim=1)[:, torch.from_numpy(of.order)]
        else:
            found = of.widened(wanted, columns, self._dtype)
            found = found.view(len(found), *shape[1:]) if len(shape) > 2 else found
        self._count(name, of)
        return found.to(device=self._device, dtype=type_of(name, self._dtype))

    def _coded(self, rows: _Rows, wanted: np.ndarray, columns: range | None) -> GroupedMatrix | None:
        kinds = {tensor.type.name for tensor, _ in rows.parts}
        if not self._reads_codes or len(kinds) > 1 or not kinds <= LAYOUTS.keys():
            return None
        whole = rows.coded(wanted)
        found = whole if columns is None else whole.columns(columns)
        if found is not None:
            self._coded_numbers[rows.parts[0][0].type.name] += found.codes.numel()
            self.label = self._coded_numbers.most_common(1)[0][0]
        return found

    def _rows(self, name: str, shape: tuple[int, ...], index: int | None = None) -> _Rows:
        of, config = self._architecture, self._config
        names = of.stored_names(name)
        expert = of.expert(name) if index is None else index
        lead = () if expert is None or config.experts is None else (config.experts.count,)
        if of.is_bias_of_experts(name):
            lead, shape = (shape[0],), (shape[1],)
        parts = [self._part(stored_name, lead, shape, expert or 0) for stored_name in names]
        found = sum(len(rows) for _, rows in parts)
        if found != shape[0]:
            raise self._misshapen(names[0], parts[0][0], shape)
        width = shape[1] if len(shape) == 2 else 1
        return _Rows(names, parts, of.order(names, shape[0], self._heads), of.columns(names, width, self._heads))

    def _part(
        self, stored_name: str, lead: tuple[int, ...], shape: tuple[int, ...], expert: int
    ) -> tuple[StoredTensor, range]:
        found = place_of(self._file, stored_name, lead, expert, self._heads)
        if found is None:
            raise ModelError(f"{self._file.path} has no tensor {stored_name!r}: download it again")
        tensor, lead, first, rows = found
        stored, width = tensor.shape, tuple(size for size in shape[1:] if size != 1)
        if not lead and not width:
            return tensor, range(first, first + (math.prod(stored) if rows is None else rows))
        sizes = stored[len(lead) :]
        if stored[: len(lead)] != lead or not sizes or tuple(size for size in sizes[1:] if size != 1) != width:
            raise self._misshapen(stored_name, tensor, (*lead, *shape))
        first += expert * sizes[0] if lead else 0
        return tensor, range(first, first + (sizes[0] if rows is None else rows))

    def _misshapen(self, stored_name: str, tensor: StoredTensor, implied: tuple[int, ...]) -> ModelError:
        return ModelError(
            f"{tensor.file}: {stored_name} has shape {tensor.shape}, but the metadata imply {implied}: download it "
            "again"
        )

    def _count(self, name: str, rows: _Rows) -> None:
        self._taken += 0 if self._architecture.expert(f"{name}.") else len(rows.parts)  # a tensor has all experts
        if self._progress is not None:
            self._progress(self._taken, len(self._file.tensors))


class _Rows(NamedTuple):
    """Rows of a file's tensors, concatenated; `order` maps the rows of a checkpoint's tensor to them.

    Rows of a vector are its numbers. `places` has the column of each column, or None for the same.
    """

    names: tuple[str, ...]
    parts: list[tuple[StoredTensor, range]]
    order: np.ndarray
    places: np.ndarray | None = None

    def widened(self, wanted: np.ndarray, columns: range | None, dtype: torch.dtype) -> torch.Tensor:
        read = columns if self.places is None else None
        found = [widened(tensor, rows, read, dtype) for tensor, rows in self._split(wanted)]
        whole = found[0] if len(found) == 1 else torch.cat(found)[self._places(wanted)]
        if self.places is None:
            return whole
        places = self.places if columns is None else self.places[columns.start : columns.stop]
        return whole[:, torch.from_numpy(places)]

    def coded(self, wanted: np.ndarray) -> GroupedMatrix:
        found = [
            unpacked(tensor.type.name, _stored(tensor), rows, tensor.shape[-1]) for tensor, rows in self._split(wanted)
        ]
        if len(found) == 1:
            order = None if self.places is None else torch.from_numpy(self.places.argsort())
            return found[0]._replace(order=order)
        minimums = [tensor.minimums for tensor in found if tensor.minimums is not None]
        joined = found[0]._replace(
            codes=torch.cat([tensor.codes for tensor in found]),
            scales=torch.cat([tensor.scales for tensor in found]),
            minimums=torch.cat(minimums) if minimums else None,
        )
        return joined.outputs(self._places(wanted))

    def vector(self, dtype: torch.dtype) -> torch.Tensor:
        tensor, _ = self.parts[0]
        return widened(tensor, np.arange(tensor.nbytes // tensor.row_bytes), None, dtype).flatten()

    def _split(self, wanted: np.ndarray) -> list[tuple[StoredTensor, np.ndarray]]:
        split, first = [], 0
        for tensor, rows in self.parts:
            here = wanted[(wanted >= first) & (wanted < first + len(rows))]
            split.append((tensor, here - first + rows.start))
            first += len(rows)
        return split

    def _places(self, wanted: np.ndarray) -> torch.Tensor:
        bounds = np.cumsum([len(rows) for _, rows in self.parts])
        return torch.from_numpy(np.searchsorted(bounds, wanted, "right").argsort(kind="stable").argsort())


def coded_bytes(source: Source, name: str, outputs: int, inputs: int) -> int | None:
    file = read_gguf(source.files.folder)
    names = architecture_of(file).stored_names(f"{name.removesuffix('.weight')}.weight")
    # Any number of heads: it is the tensor that counts.
    places = (place_of(file, name, (1,), 0, Heads(1, 1)) for name in names)
    kinds = {place.tensor.type.name if place else "" for place in places}
    layout = LAYOUTS.get(kinds.pop()) if len(kinds) == 1 and source.reads_codes else None
    if layout is None or inputs % layout.group:
        return None
    return groups.coded_bytes(
        outputs, inputs, bits=layout.bits, group=layout.group, scale_bytes=layout.scale_bytes,
        has_minimums=layout.has_minimums,
    )  # fmt: skip


def _stored(tensor: StoredTensor) -> np.ndarray:
    return np.memmap(tensor.file, np.uint8, "r", tensor.offset, (tensor.nbytes // tensor.row_bytes, tensor.row_bytes))


def _in_threads(work: Callable[[slice], None], rows: int, width: int) -> None:
    step = max(1, _CHUNK // width)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for done in [pool.submit(work, slice(at, at + step)) for at in range(0, rows, step)]:
            done.result()


def widened(tensor: StoredTensor, rows: np.ndarray, columns: range | None, dtype: torch.dtype) -> torch.Tensor:
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
