"""CPU memory in huge pages: with pages of 4 kB, address translation takes much of the time of reading it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

# Weights share chunks of this size, so that small tensors are in huge pages too.
_BUFFER_BYTES = 64 << 20
# Alignment: each tensor starts on a cache line of its own.
_ALIGN = 64


def large_page_bytes(size: int, *advice: str) -> torch.Tensor:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for name in (*advice, "MADV_HUGEPAGE"):
        # Where the system or the kernel lacks it, the memory works, but is slower.
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(getattr(mmap, name))
    return torch.frombuffer(memory, dtype=torch.uint8)


def return_freed_memory() -> None:
    """Return freed memory to the system, much of which the C library keeps after use by several threads."""
    with contextlib.suppress(AttributeError, OSError):  # only glibc has the function
        ctypes.CDLL(None).malloc_trim(0)


class Arena:
    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> torch.Tensor:
        if self._used + size > len(self._buffer):
            self._buffer = large_page_bytes(max(size, _BUFFER_BYTES))
            self._used = 0
        taken = self._buffer[self._used : self._used + size]
        self._used = -(-(self._used + size) // _ALIGN) * _ALIGN
        return taken
