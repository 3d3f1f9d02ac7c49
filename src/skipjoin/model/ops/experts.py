from __future__ import annotations

from collections.abc import Sequence

import torch

from skipjoin.model.ops.base import Linear, Norm, Routed


def route(logits: torch.Tensor, per_row: int, *, among: bool, scale: float = 1.0) -> Routed:
    # `topk` leaves open which of equal numbers it returns.
    numbers = logits.float()
    ordered, chosen = numbers.sort(dim=-1, descending=True, stable=True)
    ordered, chosen = ordered[:, :per_row], chosen[:, :per_row].contiguous()
    if among:
        return Routed(chosen, ordered.softmax(-1) * scale)
    return Routed(chosen, (ordered - numbers.logsumexp(-1, keepdim=True)).exp() * scale)


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
