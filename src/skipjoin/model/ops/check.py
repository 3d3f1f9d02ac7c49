from __future__ import annotations

import torch

from skipjoin.model.attention.base import Heads
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.groups import rounded
from skipjoin.model.ops.base import GATED, Experts, LayerOps, WholeText, by_distance
from skipjoin.model.ops.experts import route
from skipjoin.model.ops.recurrent import (
    Convolution,
    ConvolutionInputs,
    Gate,
    GateKind,
    Recurrence,
    RecurrenceInputs,
    Scan,
    ScanInputs,
)
from skipjoin.model.ops.torch_ops import ACTIVATIONS, TorchOps


def check_ops(ops: LayerOps, dtype: torch.dtype, device: torch.device | str = "cpu") -> bool:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, weight, bias, total, heads = drawn(15, 70), drawn(68, 70), drawn(68), drawn(15, 68), drawn(15, 5, 40)

    routed = route(drawn(15, 5), 2, among=True)

    def results(of: LayerOps) -> list[torch.Tensor]:
        linear, sums = of.linear(weight, bias), [total.clone() for _ in range(3)]
        linear.add_to(x, sums[0])
        after_rms = linear.add_to(x, sums[1], of.rms_norm(bias, 1e-5))
        after_layer = linear.add_to(x, sums[2], of.layer_norm(68, weight[:, 0].contiguous(), bias, 1e-5))
        return [
            linear(x),
            *(of.linear(weight, bias, name)(x) for name in (GATED, *ACTIVATIONS)),
            *(of.linear(weight, bias, name).shifted(x, total) for name in (GATED, ACTIVATIONS[-1], None)),
            of.rms_norm(weight[0], 1e-5)(x),
            of.rms_norm(weight[0, :40], 1e-5)(heads[:, 1:4]),
            of.layer_norm(70, None, None, 1e-5)(x),
            after_rms,
            after_layer,
            *_attended(of, heads),
            _experts(of, (weight, bias), heads[0]).add_to(x, routed, total.clone()),
            *sums,
            *_recurrent(of, x, heads),
        ]

    if ops.reads_codes and not _codes_are_right(ops, x, weight):
        return False
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    pairs = zip(results(ops), results(TorchOps()), strict=True)
    # A NaN compares as false.
    return all(bool((ours - theirs).float().norm() <= tolerance * theirs.float().norm()) for ours, theirs in pairs)


def _experts(of: LayerOps, up: tuple[torch.Tensor, torch.Tensor], down: torch.Tensor) -> Experts:
    wide = down.repeat(14, 1)[:68, :34].contiguous()
    ups = [of.linear(up[0].roll(number, 0), up[1], GATED) for number in range(5)]
    return of.experts(ups, [of.linear(wide.roll(number, 0), None) for number in range(5)], 2, among=True)


def _attended(of: LayerOps, heads: torch.Tensor) -> list[torch.Tensor]:
    batch = PackedBatch.build([Segment([0] * 4, 0, (0,)), Segment([0] * 11, 0, (0, 1, 2))], 4, heads.device)
    cos_sin, added = heads[:, 4].float().contiguous(), by_distance(heads[:2, 4, :21].float(), 0.2)
    parts = Heads(heads[:, :2], heads[:, 2:3], heads[:, 3:4])
    rotated = Heads(*(part.clone() for part in parts))
    each = Heads(heads[:, :2], heads[:, 1:3], heads[:, 2:4])
    return [
        of.attend_whole(parts, batch, WholeText(0.2, 3)),
        of.attend_whole(rotated, batch, WholeText(0.2, 0, cos_sin)),
        of.attend_whole(each, batch, WholeText(0.2, 0, None, added)),
    ]


def _recurrent(of: LayerOps, x: torch.Tensor, heads: torch.Tensor) -> list[torch.Tensor]:
    batch = PackedBatch.build([Segment([0] * 4, 0, (0,), state=1), Segment([0] * 11, 2, (0, 1, 2, 3))], 4, x.device)
    inputs, matrices = x[:4].reshape(2, 2, 70).clone(), heads[:2, :, :16].float().reshape(2, 2, 8, 5)
    convolution = Convolution(x[4:7].float(), is_gated=True)
    convolved = of.recurrent.convolve(ConvolutionInputs(x), convolution, inputs, batch)
    recurrence = Recurrence(1, x[0, :2].float(), x[1, :2].float())
    parts = RecurrenceInputs(*x[:, :30].split((8, 8, 10, 2, 2), dim=1))
    out = of.recurrent.recur(parts, recurrence, matrices, batch)
    gate = Gate(GateKind.NORM_THEN_SILU, x[:1, :5].float(), 1e-5)
    gated = of.recurrent.gate(out.clone().view(15, 2, 5), x[:, :10], gate)
    states = heads[2:4, :3, :20].float().clone()
    scanned = ScanInputs(*x[:, 10:56].split((3, 3, 20, 20), dim=1))
    scan = of.recurrent.scan(scanned, Scan(-heads[4, :3, :20].float().exp(), x[0, :20].float()), states, batch)
    return [convolved, inputs, out, matrices, gated, scan, states]


def _codes_are_right(ops: LayerOps, x: torch.Tensor, weight: torch.Tensor) -> bool:
    matrix = rounded(weight)
    ours, theirs = ops.grouped([matrix], None)(x), x.float() @ matrix.widened().T
    return bool((ours - theirs).norm() <= 0.03 * theirs.norm())  # inputs are rounded to 8 bits


def rows_are_independent(ops: LayerOps, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 70, generator=generator).to(dtype) for n in (64, 68))
    linears = [ops.linear(weight, None), ops.linear(weight, None, GATED)]
    if ops.reads_codes:
        linears += [ops.grouped([rounded(weight)], None), ops.grouped([rounded(weight)], None, GATED)]
    return all(torch.equal(linear(x[-n:]), linear(x)[-n:]) for linear in linears for n in (1, 17, 33))
