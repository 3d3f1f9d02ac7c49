from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from skipjoin.model.attention.base import LayerInputs
from skipjoin.model.builder import Builder
from skipjoin.model.config import ExpertSettings
from skipjoin.model.modules import Widened
from skipjoin.model.ops.base import GATED, Experts, LayerParts, Linear, Norm, Routed
from skipjoin.model.ops.experts import route_by_scores
from skipjoin.model.parallel import Group
from skipjoin.model.self_attention import SelfAttention
from skipjoin.model.weights import Matrix, Stack

# Makes products of each expert: [hidden] to this rank's columns, gated, and these to [hidden].
MakeExperts = Callable[[], tuple[list[Linear], list[Linear]]]
Route = Callable[[torch.Tensor], Routed]


class ExpertMLP:
    """Experts and the product of their logits, [hidden] to [experts].

    Args:
        logits: Number of each rank's logits.
        route: Chooses by logits, if not by the largest ones.
    """

    def __init__(
        self, router: Linear, experts: Experts, group: Group, logits: Sequence[int], route: Route | None = None
    ) -> None:
        self.router, self.experts = router, experts
        self._group, self._logits, self._route = group, logits, route or experts.route

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        logits = self.router(x)
        if len(self._logits) == 1:
            return self.experts.add_to(x, self._route(logits), total, then)
        # Ranks of different processors may round differently, and must choose the same experts.
        logits = self._group.gather(logits, self._logits)
        self._group.count_once(total)
        self.experts.add_to(x, self._route(logits), total)
        self._group.all_reduce(total)
        return total if then is None else then(total)


class ExpertLayer:
    def __init__(self, norm: Norm, attention: SelfAttention, mlp_norm: Norm, mlp: ExpertMLP) -> None:
        self.norm = norm
        self._attention, self._mlp_norm, self._mlp = attention, mlp_norm, mlp

    @property
    def parts(self) -> LayerParts:
        return LayerParts(self.norm, self._attention.parts, self._mlp_norm, self._mlp.router, self._mlp.experts)

    def __call__(self, x: torch.Tensor, normed: torch.Tensor, step: LayerInputs, then: Norm | None) -> torch.Tensor:
        normed = self._attention.add_to(normed, x, step, self._mlp_norm)
        return self._mlp.add_to(normed, x, then)


def expert_mlp(
    builder: Builder, router: str, make: MakeExperts, *, has_bias: bool = False, correction: str = ""
) -> ExpertMLP:
    """Return an MLP with the router. Parameters are counted as far as a token uses them.

    Args:
        correction: Name of the tensor of corrections, if scores have them.
    """
    settings, shard = builder.config.experts, builder.shard
    assert settings is not None
    own = shard.experts(builder.config)
    # Never in codes: an error of the router replaces whole experts.
    weight = builder.tensor(f"{router}.weight", settings.count, builder.config.hidden_size, rows=own)
    bias = builder.tensor(f"{router}.bias", settings.count, rows=own) if has_bias else None
    routes: Linear = builder.ops.linear(weight, bias)
    if settings.routing is not None and builder.dtype != torch.float32:
        # Scores that 8 bits would make equal differ.
        routes = Widened(builder.ops.wide().linear(weight.float(), None))
    up, down = make()
    columns = len(shard.expert_columns(builder.config))
    builder.parameters += settings.per_token * 3 * builder.config.hidden_size * columns
    taken = sum(linear.weight_bytes for linear in (*up, *down))
    builder.weight_bytes += taken
    builder.expert_bytes += taken
    experts = builder.ops.experts(
        up, down, settings.per_token, among=settings.among_chosen, scale=builder.config.residual_scale
    )
    route: Route | None = None
    if (of := settings.routing) is not None:
        # One of ERNIE's dimensions is 1.
        shape = builder.weights.shape_of(correction) or (settings.count,)
        added = builder.tensor(correction, *shape).float().flatten() if of.corrects else None
        route = partial(_by_scores, settings, added)
    return ExpertMLP(routes, experts, builder.group, shard.expert_counts(builder.config), route)


def _by_scores(settings: ExpertSettings, correction: torch.Tensor | None, logits: torch.Tensor) -> Routed:
    assert settings.routing is not None
    return route_by_scores(logits, settings.per_token, settings.routing, correction)


def gated_experts(builder: Builder, name: str) -> MakeExperts:
    """Return a maker of experts whose tensors are their own, or joined for all.

    Joined ones are [experts, out, in], or [experts, in, out] as in the files of Qwen3-VL.
    """
    of, hidden = builder.config.experts, builder.config.hidden_size
    assert of is not None
    shapes = [builder.weights.shape_of(f"{name}.{part}") for part in ("gate_up_proj", "down_proj")]
    if None in shapes:
        return separate_experts(builder, name, ("gate_proj", "up_proj"), "down_proj")
    is_transposed = shapes == [(of.count, hidden, 2 * of.width), (of.count, of.width, hidden)]
    return joined_experts(builder, name, GATED, is_transposed=is_transposed)


def joined_experts(builder: Builder, name: str, gate: str, *, is_transposed: bool = False) -> MakeExperts:
    of, hidden = builder.config.experts, builder.config.hidden_size
    assert of is not None
    own = builder.shard.expert_columns(builder.config)
    rows = torch.cat([torch.arange(first + own.start, first + own.stop) for first in (0, of.width)])
    up = Stack(f"{name}.gate_up_proj", of.count, 2 * of.width, hidden, is_transposed, rows=rows)
    down = Stack(f"{name}.down_proj", of.count, hidden, of.width, is_transposed, columns=own)
    return stacked_experts(builder, up, down, gate)


def separate_experts(builder: Builder, name: str, gate_up: Sequence[str], down: str) -> MakeExperts:
    settings, weights, ops = builder.config.experts, builder.weights, builder.ops
    assert settings is not None
    count, width, hidden = settings.count, settings.width, builder.config.hidden_size
    own = builder.shard.expert_columns(builder.config)

    def make() -> tuple[list[Linear], list[Linear]]:
        ups: list[Linear] = []
        downs: list[Linear] = []
        for index in range(count):
            up = [Matrix(f"{name}.{index}.{part}", width, own) for part in gate_up]
            ups.append(weights.linear(ops, up, hidden, bias=False, activation=GATED))
            whole = Matrix(f"{name}.{index}.{down}", hidden, range(hidden))
            downs.append(weights.linear(ops, [whole], width, bias=False, columns=own))
        return ups, downs

    return make


def stacked_experts(
    builder: Builder, up: Stack, down: Stack, activation: str, *, has_bias: bool = False
) -> MakeExperts:
    def bias_of(stack: Stack) -> torch.Tensor:
        whole = builder.weights.take(f"{stack.name}_bias", stack.experts, stack.out)
        return whole if stack.rows is None else whole[:, stack.rows].contiguous()

    def make() -> tuple[list[Linear], list[Linear]]:
        shift = bias_of(up) if has_bias else None
        last = bias_of(down) if has_bias and builder.shard.tp_rank == 0 else None
        return (
            builder.weights.stacked(builder.ops, up, shift, activation),
            builder.weights.stacked(builder.ops, down, last),
        )

    return make
