"""Small values between host and device that nobody waits for: the host runs ahead of a device while it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


def to_device(made: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device. To CUDA the copy is queued on the current stream, from page-locked memory:
    from any other the host would wait until all that is queued before it has run."""
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def send(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of these values on the device; nobody waits for it."""
    return to_device(torch.tensor(values, dtype=dtype), device)


class HostCopy(Generic[T]):
    """A value on its way to the host, which is asked for when its tensors are computed.

    make: what the tensors, on the host, say. They are copied in the order of the current stream; what is queued later
    may overwrite them.
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
        """The value; waits for it."""
        if self._event is not None:
            self._event.synchronize()
        return self._make(self._tensors)
