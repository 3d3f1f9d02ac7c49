from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from skipjoin.model.groups import GroupedMatrix, rounded, same_order
from skipjoin.model.ops.base import LayerOps, Linear, LookedUp, Matrices, Product
from skipjoin.model.ops.scaled import MULTIPLE, scaled_kind
from skipjoin.model.ops.torch_ops import joined


class Matrix(NamedTuple):
    """A matrix of a product: its rows, those of this rank, and which of these each output has."""

    name: str
    out: int
    rows: range
    order: torch.Tensor | None = None

    def reordered(self, taken: torch.Tensor) -> torch.Tensor:
        return taken if self.order is None or taken.is_meta else taken[self.order.to(taken.device)]


class Stack(NamedTuple):
    """Experts' matrices in one tensor, [experts, out, in], or [experts, in, out] if `is_transposed`.

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
        """Return a matrix in codes, or None if it has none that the chosen operations read."""
        return None

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a stored tensor; None if it is missing, or tensors are made by their names."""
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


def type_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a tensor: corrections of experts' scores are kept, whose differences decide."""
    return torch.float32 if name.endswith(("e_score_correction_bias", "expert_bias")) else dtype


def wanted_part(shape: tuple[int, ...], rows: range | None, columns: range | None) -> tuple[slice, ...] | None:
    """Return the slices of a tensor with these rows and columns, or None for all of it."""
    parts = [range(size) if part is None else part for part, size in zip((rows, columns), shape, strict=False)]
    if all(len(part) == size for part, size in zip(parts, shape, strict=False)):
        return None
    return tuple(slice(part.start, part.stop) for part in parts)


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
        tensor = torch.empty(shape, dtype=type_of(name, self._dtype), device="meta")
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


class RandomWeights(Weights):
    """Random tensors that depend only on seed, name and kind of device, so that ranks agree."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._seed = seed
        self._dtype, self._device = dtype, device

    def take(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=4).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest, "little"))
        # A GPU generates in the weights' type, since float32 would need twice the memory of the largest tensor.
        drawn_as = torch.float32 if self._device.type == "cpu" else self._dtype
        drawn = torch.randn(shape, generator=generator, device=self._device, dtype=drawn_as).mul_(0.02)
        # Not of a module that has a norm among others.
        inner = ".".join(name.lower().split(".")[-3:])
        if ("norm" in inner or "_ln." in name) and name.endswith("weight"):
            drawn += 1
        if (wanted := wanted_part(shape, rows, columns)) is not None:
            drawn = drawn[wanted].contiguous()
        return drawn.to(device=self._device, dtype=type_of(name, self._dtype))


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
