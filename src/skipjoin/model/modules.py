from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from skipjoin.model.ops.base import Linear, LookedUp, Norm
from skipjoin.model.parallel import Group


class SummedLinear:
    """`Linear` summed over a stage. Products added to one total share an all-reduce, from `begins` to `ends`."""

    def __init__(self, linear: Linear, group: Group, begins: bool, ends: bool) -> None:
        self._linear, self._group, self._begins, self._ends = linear, group, begins, ends
        self.weight_bytes = linear.weight_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = self._linear(x)
        self._group.all_reduce(product)
        return product

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        if self._begins:
            self._group.count_once(total)
        self._linear.add_to(x, total)
        if self._ends:
            self._group.all_reduce(total)
        return total if then is None else then(total)


class Adjusted:
    """`Linear` whose product is normalized or scaled before it is added."""

    def __init__(self, linear: Linear, adjust: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.linear, self.adjust = linear, adjust
        self.weight_bytes = linear.weight_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.adjust(self.linear(x))

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        product = self(x)
        return total.add_(product) if then is None else then.after(product, total)


class Widened:
    """`Linear` in float32."""

    def __init__(self, linear: Linear) -> None:
        self._linear, self.weight_bytes = linear, linear.weight_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.float())

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        total.add_(self(x))
        return total if then is None else then(total)


class Unchanged:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def after(self, product: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return total.add_(product)


class ProjectionNorm:
    def __init__(self, norm: Norm) -> None:
        self._norm = norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x.flatten(1)).view(x.shape)


class SpreadNorm:
    def __init__(self, weight: torch.Tensor, eps: float, width: int, group: Group) -> None:
        self._weight, self._eps, self._width, self._group = weight.float(), eps, width, group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values = x.flatten(1).float()
        # In float64, because the order of torch's additions may depend on the number of rows.
        squares = values.square().sum(-1, keepdim=True, dtype=torch.float64).float()
        self._group.all_reduce(squares)
        values *= (squares / self._width + self._eps).rsqrt() * self._weight
        return values.to(x.dtype).view(x.shape)


class Embedding:
    def __init__(
        self, table: torch.Tensor | LookedUp, own: range, vocab_size: int, group: Group, scale: float = 1.0
    ) -> None:
        self.table = table
        self._own, self._vocab_size, self._group, self._scale = own, vocab_size, group, scale

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        found = self._found(ids)
        return found if self._scale == 1 else found.mul_(torch.tensor(self._scale, dtype=found.dtype).item())

    def _found(self, ids: torch.Tensor) -> torch.Tensor:
        if len(self._own) == self._vocab_size:
            return self._rows(ids)
        if ids.device.type == "cpu" and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise IndexError(f"token ids must be in [0, {self._vocab_size - 1}]")
        local = ids - self._own.start
        foreign = (local < 0) | (local >= len(self._own))
        found = self._rows(local.masked_fill_(foreign, 0)).masked_fill_(foreign[:, None], 0)
        self._group.all_reduce(found)
        return found

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.table) if isinstance(self.table, torch.Tensor) else self.table.rows(ids)
