from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from skipjoin.model.config_fields import DTYPES
from skipjoin.model.errors import ModelError
from skipjoin.model.family import Family, family_named
from skipjoin.model.groups import GroupedMatrix, rounded, same_order
from skipjoin.model.ops.base import LayerOps, Linear, LookedUp, Matrices, Norm, Product
from skipjoin.model.ops.scaled import MULTIPLE, scaled_kind
from skipjoin.model.ops.torch_ops import joined
from skipjoin.model.weight_files import INDEX, Source, read_weight_map, safetensors_files

# Stored tensor types that can be weights, and the nearest supported ones. Others are quantized, or no numbers.
STORED = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Bytes of tensors that are read from mapped files before these are closed.
_MAPPED_BYTES = 64 << 20


class Matrix(NamedTuple):
    """A matrix of a product: its name without ".weight", its rows, and those of them that this rank has.

    Attributes:
        order: Which of the rank's rows each output has, or None for the same.
    """

    name: str
    out: int
    rows: range
    order: torch.Tensor | None = None

    def reordered(self, taken: torch.Tensor) -> torch.Tensor:
        return taken if self.order is None or taken.is_meta else taken[self.order.to(taken.device)]


class Stack(NamedTuple):
    """Matrices of experts that are stored as one tensor, [experts, out, in], or [experts, in, out] if `is_transposed`.

    Attributes:
        rows: Matrices that this rank has, in its order; None for all.
        columns: Likewise, consecutive.
    """

    name: str
    experts: int
    out: int
    inputs: int
    is_transposed: bool = False
    rows: torch.Tensor | None = None
    columns: range | None = None

    def part(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a matrix [out, in]."""
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
        """Make a product of each matrix of a tensor, with a bias of [experts, rows] if given."""
        sizes = (stack.inputs, stack.out) if stack.is_transposed else (stack.out, stack.inputs)
        whole = self.take(stack.name, stack.experts, *sizes)
        matrices = whole.transpose(1, 2) if stack.is_transposed else whole
        return [
            self.product(ops, stack.part(matrix).contiguous(), None if bias is None else bias[index], activation)
            for index, matrix in enumerate(matrices)
        ]

    def table(self, ops: LayerOps, matrix: Matrix, width: int) -> torch.Tensor | LookedUp:
        """Return rows to look up, which may also be a product."""
        coded = self.grouped(matrix, width)
        if coded is not None:
            return ops.grouped([coded], None)
        return self.take(f"{matrix.name}.weight", matrix.out, width, rows=matrix.rows)


class PlannedWeights(Weights):
    """Tensors without memory, and products of which only the bytes are known.

    Args:
        matrix_bytes: Returns the bytes of a matrix by its name, outputs and inputs, or None if it is kept as numbers.
        product_bytes: Likewise for products of tensors that were taken.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        matrix_bytes: Callable[[str, int, int], int | None],
        product_bytes: Callable[[int, int], int | None],
    ) -> None:
        self._dtype, self._matrix_bytes, self._product_bytes = dtype, matrix_bytes, product_bytes

    def take(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device="meta")
        wanted = _wanted(shape, rows, columns)
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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def shifted(self, x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        raise NotImplementedError

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Int8Weights(Weights):
    """Weights of another format, rounded to 8 bits."""

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
    """Weights of another format, rounded to 8-bit floats, except for the output projection and odd sizes."""

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


class SafetensorsFiles:
    """A folder's safetensors files, or those of these names, opened as needed. `where` has the file of each tensor.

    Tensors are parts of a mapped file, which stays in memory as far as it was read while any of them exists. Files are
    thus closed from time to time.
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

    transformers 5 then unties them, whatever config.json says. It saves such a model with tie_word_embeddings true.
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
    """Return the name of a parameter of a norm in checkpoints from TensorFlow, which most of BERT's are."""
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
        return tensor.to(device=self._device, dtype=self._dtype)

    def has(self, name: str) -> bool:
        return self.named(name) is not None

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        stored = self.named(name)
        return None if stored is None else tuple(self._files.opened(stored).get_shape())

    def named(self, name: str) -> str | None:
        """Return the name that a tensor has in the files, or None if they lack it."""
        return next((stored for stored in stored_names(name, self._prefix) if stored in self._files.where), None)

    def stored(
        self,
        name: str,
        *shape: int,
        types: Sequence[str],
        rows: range | None = None,
        columns: range | None = None,
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
        tensor = self._files.read(known, _wanted(shape, rows, columns))
        self._taken.add(known)
        if self._progress is not None:
            self._progress(len(self._taken), len(where))
        return tensor


def _wanted(shape: tuple[int, ...], rows: range | None, columns: range | None) -> tuple[slice, ...] | None:
    parts = [range(size) if part is None else part for part, size in zip((rows, columns), shape, strict=False)]
    if all(len(part) == size for part, size in zip(parts, shape, strict=False)):
        return None
    return tuple(slice(part.start, part.stop) for part in parts)


class RandomWeights(Weights):
    """Random tensors that depend only on the seed, the name and the kind of device, so that ranks agree."""

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
        if (wanted := _wanted(shape, rows, columns)) is not None:
            drawn = drawn[wanted].contiguous()
        return drawn.to(device=self._device, dtype=self._dtype)
