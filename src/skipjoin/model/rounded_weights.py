from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from skipjoin.model.groups import GroupedMatrix, rounded
from skipjoin.model.ops.base import LayerOps, LookedUp, Matrices, Product
from skipjoin.model.ops.scaled import MULTIPLE, scaled_kind
from skipjoin.model.ops.torch_ops import joined
from skipjoin.model.weights import Matrix, Weights


class Int8Weights(Weights):
    label = "int8"

    def __init__(self, plain: Weights) -> None:
        self._plain = plain
        self.checkpoint = plain.checkpoint

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return self._plain.shape_of(name)

    def take(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        return self._plain.take(name, *shape, rows=rows, columns=columns)

    def grouped(self, matrix: Matrix, inputs: int, columns: range | None = None) -> GroupedMatrix | None:
        return rounded(self.take(f"{matrix.name}.weight", matrix.out, inputs, rows=matrix.rows, columns=columns))

    def product(
        self, ops: LayerOps, weight: Matrices, bias: torch.Tensor | None, activation: str | None = None
    ) -> Product:
        parts = [weight] if isinstance(weight, torch.Tensor) else weight
        return ops.grouped([rounded(part) for part in parts], bias, activation)


class Fp8Weights(Weights):
    label = "fp8"

    def __init__(self, plain: Weights, vocab_size: int) -> None:
        self._plain, self._vocab_size = plain, vocab_size
        self._table: torch.Tensor | LookedUp | None = None
        self.checkpoint = plain.checkpoint

    def take(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        return self._plain.take(name, *shape, rows=rows, columns=columns)

    def linear(self, ops: LayerOps, matrices: Sequence[Matrix], inputs: int, **options: Any) -> Product:
        if matrices[0].out == self._vocab_size:
            return self._plain.linear(ops, matrices, inputs, **options)
        return super().linear(ops, matrices, inputs, **options)

    def table(self, ops: LayerOps, matrix: Matrix, width: int) -> torch.Tensor | LookedUp:
        self._table = super().table(ops, matrix, width)
        return self._table

    def product(
        self, ops: LayerOps, weight: Matrices, bias: torch.Tensor | None, activation: str | None = None
    ) -> Product:
        weight = joined(weight)
        if weight is self._table or any(size % MULTIPLE for size in weight.shape):
            return ops.linear(weight, bias, activation)
        kind = scaled_kind(ops)
        kind.check(weight.dtype, weight.device)
        return kind(weight, bias, activation)
