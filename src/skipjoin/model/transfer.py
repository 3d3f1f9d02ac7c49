"""Copies of small values between host and device that do not block the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


def to_device(made: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device. To CUDA the copy is queued on the current stream, from page-locked memory: with
    other memory the host would wait for all work queued before it."""
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def send(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of these values on the device; does not block."""
    return to_device(torch.tensor(values, dtype=dtype), device)


class HostCopy(Generic[T]):
    """A value being copied to the host.

    make: builds the value from the tensors on the host. They are copied in the order of the current stream; later work
    may overwrite the device tensors.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], make: Callable[[list[torch.Tensor]], T]) -> None:
        self._make = make
        # From a device, this is page-locked memory that must not be read before the event.
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensors[0].device))

    def read(self) -> T:
        """The value; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._make(self._tensors)
