from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from skipjoin.model.config import RoutingSettings
from skipjoin.model.ops.base import Linear, Norm, Routed

# Numbers that torch computes at once: it computes what is left at the end of a tensor with other bits.
_AT_ONCE = 32


def route(logits: torch.Tensor, per_row: int, *, among: bool, scale: float = 1.0) -> Routed:
    # `topk` leaves open which of equal numbers it returns.
    numbers = logits.float()
    ordered, chosen = numbers.sort(dim=-1, descending=True, stable=True)
    ordered, chosen = ordered[:, :per_row], chosen[:, :per_row].contiguous()
    if among:
        return Routed(chosen, ordered.softmax(-1) * scale)
    return Routed(chosen, (ordered - numbers.logsumexp(-1, keepdim=True)).exp() * scale)


def route_by_scores(
    logits: torch.Tensor, per_row: int, of: RoutingSettings, correction: torch.Tensor | None = None
) -> Routed:
    """Choose experts by their scores and corrections, the first of equal ones (DeepSeek-V3, section 2.1.2)."""
    numbers, count = logits.float(), logits.shape[1]
    padded = F.pad(numbers, (0, -count % _AT_ONCE))
    scores = padded.sigmoid()[:, :count] if of.squashes else numbers.softmax(-1)
    choice = scores if correction is None else scores + correction
    if of.groups > 1:
        by_group = choice.unflatten(1, (of.groups, -1))
        best = by_group.topk(min(of.best, by_group.shape[2]), dim=-1).values.sum(-1)
        left_out = best.sort(dim=-1, descending=True, stable=True).indices[:, of.kept :]
        choice = by_group.scatter(1, left_out[:, :, None].expand(-1, -1, by_group.shape[2]), -torch.inf).flatten(1)
    chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, :per_row].contiguous()
    shares = scores.gather(1, chosen)
    if of.sums_to_one:
        total = shares[:, 0].clone()
        for slot in range(1, per_row):  # the order of torch's additions may depend on the number of rows
            total += shares[:, slot]
        shares = shares / (total + of.added)[:, None]
    return Routed(chosen, shares * of.scale)


class LoopedExperts:
    def __init__(
        self, up: Sequence[Linear], down: Sequence[Linear], per_row: int, *, among: bool, scale: float = 1.0
    ) -> None:
        self.up, self.down = list(up), list(down)
        self.per_row, self.among, self.scale = per_row, among, scale

    def route(self, logits: torch.Tensor) -> Routed:
        return route(logits, self.per_row, among=self.among, scale=self.scale)

    def add_to(self, x: torch.Tensor, routed: Routed, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        rows = len(x)
        found = total.new_empty(rows * self.per_row, total.shape[1])
        slots = routed.chosen.view(-1)
        for expert in slots.unique().tolist():
            own = (slots == expert).nonzero().squeeze(1)
            found[own] = self.down[expert](self.up[expert](x[own // self.per_row]))
        parts = found.view(rows, self.per_row, -1)
        added = torch.zeros_like(total, dtype=torch.float32)
        for slot in range(self.per_row):
            added += routed.shares[:, slot, None] * parts[:, slot].float()
        if then is not None:
            return then.after(added.to(total.dtype), total)
        return total.copy_(total.float() + added)
