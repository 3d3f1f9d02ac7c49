"""Page-locked host memory: what a GPU copies from and to by itself, beside its work."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Callable
from functools import partial

import torch

_log = logging.getLogger(__name__)
# Portable: locked for every context of this process. Mapped: kernels may read and write it.
_REGISTER_FLAGS = 1 | 2


def page_locked_bytes(size: int) -> tuple[torch.Tensor, Callable[[], None]]:
    """`size` zero bytes as a uint8 tensor, and what unlocks them once no copy uses them any more.

    Memory of ours is locked where it is. torch's own page-locked memory comes in powers of two, up to twice of what
    is wanted: it is the second choice, if there is so much. The last is memory that is not locked, with a warning:
    copies then hold up the steps.
    """
    memory = _mapped(size)
    if _lock(memory):
        return memory, partial(_unlock, memory)
    del memory
    rounded = 1 << max(0, size - 1).bit_length()
    if rounded <= os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        with contextlib.suppress(RuntimeError):
            return torch.zeros(size, dtype=torch.uint8, pin_memory=True), lambda: None
    _log.warning(
        "%.2f GiB for KV on the host cannot be page-locked: steps will wait for copies to and from it", size / (1 << 30)
    )
    return _mapped(size), lambda: None


def _mapped(size: int) -> torch.Tensor:
    """Zero bytes in whole pages of their own, large ones where the system gives them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A child process must not make copies of pages that the device writes to.
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(getattr(mmap, advice))
    return torch.frombuffer(memory, dtype=torch.uint8)


def _lock(memory: torch.Tensor) -> bool:
    """Let CUDA lock the memory; whether it did."""
    try:
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), _REGISTER_FLAGS))
    except (RuntimeError, AttributeError, TypeError, AssertionError) as error:
        _log.info("memory cannot be registered with CUDA: %s", error)
        return False
    if code:
        _log.info("memory cannot be registered with CUDA: error %d", code)
        _forget_error()
    return not code


def _forget_error() -> None:
    """CUDA keeps an error until it is asked for, and the next kernel that is launched would be blamed for it."""
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.ones(1, device="cuda")


def _unlock(memory: torch.Tensor) -> None:
    # At the end of a process CUDA may be gone before us, and with it the lock.
    with contextlib.suppress(Exception):
        if int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())):
            _forget_error()
