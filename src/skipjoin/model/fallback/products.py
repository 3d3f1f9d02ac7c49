from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from skipjoin.model.ops.base import Linear

# Functions with a weight on the left.
_LEFT = (torch.Tensor.matmul, torch.Tensor.__matmul__, torch.matmul)
# Functions that return a tensor in another type.
CASTS = frozenset({"to", "type", "float"})


class PackedWeight(torch.Tensor):
    """Weight of a module without memory: calls of torch that multiply by it run `product`, which adds `bias`."""

    product: Linear
    bias: torch.Tensor | None

    @staticmethod
    def of(weight: torch.Tensor, product: Linear, bias: torch.Tensor | None, dtype: torch.dtype) -> PackedWeight:
        made = torch.Tensor._make_wrapper_subclass(PackedWeight, weight.shape, dtype=dtype, device=weight.device)
        made.product, made.bias = product, bias
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            x, weight, bias = args if len(args) == 3 else (*args, (kwargs or {}).get("bias"))
            return weight._multiply(x, bias)
        if function is torch.addmm:
            bias, x, weight = args
            return weight._multiply(x, bias)
        if function in _LEFT:
            weight, x = args
            return weight._multiply(x.transpose(-1, -2), None).transpose(-1, -2)
        with torch._C.DisableTorchFunctionSubclass():
            if function.__name__ in CASTS:
                return args[0] if args[0].dtype == torch.float32 else function(*args, **(kwargs or {}))
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, *ignored: Any) -> Any:
        raise TypeError(f"{function} cannot read a weight that is packed for products")

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        given = x.reshape(-1, x.shape[-1])
        rows = self.product(given if given.stride(-1) == 1 else given.contiguous())
        if bias is not None and bias is not self.bias:
            rows.add_(bias)
        return rows.view(*x.shape[:-1], rows.shape[-1])


class Experts:
    def __init__(self, up: list[Linear], down: list[Linear]) -> None:
        self._up, self._down = up, down

    def __call__(self, module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(hidden)
        # In the order of experts, so that a token's sum does not depend on the others.
        for expert in chosen.unique().tolist():
            if expert >= len(self._up):  # stands for no expert
                continue
            tokens, rank = torch.where(chosen == expert)
            inner = self._up[expert](hidden[tokens])
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            out = self._down[expert](inner.contiguous())
            if getattr(module, "has_post_expert_norm", False):  # older transformers have none
                out = module.post_expert_norm(out)
            total.index_add_(0, tokens, (out * weights[tokens, rank, None]).to(total.dtype))
        return total
