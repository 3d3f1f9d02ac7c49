"""Layers with a state instead of KV, by the operations of torch: the reference of the others."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from skipjoin.model.batch import PackedBatch

_UNIT_EPSILON = 1e-6
# Exponent of sums without a value.
_LEAST = -1e38


class ConvolutionInputs(NamedTuple):
    """Rows [T, channels], and factors of inputs and of outputs, with the same strides."""

    x: torch.Tensor
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None


class Convolution(NamedTuple):
    """Causal convolution by float32 weights [kernel, channels], oldest first, and a bias; silu may follow."""

    weights: torch.Tensor
    bias: torch.Tensor | None = None
    is_gated: bool = False


class Recurrence(NamedTuple):
    """Linear recurrence of heads: a gated delta rule, or Mamba-2's if there is no `rate`.

    A head's step is softplus(decay + decay_bias), and its state is multiplied by exp(-exp(log_a) * step) before each
    token. Of the delta rule, keys and queries have length 1, and the logistic function of `rate` is the share of a
    value that is learned; Mamba-2's values are multiplied by steps in [least, most].

    Attributes:
        log_a, decay_bias: float32 [heads]; None if inputs have logarithms of decays, or of each key's, and shares.
        skip: float32 [heads], factor of values that are added to outputs, or None.
    """

    key_heads: int
    log_a: torch.Tensor | None
    decay_bias: torch.Tensor | None
    skip: torch.Tensor | None = None
    least: float = 0.0
    most: float = float("inf")


class RecurrenceInputs(NamedTuple):
    """Rows of tokens, contiguous in the last dimension: key and query [T, key_heads * key_dim], value, decay, rate."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    rate: torch.Tensor | None = None


class Scan(NamedTuple):
    """Mamba's recurrence: of each channel, a state with a decay for each key.

    A channel's step is softplus(step + step_bias), by which its value is multiplied; its state is multiplied by
    exp(a * step) before each token.

    Attributes:
        a: float32 [key_dim, channels]; None, as `step_bias`, if inputs have logarithms of decays in float32.
        skip: float32 [channels], factor of values that are added to outputs, or None.
    """

    a: torch.Tensor | None
    step_bias: torch.Tensor | None
    skip: torch.Tensor | None = None


class ScanInputs(NamedTuple):
    """Rows of tokens, contiguous in the last dimension: query and key [T, key_dim], value and step [T, channels]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    step: torch.Tensor


class Average(NamedTuple):
    """RWKV's average of values of earlier tokens, whose weights are the exponentials of keys.

    Attributes:
        decay: float32 [channels], added to the exponents of weights with each further token.
        bonus: float32 [channels], added to that of the last token.
    """

    decay: torch.Tensor
    bonus: torch.Tensor


class GateKind(IntEnum):
    """In the order of `GateKind` in recurrent.cpp."""

    NORM_THEN_SILU = 0
    SILU_THEN_NORM = 1
    SIGMOID = 2


class Gate(NamedTuple):
    """Gate of groups, which are also normalized unless it is a sigmoid; `weights` are float32 [groups or 1, width]."""

    kind: GateKind
    weights: torch.Tensor | None = None
    eps: float = 0.0


class _Part(NamedTuple):
    """Tokens [sequences, tokens] of one sequence, or one of each of several.

    Attributes:
        continues: Whether a state is that of earlier tokens, [sequences].
        copies: Further slots to write the state of one sequence to.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    continues: torch.Tensor
    copies: tuple[int, ...] = ()

    def read(self, states: torch.Tensor) -> torch.Tensor:
        found = states[self.slots]
        return found.masked_fill_(~self.continues.view(-1, *[1] * (found.dim() - 1)), 0)

    def write(self, states: torch.Tensor, found: torch.Tensor) -> None:
        states[self.slots] = found
        for slot in self.copies:
            states[slot] = found[0]


def _parts(batch: PackedBatch) -> Iterator[_Part]:
    device, starts = batch.positions.device, batch.starts
    rows = torch.arange(batch.num_tokens, device=device)
    slots, continues = torch.tensor(batch.states, device=device), torch.tensor(starts, device=device) > 0
    if batch.decode_only and not batch.captures:
        yield _Part(rows.unsqueeze(1), slots, continues)
        return
    row, yes = 0, torch.ones(1, dtype=torch.bool, device=device)
    for index, length in enumerate(batch.lengths):
        copies: dict[int, list[int]] = {}
        for _, tokens, target in (capture for capture in batch.captures if capture[0] == index):
            copies.setdefault(tokens, []).append(target)
        own = slice(index, index + 1)
        for begin, end in pairwise(sorted({0, length, *copies})):
            before = yes if begin else continues[own]
            yield _Part(rows[None, row + begin : row + end], slots[own], before, tuple(copies.get(end, ())))
        row += length


class RecurrentOps:
    """Operations that read and write a layer's states in the slots `PackedBatch.states`; a new sequence has zeros."""

    def convolve(
        self, inputs: ConvolutionInputs, of: Convolution, states: torch.Tensor, batch: PackedBatch
    ) -> torch.Tensor:
        """Return [T, channels]; `states` are the last inputs, [slots, kernel - 1, channels]."""
        x, before, after = inputs
        given = x if before is None else x * before
        out, past = torch.empty_like(given, memory_format=torch.contiguous_format), len(of.weights) - 1
        for part in _parts(batch):
            rows = torch.cat([part.read(states), given[part.rows]], dim=1)
            count = rows.shape[1] - past
            total = torch.zeros((), device=x.device) if of.bias is None else of.bias
            for index, weights in enumerate(of.weights):
                total = total + weights * rows[:, index : index + count].float()
            out[part.rows] = (F.silu(total) if of.is_gated else total).to(out.dtype)
            part.write(states, rows[:, count:])
        return out if after is None else out.mul_(after)

    def recur(self, inputs: RecurrenceInputs, of: Recurrence, states: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Return [T, heads * value_dim]; `states` are float32 [slots, heads, key_dim, value_dim]."""
        _, heads, key_dim, value_dim = states.shape
        repeat = heads // of.key_heads
        query, key = (
            heads.float().unflatten(1, (of.key_heads, key_dim)).repeat_interleave(repeat, 1)
            for heads in (inputs.query, inputs.key)
        )
        value = inputs.value.float().unflatten(1, (heads, value_dim))
        if of.log_a is None or of.decay_bias is None:
            assert inputs.rate is not None
            decay, rate = inputs.decay.exp(), inputs.rate
            decay = decay.unflatten(1, (heads, key_dim)) if decay.shape[1] > heads else decay
        else:
            step = F.softplus(inputs.decay.float() + of.decay_bias)
            step = step.clamp(of.least, of.most) if inputs.rate is None else step
            rate = step if inputs.rate is None else inputs.rate.float().sigmoid()
            decay = torch.exp(-of.log_a.exp() * step)
        if inputs.rate is not None:
            query, key = (rows * (rows.square().sum(-1, keepdim=True) + _UNIT_EPSILON).rsqrt() for rows in (query, key))
            query = query * key_dim**-0.5
        out = torch.empty_like(value)
        for part in _parts(batch):
            state = part.read(states)
            for rows in part.rows.unbind(1):
                state *= decay[rows].view(len(state), heads, -1, 1)
                update = value[rows]
                if inputs.rate is not None:
                    update = update - torch.einsum("shk,shkv->shv", key[rows], state)
                state += key[rows].unsqueeze(-1) * (update * rate[rows, :, None]).unsqueeze(-2)
                out[rows] = torch.einsum("shk,shkv->shv", query[rows], state)
            part.write(states, state)
        if of.skip is not None:
            out += of.skip[:, None] * value
        return out.flatten(1).to(inputs.value.dtype)

    def scan(self, inputs: ScanInputs, of: Scan, states: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Return [T, channels]; `states` are float32 [slots, key_dim, channels]."""
        query, key, value, step = (rows.float() for rows in inputs)
        out, update = torch.empty_like(value), value
        if of.step_bias is not None:
            step = F.softplus(step + of.step_bias)
            update = value * step
        for part in _parts(batch):
            state = part.read(states)
            for rows in part.rows.unbind(1):
                state *= torch.exp(step[rows, None] if of.a is None else of.a * step[rows, None])
                state += key[rows].unsqueeze(-1) * update[rows].unsqueeze(1)
                out[rows] = torch.einsum("sk,skc->sc", query[rows], state)
            part.write(states, state)
        if of.skip is not None:
            out += of.skip * value
        return out.to(inputs.value.dtype)

    def average(
        self, key: torch.Tensor, value: torch.Tensor, of: Average, states: torch.Tensor, batch: PackedBatch
    ) -> torch.Tensor:
        """Return [T, channels], as `key` and `value` have; `states` are float32 [slots, 3, channels]."""
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        for part in _parts(batch):
            total, count, most = part.read(states).unbind(1)
            most = most.masked_fill(~part.continues[:, None], _LEAST)
            for rows in part.rows.unbind(1):
                exponent, values = key[rows].float(), value[rows].float()
                now = exponent + of.bonus
                top = torch.maximum(most, now)
                past, last = torch.exp(most - top), torch.exp(now - top)
                out[rows] = ((past * total + last * values) / (past * count + last)).to(out.dtype)
                now = most + of.decay
                top = torch.maximum(now, exponent)
                past, last = torch.exp(now - top), torch.exp(exponent - top)
                total, count, most = past * total + last * values, past * count + last, top
            part.write(states, torch.stack([total, count, most], dim=1))
        return out

    def gate(self, x: torch.Tensor, gate: torch.Tensor, of: Gate) -> torch.Tensor:
        """Gate contiguous [T, groups, width] in place by [T, groups * width] or [T, 1], contiguous in rows."""
        factor = gate.float().view(x.shape) if gate.shape[1] > 1 else gate.float().unsqueeze(-1)
        value = x.float()
        if of.kind is GateKind.SIGMOID:
            return x.copy_(value * factor.sigmoid())
        if of.kind is GateKind.SILU_THEN_NORM:
            value = value * F.silu(factor)
        assert of.weights is not None
        value = F.rms_norm(value, value.shape[-1:], None, of.eps) * of.weights
        return x.copy_(value * F.silu(factor) if of.kind is GateKind.NORM_THEN_SILU else value)
