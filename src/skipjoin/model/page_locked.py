from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable
from functools import partial

import torch

from skipjoin.model.large_pages import large_page_bytes

_log = logging.getLogger(__name__)
# Portable: locked for every context of this process. Mapped: kernels may read and write it.
_REGISTER_FLAGS = 1 | 2
# A child process must not copy pages that the device writes.
_ADVICE = "MADV_DONTFORK"


def page_locked_bytes(size: int) -> tuple[torch.Tensor, Callable[[], None]]:
    """Return `size` zero bytes, and a function that unlocks them once no copy uses them.

    torch's own page-locked memory is rounded up to a power of two.
    """
    memory = large_page_bytes(size, _ADVICE)
    if _lock(memory):
        return memory, partial(_unlock, memory)
    del memory
    rounded = 1 << max(0, size - 1).bit_length()
    if rounded <= os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        with contextlib.suppress(RuntimeError):
            return torch.zeros(size, dtype=torch.uint8, pin_memory=True), lambda: None
    _log.warning(
        "%.2f GiB for KV in CPU memory cannot be page-locked: steps will wait for copies to and from it",
        size / (1 << 30),
    )
    return large_page_bytes(size, _ADVICE), lambda: None


def cpu_bytes(owner: object, size: int, *, pin: bool) -> torch.Tensor:
    if not pin:
        return large_page_bytes(size)
    memory, unlock = page_locked_bytes(size)
    # Unlocked with the owner, not at exit, since the end of the process unlocks everything.
    weakref.finalize(owner, unlock).atexit = False
    return memory


def _lock(memory: torch.Tensor) -> bool:
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
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.ones(1, device="cuda")


def _unlock(memory: torch.Tensor) -> None:
    # At exit CUDA may end first, which unlocks the memory.
    with contextlib.suppress(Exception):
        if int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())):
            _forget_error()
