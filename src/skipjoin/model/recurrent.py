"""Parts of layers whose requests have a state of constant size instead of KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from skipjoin.model.attention.base import LayerInputs
from skipjoin.model.builder import Builder
from skipjoin.model.config import StateSettings
from skipjoin.model.experts import ExpertMLP
from skipjoin.model.modules import Adjusted
from skipjoin.model.ops.base import GATED, Linear, Norm
from skipjoin.model.ops.recurrent import Convolution, ConvolutionInputs, Gate, GateKind, Recurrence, RecurrenceInputs
from skipjoin.model.self_attention import SelfAttention, attended

_SIGMOID = Gate(GateKind.SIGMOID)


class Part(Protocol):
    def add_to(
        self, x: torch.Tensor, total: torch.Tensor, step: LayerInputs, then: Norm | None = None
    ) -> torch.Tensor: ...


class Stateless:
    def __init__(self, add_to: Callable[[torch.Tensor, torch.Tensor, Norm | None], torch.Tensor]) -> None:
        self._add_to = add_to

    def add_to(self, x: torch.Tensor, total: torch.Tensor, step: LayerInputs, then: Norm | None = None) -> torch.Tensor:
        return self._add_to(x, total, then)


def mlp_part(up: Linear, down: Linear) -> Part:
    return Stateless(lambda x, total, then: down.add_to(up(x), total, then))


class MixedLayer:
    def __init__(self, norm: Norm, mixer: Part, mlp_norm: Norm, mlp: Part) -> None:
        self.norm = norm
        self._mixer, self._mlp_norm, self._mlp = mixer, mlp_norm, mlp

    def __call__(self, x: torch.Tensor, normed: torch.Tensor, step: LayerInputs, then: Norm | None) -> torch.Tensor:
        normed = self._mixer.add_to(normed, x, step, self._mlp_norm)
        return self._mlp.add_to(normed, x, step, then)


def state_index(builder: Builder, layer: int) -> int:
    return builder.shard.state_layers(builder.config).index(layer)


def settings_of(builder: Builder) -> StateSettings:
    assert builder.config.states is not None
    return builder.config.states


def convolution(builder: Builder, name: str, *, has_bias: bool = False, is_gated: bool = False) -> Convolution:
    of = settings_of(builder)
    weights = builder.tensor(f"{name}.weight", of.channels, 1, of.kernel)
    bias = builder.tensor(f"{name}.bias", of.channels).float() if has_bias else None
    return Convolution(weights.float().squeeze(1).t().contiguous(), bias, is_gated)


class ShortConvolution:
    def __init__(self, builder: Builder, layer: int, name: str, *, has_bias: bool) -> None:
        width = builder.config.hidden_size
        self._ops, self._layer = builder.ops.recurrent, state_index(builder, layer)
        self._enter = builder.linear(f"{name}.in_proj", (3 * width,), width, has_bias)
        self._of = convolution(builder, f"{name}.conv", has_bias=has_bias)
        self._leave = builder.linear(f"{name}.out_proj", (width,), width, has_bias)

    def add_to(self, x: torch.Tensor, total: torch.Tensor, step: LayerInputs, then: Norm | None = None) -> torch.Tensor:
        assert step.kv.states is not None
        before, after, given = self._enter(x).chunk(3, dim=1)
        states = step.kv.states.inputs(self._layer)
        convolved = self._ops.convolve(ConvolutionInputs(given, before, after), self._of, states, step.batch)
        return self._leave.add_to(convolved, total, then)


class DeltaNet:
    """Gated delta rule over a convolution of queries, keys and values, and a gated norm of each head's output."""

    def __init__(self, builder: Builder, layer: int, name: str, enter: Linear) -> None:
        of, config = settings_of(builder), builder.config
        self._ops, self._layer = builder.ops.recurrent, state_index(builder, layer)
        self._enter = enter
        self._convolution = convolution(builder, f"{name}.conv1d", is_gated=True)
        log_a, bias = (builder.tensor(f"{name}.{part}", of.heads).float() for part in ("A_log", "dt_bias"))
        self._of = Recurrence(of.key_heads, log_a, bias)
        norm = builder.tensor(f"{name}.norm.weight", of.value_dim).float().unsqueeze(0)
        self._gate = Gate(GateKind.NORM_THEN_SILU, norm, config.norm_eps)
        keys, values = of.key_heads * of.key_dim, of.heads * of.value_dim
        self._heads = of.heads
        self._parts, self._sizes = (keys, keys, values), (2 * keys + values, values, of.heads, of.heads)
        self._leave = builder.linear(f"{name}.out_proj", (config.hidden_size,), values, False)

    def add_to(self, x: torch.Tensor, total: torch.Tensor, step: LayerInputs, then: Norm | None = None) -> torch.Tensor:
        states, ops = step.kv.states, self._ops
        assert states is not None
        given, gate, rate, decay = self._enter(x).split(self._sizes, dim=1)
        given = ops.convolve(ConvolutionInputs(given), self._convolution, states.inputs(self._layer), step.batch)
        query, key, value = given.split(self._parts, dim=1)
        inputs = RecurrenceInputs(query, key, value, decay, rate)
        out = ops.recur(inputs, self._of, states.matrices(self._layer), step.batch)
        heads = out.view(len(out), self._heads, -1)
        ops.gate(heads, gate, self._gate)
        return self._leave.add_to(out, total, then)


class Mamba2:
    """Mamba-2: a recurrence over a convolution of queries, keys and values, and a norm of its gated output."""

    def __init__(
        self,
        builder: Builder,
        layer: int,
        name: str,
        *,
        limits: tuple[float, float],
        has_bias: bool,
        adjust: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        of, config = settings_of(builder), builder.config
        values, keys = of.heads * of.value_dim, of.key_heads * of.key_dim
        self._ops, self._layer = builder.ops.recurrent, state_index(builder, layer)
        self._sizes, self._parts = (values, of.channels, of.heads), (values, keys, keys)
        hidden = config.hidden_size
        self._enter = builder.linear(f"{name}.in_proj", (sum(self._sizes),), hidden, has_bias)
        self._convolution = convolution(builder, f"{name}.conv1d", has_bias=config.conv_bias, is_gated=True)
        log_a, bias, skip = (builder.tensor(f"{name}.{part}", of.heads).float() for part in ("A_log", "dt_bias", "D"))
        self._of = Recurrence(of.key_heads, log_a, bias, skip, *limits)
        norm = builder.tensor(f"{name}.norm.weight", values).float().view(of.key_heads, -1)
        self._gate = Gate(GateKind.SILU_THEN_NORM, norm, config.norm_eps)
        self._groups = of.key_heads
        leave = builder.linear(f"{name}.out_proj", (hidden,), values, has_bias)
        self._leave = leave if adjust is None else Adjusted(leave, adjust)

    def add_to(self, x: torch.Tensor, total: torch.Tensor, step: LayerInputs, then: Norm | None = None) -> torch.Tensor:
        states, ops = step.kv.states, self._ops
        assert states is not None
        gate, given, decay = self._enter(x).split(self._sizes, dim=1)
        given = ops.convolve(ConvolutionInputs(given), self._convolution, states.inputs(self._layer), step.batch)
        value, key, query = given.split(self._parts, dim=1)
        inputs = RecurrenceInputs(query, key, value, decay)
        out = ops.recur(inputs, self._of, states.matrices(self._layer), step.batch)
        groups = out.view(len(out), self._groups, -1)
        ops.gate(groups, gate, self._gate)
        return self._leave.add_to(out, total, then)


class GatedAttention:
    """Attention of queries, gates, keys and values, whose output the logistic function of the gate multiplies."""

    def __init__(self, builder: Builder, inner: SelfAttention) -> None:
        self._ops, self._of = builder.ops.recurrent, inner.parts

    def add_to(self, x: torch.Tensor, total: torch.Tensor, step: LayerInputs, then: Norm | None = None) -> torch.Tensor:
        of = self._of
        joined = of.qkv(x).view(len(x), -1, of.dim)
        query, gate, key, value = joined.split([of.heads, of.heads, of.kv_heads, of.kv_heads], dim=1)
        out = attended(of, (query, key, value), step)
        self._ops.gate(out.view(len(x), 1, -1), gate.flatten(1), _SIGMOID)
        return of.output.add_to(out, total, then)


class SharedExperts:
    """Experts, and an MLP that all tokens use, which `gate` multiplies by the logistic function of its product."""

    def __init__(
        self, builder: Builder, experts: ExpertMLP, shared: tuple[Linear, Linear], gate: Linear | None
    ) -> None:
        self._ops, self._experts, self._gate = builder.ops.recurrent, experts, gate
        self._up, self._down = shared

    def add_to(self, x: torch.Tensor, total: torch.Tensor, step: LayerInputs, then: Norm | None = None) -> torch.Tensor:
        self._experts.add_to(x, total)
        if self._gate is None:
            return self._down.add_to(self._up(x), total, then)
        product = self._down(self._up(x))
        self._ops.gate(product.view(len(x), 1, -1), self._gate(x), _SIGMOID)
        return total.add_(product) if then is None else then.after(product, total)


def shared_experts(builder: Builder, part: str, experts: ExpertMLP, gate: str = "") -> SharedExperts:
    config, hidden = builder.config, builder.config.hidden_size
    gate_up = [f"{part}.gate_proj", f"{part}.up_proj"]
    up = builder.linear(gate_up, [config.shared_width] * 2, hidden, config.mlp_bias, activation=GATED)
    down = builder.linear(f"{part}.down_proj", (hidden,), config.shared_width, config.mlp_bias)
    shares = builder.linear(gate, (1,), hidden, False) if gate else None
    return SharedExperts(builder, experts, (up, down), shares)
