from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


def to_device(made: torch.Tensor, device: torch.device) -> torch.Tensor:
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def send(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=dtype), device)


class CpuCopy(Generic[T]):
    """Value that `make` builds from tensors being copied to the CPU; later work may overwrite the device tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor], make: Callable[[list[torch.Tensor]], T]) -> None:
        self._make = make
        # From a device, this is page-locked memory that must not be read before the event.
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensors[0].device))

    def read(self) -> T:
        if self._event is not None:
            self._event.synchronize()
        return self._make(self._tensors)
