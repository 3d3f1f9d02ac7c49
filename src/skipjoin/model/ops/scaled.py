"""Products of weights in 8-bit floats (e4m3) with a scale per output, and inputs rounded likewise by row."""

from __future__ import annotations

import functools

import torch

from skipjoin.model.cuda import one_line
from skipjoin.model.errors import ModelError
from skipjoin.model.ops.base import LayerOps, Norm
from skipjoin.model.ops.torch_ops import TorchLinear, TorchOps

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
# Sizes of weights must be multiples of this.
MULTIPLE = 16
# Error of a product beside that of rounded numbers, relative to its norm: the accumulators of some cards have 22 bits.
_TOLERANCE = 0.02


def rounded_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    scales = (wide.abs().amax(1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scales).clamp(-_LARGEST, _LARGEST).to(FP8), scales


class ScaledLinear(TorchLinear):
    """Linear layer that rounds its weight to 8-bit floats. Call `check` before the first one on a device."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None) -> None:
        codes, scales = rounded_rows(weight)
        super().__init__(codes, bias, activation)
        self._scales = scales.t()
        self.weight_bytes += scales.nbytes

    @classmethod
    @functools.cache
    def check(cls, dtype: torch.dtype, device: torch.device) -> None:
        """Raise `ModelError` if this device has no products of 8-bit floats, or wrong ones."""
        generator = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(n, 64, generator=generator).to(device, dtype) for n in (17, 48))
        x[3], weight[5] = 0, 0
        try:
            found = cls(weight, None)(x).float()
        except Exception as error:  # of torch, the compiler or the driver
            raise ModelError(
                f"quantization fp8 needs compute capability 8.9 or newer, and dtype bfloat16: {one_line(error)}"
            ) from error
        (rows, row_scales), (outputs, output_scales) = rounded_rows(x), rounded_rows(weight)
        expected = (rows.float() * row_scales) @ (outputs.float() * output_scales).t()
        # A NaN compares as false.
        if not bool((found - expected).norm() <= _TOLERANCE * expected.norm()):
            raise ModelError(f"quantization fp8: products of 8-bit floats are wrong on {device}")

    def product(self, x: torch.Tensor) -> torch.Tensor:
        found = self.unbiased(x)
        return found if self.bias is None else found.add_(self.bias)

    def unbiased(self, x: torch.Tensor) -> torch.Tensor:
        codes, scales = self.rounded(x)
        return torch._scaled_mm(codes, self.weight.t(), scale_a=scales, scale_b=self._scales, out_dtype=x.dtype)

    def rounded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rounded_rows(x)

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        found = self.product(x)
        return total.add_(found) if then is None else then.after(found, total)


def scaled_kind(ops: LayerOps) -> type[ScaledLinear]:
    if type(ops) is TorchOps:
        return ScaledLinear
    from skipjoin.model.ops.triton_ops import TritonScaled  # noqa: PLC0415 (for cards)

    return TritonScaled
