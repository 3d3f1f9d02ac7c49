from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from skipjoin.model.adapter_file import AdapterFile, Pair
from skipjoin.model.batch import PackedBatch
from skipjoin.model.cuda import is_out_of_memory
from skipjoin.model.errors import AdapterError
from skipjoin.model.ops.base import LayerOps, Linear, Norm, Product
from skipjoin.model.safetensors_weights import stored_names
from skipjoin.model.transfer import to_device
from skipjoin.model.weights import Matrix

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class AdapterRows(NamedTuple):
    adapter: int
    rows: slice | torch.Tensor


class Adapters:
    """Adapters of one rank's products, by number; `active` are those of the current batch."""

    def __init__(
        self, ops: LayerOps, *, prefix: str, layers: range, num_layers: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.ops, self.dtype, self.device = ops, dtype, device
        self._prefix, self._layers, self._num_layers = prefix, layers, num_layers
        self._products: list[AdaptedLinear] = []
        self.active: tuple[AdapterRows, ...] = ()
        self.bytes: dict[int, int] = {}

    def adapted(
        self, product: Product, matrices: Sequence[Matrix], inputs: int, columns: range | None, activation: str | None
    ) -> AdaptedLinear:
        made = AdaptedLinear(self, product, matrices, inputs, columns, is_activated=activation is not None)
        self._products.append(made)
        return made

    def select(self, batch: PackedBatch) -> None:
        self.active = tuple(_rows_of(batch)) if batch.adapters else ()

    @property
    def has_slices(self) -> bool:
        """Whether the rows of each active adapter are consecutive."""
        return all(isinstance(rows, slice) for _, rows in self.active)

    def load(self, number: int, folder: str) -> None:
        """Load an adapter; raise `AdapterError` if it is not one of this model or has no room."""
        file = AdapterFile(folder)
        found = self._found(file)
        try:
            self.bytes[number] = sum(product.load(number, file, found) for product in self._products)
        except (RuntimeError, MemoryError, AdapterError) as error:
            self.unload(number)
            if isinstance(error, AdapterError):
                raise
            if isinstance(error, MemoryError) or is_out_of_memory(error) or "allocate memory" in str(error):
                raise file.error("does not fit into the free memory") from error
            raise

    def unload(self, number: int) -> None:
        self.bytes.pop(number, None)
        for product in self._products:
            product.unload(number)

    def planned_bytes(self, folder: str) -> int:
        file = AdapterFile(folder)
        found = self._found(file)
        return sum(product.planned_bytes(found) for product in self._products) * self.dtype.itemsize

    def _found(self, file: AdapterFile) -> dict[str, Pair]:
        if not self._products:
            raise file.error("cannot be used: models that run through transformers take no adapters")
        matrices = {matrix.name: product for product in self._products for matrix in product.matrices}
        known = {variant: name for name in matrices for variant in stored_names(name, self._prefix)}
        found = {}
        for module, pair in file.pairs.items():
            if (name := known.get(module)) is None:
                if self._is_elsewhere(module):
                    continue
                raise file.error(
                    f"adapts {module}, which this model does not have or which takes no adapter; {self._kinds()}"
                )
            shape = matrices[name].shape_of(name)
            if (pair.outputs, pair.inputs) != shape:
                raise file.error(
                    f"adapts {module} as a matrix of {pair.outputs} x {pair.inputs}, and the model's is "
                    f"{shape[0]} x {shape[1]}"
                )
            found[name] = pair
        return found

    def _is_elsewhere(self, module: str) -> bool:
        layer = _LAYER.search(module)
        return layer is not None and int(layer[1]) < self._num_layers and int(layer[1]) not in self._layers

    def _kinds(self) -> str:
        names = [matrix.name for product in self._products for matrix in product.matrices]
        kinds = dict.fromkeys(_LAYER.split(name)[-1] for name in names)
        return f"layers take adapters of {', '.join(kinds)}"


class AdaptedLinear:
    """`Linear` plus adapters of some rows, which do not make a row's bits depend on the batch."""

    def __init__(
        self,
        adapters: Adapters,
        product: Product,
        matrices: Sequence[Matrix],
        inputs: int,
        columns: range | None,
        *,
        is_activated: bool,
    ) -> None:
        self.product, self.matrices = product, matrices
        self.weight_bytes = product.weight_bytes
        self.adapters, self._inputs, self._is_activated = adapters, inputs, is_activated
        self._columns = range(inputs) if columns is None else columns
        self._outputs = sum(len(matrix.rows) for matrix in matrices)
        self._pairs: dict[int, tuple[Linear, Linear]] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not (parts := self._parts()):
            return self.product(x)
        if self._is_activated:
            # Adding negative zeros changes no number.
            delta = x.new_full((len(x), self._outputs), -0.0)
            for rows, (down, up) in parts:
                delta[rows] = up(down(x[rows]))
            return self.product.shifted(x, delta)
        found = self.product(x)
        self._add(parts, x, found)
        return found

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        if not (parts := self._parts()):
            return self.product.add_to(x, total, then)
        self.product.add_to(x, total)
        self._add(parts, x, total)
        return total if then is None else then(total)

    def _parts(self) -> list[tuple[slice | torch.Tensor, tuple[Linear, Linear]]]:
        active, pairs = self.adapters.active, self._pairs
        return [(rows, pairs[number]) for number, rows in active if number in pairs] if active else []

    @staticmethod
    def _add(
        parts: Sequence[tuple[slice | torch.Tensor, tuple[Linear, Linear]]], x: torch.Tensor, to: torch.Tensor
    ) -> None:
        for rows, (down, up) in parts:
            part = to[rows]
            up.add_to(down(x[rows]), part)
            if not isinstance(rows, slice):
                to[rows] = part

    def shape_of(self, name: str) -> tuple[int, int]:
        return next(matrix.out for matrix in self.matrices if matrix.name == name), self._inputs

    def load(self, number: int, file: AdapterFile, pairs: dict[str, Pair]) -> int:
        if not (own := self._own(pairs)):
            return 0
        adapters, columns = self.adapters, slice(self._columns.start, self._columns.stop)
        # In float32, so that scaling rounds once.
        down = torch.cat([file.read(pair.down)[:, columns] for pair in own.values()])
        up, row, firsts = torch.zeros(self._outputs, len(down)), 0, _firsts(own)
        for matrix in self.matrices:
            rows = slice(matrix.rows.start, matrix.rows.stop)
            if (pair := own.get(matrix.name)) is not None:
                first = firsts[matrix.name]
                part = file.read(pair.up)[rows] * pair.scale
                up[row : row + len(part), first : first + pair.rank] = matrix.reordered(part)
            row += len(matrix.rows)
        made = [
            adapters.ops.linear(matrix.to(adapters.device, adapters.dtype), None) for matrix in (down.contiguous(), up)
        ]
        self._pairs[number] = made[0], made[1]
        return sum(matrix.weight_bytes for matrix in made)

    def pair(self, number: int) -> tuple[Linear, Linear] | None:
        return self._pairs.get(number)

    def unload(self, number: int) -> None:
        self._pairs.pop(number, None)

    def planned_bytes(self, pairs: dict[str, Pair]) -> int:
        return sum(pair.rank for pair in self._own(pairs).values()) * (len(self._columns) + self._outputs)

    def _own(self, pairs: dict[str, Pair]) -> dict[str, Pair]:
        return {matrix.name: pairs[matrix.name] for matrix in self.matrices if matrix.name in pairs}


def _firsts(pairs: dict[str, Pair]) -> dict[str, int]:
    firsts, at = {}, 0
    for name, pair in pairs.items():
        firsts[name], at = at, at + pair.rank
    return firsts


def _rows_of(batch: PackedBatch) -> Iterator[AdapterRows]:
    runs: dict[int, list[range]] = {}
    start = 0
    for adapter, length in zip(batch.adapters, batch.lengths, strict=True):
        own = runs.setdefault(adapter, [])
        if own and own[-1].stop == start:
            own[-1] = range(own[-1].start, start + length)
        else:
            own.append(range(start, start + length))
        start += length
    runs.pop(0, None)
    for adapter, own in runs.items():
        if len(own) == 1:
            yield AdapterRows(adapter, slice(own[0].start, own[0].stop))
        else:
            rows = torch.tensor([row for run in own for row in run])
            yield AdapterRows(adapter, to_device(rows, batch.token_ids.device))
