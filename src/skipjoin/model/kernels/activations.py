from __future__ import annotations

import torch
import triton
import triton.language as tl

from skipjoin.model.ops.base import CLAMPED_LIMIT, CLAMPED_SLOPE

# Columns per program: 8 in each thread, of both gate and up if gated.
_BLOCK, _WARPS = 1024, 4


@triton.jit
def _gelu_tanh(values: tl.tensor) -> tl.tensor:
    # (1 + tanh(u)) / 2 is the logistic function of 2 u.
    doubled = 1.5957691216 * (values + 0.044715 * values * values * values)
    return values / (1.0 + tl.exp(-doubled))


@triton.jit
def gate_and_mul_kernel(
    x: tl.tensor, out: tl.tensor, width: tl.tensor, x_stride: tl.tensor,
    GATE: tl.constexpr, LIMIT: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    if GATE == "clamped":
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        values = gate / (1.0 + tl.exp(-SLOPE * gate)) * (up + 1.0)
    elif GATE == "gelu_tanh":
        values = _gelu_tanh(gate) * up
    else:
        values = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, values.to(out.dtype.element_ty), mask=inside)


def gate_and_mul(x: torch.Tensor, function: str) -> torch.Tensor:
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    gate_and_mul_kernel[(rows, triton.cdiv(width, _BLOCK))](
        x, out, width, x.stride(0),
        GATE=function, LIMIT=CLAMPED_LIMIT, SLOPE=CLAMPED_SLOPE, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def bias_and_activation_kernel(
    x: tl.tensor, bias: tl.tensor, width: tl.tensor, x_stride: tl.tensor,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    held = x + tl.program_id(0).to(tl.int64) * x_stride + column
    values = tl.load(held, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        values += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "relu":
        values = tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu2":
        values = tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL)
        values *= values
    elif ACTIVATION == "silu":
        values = values / (1.0 + tl.exp(-values))
    elif ACTIVATION == "gelu_tanh":
        values = _gelu_tanh(values)
    else:
        values = 0.5 * values * (1.0 + tl.erf(values * 0.7071067812))
    tl.store(held, values.to(x.dtype.element_ty), mask=inside)


def bias_and_activation(x: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """Compute activation(x + bias) in place, in float32 (ALISE section 3.3)."""
    rows, width = x.shape
    bias_and_activation_kernel[(rows, triton.cdiv(width, _BLOCK))](
        x, x if bias is None else bias, width, x.stride(0),
        BIAS=bias is not None, ACTIVATION=activation, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return x
