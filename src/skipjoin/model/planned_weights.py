from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from skipjoin.model.ops.base import LayerOps, Linear, LookedUp, Matrices, Product
from skipjoin.model.ops.torch_ops import joined
from skipjoin.model.weights import Matrix, Stack, Weights, wanted_part


class PlannedWeights(Weights):
    """Tensors without memory, and products of which only the bytes are known, or None for those in numbers."""

    def __init__(
        self,
        dtype: torch.dtype,
        matrix_bytes: Callable[[str, int, int], int | None],
        product_bytes: Callable[[int, int], int | None],
    ) -> None:
        self._dtype, self._matrix_bytes, self._product_bytes = dtype, matrix_bytes, product_bytes

    def take(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device="meta")
        wanted = wanted_part(shape, rows, columns)
        return tensor if wanted is None else tensor[wanted].contiguous()

    def linear(self, ops: LayerOps, matrices: Sequence[Matrix], inputs: int, **options: Any) -> Product:
        columns = options.get("columns")
        width = inputs if columns is None else len(columns)
        sizes = [self._matrix_bytes(matrix.name, len(matrix.rows), width) for matrix in matrices]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return super().linear(ops, matrices, inputs, **options)
        shifts = sum(len(matrix.rows) for matrix in matrices) * self._dtype.itemsize * options["bias"]
        return PlannedProduct(sum(known) + shifts)

    def product(
        self, ops: LayerOps, weight: Matrices, bias: torch.Tensor | None, activation: str | None = None
    ) -> Product:
        weight = joined(weight)
        size = self._product_bytes(*weight.shape)
        if size is None:
            return super().product(ops, weight, bias, activation)
        return PlannedProduct(size + (0 if bias is None else bias.nbytes))

    def stacked(
        self, ops: LayerOps, stack: Stack, bias: torch.Tensor | None, activation: str | None = None
    ) -> list[Linear]:
        rows = stack.out if stack.rows is None else len(stack.rows)
        size = self._matrix_bytes(stack.name, rows, stack.inputs if stack.columns is None else len(stack.columns))
        if size is None:
            return super().stacked(ops, stack, bias, activation)
        return [PlannedProduct(size + (0 if bias is None else bias[0].nbytes)) for _ in range(stack.experts)]

    def table(self, ops: LayerOps, matrix: Matrix, width: int) -> torch.Tensor | LookedUp:
        size = self._matrix_bytes(matrix.name, len(matrix.rows), width)
        return super().table(ops, matrix, width) if size is None else PlannedProduct(size)


class PlannedProduct:
    def __init__(self, weight_bytes: int) -> None:
        self.weight_bytes = weight_bytes

    def _compute(self, *_: Any, **__: Any) -> torch.Tensor:
        raise NotImplementedError

    __call__ = shifted = add_to = rows = _compute
