from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from skipjoin.model.groups import GroupedMatrix, with_integers
from skipjoin.model.ops.calls import GroupsCall, address
from skipjoin.model.ops.compiled_linear import CompiledLinear, CompiledOps, check_ids
from skipjoin.model.ops.threads import threads_here


class Packed(NamedTuple):
    call: GroupsCall
    memory: tuple[torch.Tensor | ctypes.Array[ctypes.c_int8] | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.memory if isinstance(held, torch.Tensor))


class GroupedLinear(CompiledLinear):
    def __init__(
        self, ops: CompiledOps, matrices: Sequence[GroupedMatrix], bias: torch.Tensor | None, activation: str | None
    ) -> None:
        matrices = [with_integers(matrix) for matrix in matrices]
        sizes = [len(matrix.codes) for matrix in matrices]
        super().__init__(ops, sum(sizes), matrices[0].codes.shape[1], activation)
        if self.is_gated and len(matrices) == 1:  # of one matrix, rows come in halves
            matrices, sizes = _halves(matrices[0]), [sizes[0] // 2] * 2
        shifts = [None] * len(sizes) if bias is None else bias.float().split(sizes)
        self._packed = [_pack(ops, *pair) for pair in zip(matrices, shifts, strict=True)]
        self._calls = (GroupsCall * len(sizes))(*(packed.call for packed in self._packed))
        self._order = matrices[0].order
        self.is_fusible = self._order is None
        self.weight_bytes = sum(packed.nbytes for packed in self._packed)
        self.use(groups=ctypes.addressof(self._calls), matrices=len(sizes))

    def _run(self, x: torch.Tensor, out: torch.Tensor, add: int, delta: torch.Tensor | None = None) -> None:
        super()._run(x if self._order is None else x[:, self._order], out, add, delta)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        found = torch.empty((len(ids), self.inputs), dtype=self.ops.dtype)
        check_ids(ids, self.outputs)
        self.ops.library.skipjoin_group_rows(
            self.ops.type, self._packed[0].call, ids.contiguous().data_ptr(), len(ids), found.data_ptr(), threads_here()
        )
        return found


def _halves(matrix: GroupedMatrix) -> list[GroupedMatrix]:
    parts = ([None] * 2 if part is None else part.chunk(2) for part in (matrix.codes, matrix.scales, matrix.minimums))
    return [
        matrix._replace(codes=codes, scales=scales, minimums=minimums)
        for codes, scales, minimums in zip(*parts, strict=True)
    ]


def _pack(ops: CompiledOps, matrix: GroupedMatrix, bias: torch.Tensor | None) -> Packed:
    outputs, inputs = matrix.codes.shape
    library, has_minimums = ops.library, matrix.minimums is not None
    values = None if matrix.values is None else (ctypes.c_int8 * 16)(*map(int, matrix.values))
    shift = None if bias is None else torch.nn.functional.pad(bias, (0, -outputs % library.skipjoin_strip_lanes()))
    call = GroupsCall(
        None, 0, outputs, inputs, matrix.bits, matrix.group, matrix.offset, matrix.scales.itemsize, has_minimums,
        None if values is None else ctypes.addressof(values), address(shift),
    )  # fmt: skip
    call.strip_bytes = library.skipjoin_strip_bytes(call)
    strips = ops.arena.take(-(-outputs // library.skipjoin_strip_lanes()) * call.strip_bytes)
    call.strips = strips.data_ptr()
    codes, scales = matrix.codes.contiguous(), matrix.scales.contiguous()
    minimums = None if matrix.minimums is None else matrix.minimums.contiguous()
    library.skipjoin_pack_groups(call, codes.data_ptr(), scales.data_ptr(), address(minimums), threads_here())
    return Packed(call, (strips, shift, values))
