from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from skipjoin.model.groups import GroupedMatrix, same_order
from skipjoin.model.ops.base import LayerOps, Linear, LookedUp, Matrices, Product
from skipjoin.model.ops.torch_ops import joined


class Matrix(NamedTuple):
    """A matrix of a product: its rows, those that this rank has, and which of these each output has, if another."""

    name: str
    out: int
    rows: range
    order: torch.Tensor | None = None

    def reordered(self, taken: torch.Tensor) -> torch.Tensor:
        return taken if self.order is None or taken.is_meta else taken[self.order.to(taken.device)]


class Stack(NamedTuple):
    """Matrices of experts that are stored as one tensor, [experts, out, in], or [experts, in, out] if `is_transposed`.

    A rank has the given rows and columns, or all.
    """

    name: str
    experts: int
    out: int
    inputs: int
    is_transposed: bool = False
    rows: torch.Tensor | None = None
    columns: range | None = None

    def part(self, matrix: torch.Tensor) -> torch.Tensor:
        found = matrix if self.rows is None else matrix[self.rows]
        return found if self.columns is None else found[:, self.columns.start : self.columns.stop]


class Weights(ABC):
    """Named tensors, each taken once, and products of them.

    Attributes:
        label: How products keep their weights, for profiles; empty if as numbers of the model's type.
        checkpoint: Folder of safetensors that transformers reads itself, or None if it cannot.
    """

    label = ""
    checkpoint: Path | None = None

    @abstractmethod
    def take(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        """Return a tensor of whole shape `shape`, or the given rows or columns, contiguous, on the model's device."""

    def grouped(self, matrix: Matrix, inputs: int, columns: range | None = None) -> GroupedMatrix | None:
        """Return a matrix in codes, or None if it has none that products of the chosen operations read."""
        return None

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a stored tensor, or None if there is none, or tensors are made by their names."""
        return None

    def linear(
        self,
        ops: LayerOps,
        matrices: Sequence[Matrix],
        inputs: int,
        *,
        bias: bool,
        columns: range | None = None,
        activation: str | None = None,
    ) -> Product:
        """Make one product of matrices with the same input by concatenating their rows; `columns` are this rank's."""

        def taken(kind: str, *size: int, **options: Any) -> list[torch.Tensor]:
            return [
                matrix.reordered(self.take(f"{matrix.name}.{kind}", matrix.out, *size, rows=matrix.rows, **options))
                for matrix in matrices
            ]

        shift = joined(taken("bias")) if bias else None
        coded = [found for matrix in matrices if (found := self.grouped(matrix, inputs, columns)) is not None]
        if len(coded) == len(matrices) and same_order(coded):
            rows = [
                codes if matrix.order is None else codes.outputs(matrix.order)
                for codes, matrix in zip(coded, matrices, strict=True)
            ]
            return ops.grouped(rows, shift, activation)
        return self.product(ops, taken("weight", inputs, columns=columns), shift, activation)

    def product(
        self, ops: LayerOps, weight: Matrices, bias: torch.Tensor | None, activation: str | None = None
    ) -> Product:
        return ops.linear(weight, bias, activation)

    def stacked(
        self, ops: LayerOps, stack: Stack, bias: torch.Tensor | None, activation: str | None = None
    ) -> list[Linear]:
        sizes = (stack.inputs, stack.out) if stack.is_transposed else (stack.out, stack.inputs)
        whole = self.take(stack.name, stack.experts, *sizes)
        matrices = whole.transpose(1, 2) if stack.is_transposed else whole
        return [
            self.product(ops, stack.part(matrix).contiguous(), None if bias is None else bias[index], activation)
            for index, matrix in enumerate(matrices)
        ]

    def table(self, ops: LayerOps, matrix: Matrix, width: int) -> torch.Tensor | LookedUp:
        coded = self.grouped(matrix, width)
        if coded is not None:
            return ops.grouped([coded], None)
        return self.take(f"{matrix.name}.weight", matrix.out, width, rows=matrix.rows)


def wanted_part(shape: tuple[int, ...], rows: range | None, columns: range | None) -> tuple[slice, ...] | None:
    """Return the slices of a tensor that have these rows and columns, or None for all of it."""
    parts = [range(size) if part is None else part for part, size in zip((rows, columns), shape, strict=False)]
    if all(len(part) == size for part, size in zip(parts, shape, strict=False)):
        return None
    return tuple(slice(part.start, part.stop) for part in parts)
