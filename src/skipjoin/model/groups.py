from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

# Inputs per scale of weights that are rounded at load.
GROUP = 32


class GroupedMatrix(NamedTuple):
    """Weights `scale * (code - offset) + minimum`, or `scale * values[code]`.

    Attributes:
        codes: [out, in], one per byte: below 16 with 4 bits, below 64 with 6, and signed with 8.
        scales: [out, groups], float16 or float32; likewise `minimums`.
        group: Inputs per scale: 16 or a multiple of 32.
        order: Which input of the product each column has, or None for the same.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group: int
    bits: int
    minimums: torch.Tensor | None = None
    offset: int = 0
    values: tuple[float, ...] | None = None
    order: torch.Tensor | None = None

    def outputs(self, wanted: range | torch.Tensor) -> GroupedMatrix:
        part = slice(wanted.start, wanted.stop) if isinstance(wanted, range) else wanted
        minimums = None if self.minimums is None else self.minimums[part]
        return self._replace(codes=self.codes[part], scales=self.scales[part], minimums=minimums)

    def columns(self, wanted: range) -> GroupedMatrix | None:
        """Return the part with these inputs, or None if they are no whole groups."""
        if wanted.start % self.group or wanted.stop % self.group or self.order is not None:
            return None
        groups = slice(wanted.start // self.group, wanted.stop // self.group)
        return self._replace(
            codes=self.codes[:, wanted.start : wanted.stop].contiguous(),
            scales=self.scales[:, groups].contiguous(),
            minimums=None if self.minimums is None else self.minimums[:, groups].contiguous(),
        )

    def widened(self) -> torch.Tensor:
        inputs = self.codes.shape[1]
        numbers = self.codes.long() if self.values is None else torch.tensor(self.values)[self.codes.long()]
        weight = (numbers - self.offset).float()

        def spread(scales: torch.Tensor) -> torch.Tensor:
            return scales.float().repeat_interleave(self.group, 1)[:, :inputs]

        weight *= spread(self.scales)
        if self.minimums is not None:
            weight += spread(self.minimums)
        return weight if self.order is None else weight[:, self.order.argsort()]


def with_integers(matrix: GroupedMatrix) -> GroupedMatrix:
    """Return the matrix with the nearest 8-bit integers at the best scale in place of `values`.

    The error of NF4's is 0.2 % of a group's largest number, about that of 8-bit inputs.
    """
    if matrix.values is None or all(isinstance(value, int) for value in matrix.values):
        return matrix
    numbers = torch.tensor(matrix.values, dtype=torch.float64)
    factors = torch.linspace(64, 127, 1024, dtype=torch.float64)[:, None] / numbers.abs().max()
    nearest = (numbers * factors).round()
    best = int((nearest / factors - numbers).square().sum(1).argmin())
    values = tuple(int(value) for value in nearest[best])
    return matrix._replace(values=values, scales=matrix.scales.float() / float(factors[best]))


def same_order(matrices: Sequence[GroupedMatrix]) -> bool:
    first = matrices[0].order
    if first is None:
        return all(matrix.order is None for matrix in matrices)
    return all(matrix.order is not None and torch.equal(matrix.order, first) for matrix in matrices)


def coded_bytes(
    outputs: int, inputs: int, *, bits: int = 8, group: int = GROUP, scale_bytes: int = 2, has_minimums: bool = False
) -> int:
    return outputs * (inputs * bits // 8 + -(-inputs // group) * scale_bytes * (1 + has_minimums))


def rounded(weight: torch.Tensor) -> GroupedMatrix:
    """Round [out, in] to 8 bits, with a scale per group that maps its largest number to 127."""
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    scales = (padded.abs().amax(-1) / 127).half()
    codes = (padded / scales.float().clamp(min=2**-24).unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8)
    return GroupedMatrix(codes.view(outputs, -1)[:, :inputs].contiguous(), scales, GROUP, 8)
