from __future__ import annotations

import hashlib

import torch

from skipjoin.model.weights import Weights, wanted_part


class RandomWeights(Weights):
    """Random tensors that depend only on the seed, the name and the kind of device, so that ranks agree."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._seed = seed
        self._dtype, self._device = dtype, device

    def take(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=4).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest, "little"))
        # A GPU generates in the weights' type, since float32 would need twice the memory of the largest tensor.
        drawn_as = torch.float32 if self._device.type == "cpu" else self._dtype
        drawn = torch.randn(shape, generator=generator, device=self._device, dtype=drawn_as).mul_(0.02)
        # Not of a module that has a norm among others.
        inner = ".".join(name.lower().split(".")[-3:])
        if ("norm" in inner or "_ln." in name) and name.endswith("weight"):
            drawn += 1
        if (wanted := wanted_part(shape, rows, columns)) is not None:
            drawn = drawn[wanted].contiguous()
        return drawn.to(device=self._device, dtype=self._dtype)
