"""Removes tokens from rows of logits by packed masks."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p

import numpy as np
import torch

from skipjoin.model.ops.build import load_library
from skipjoin.model.ops.threads import threads_here
from skipjoin.model.transfer import send, to_device

# Sets the logits of tokens outside the masks to -inf, in place. Arguments: contiguous float32 logits [n, vocab], the
# row of each mask, and the packed bits of the allowed tokens, int32 [len(rows), words].
RemoveTokens = Callable[[torch.Tensor, Sequence[int], np.ndarray], None]


def remove_tokens(logits: torch.Tensor, rows: Sequence[int], masks: np.ndarray) -> None:
    (_on_cpu() if logits.device.type == "cpu" else torch_remove_tokens)(logits, rows, masks)


@functools.cache
def _on_cpu() -> RemoveTokens:
    library = load_library()
    return torch_remove_tokens if library is None else compiled_remove_tokens(library)


def compiled_remove_tokens(library: ctypes.CDLL) -> RemoveTokens:
    call = library.skipjoin_remove_tokens
    call.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64]
    call.restype = None

    def remove(logits: torch.Tensor, rows: Sequence[int], masks: np.ndarray) -> None:
        places = np.array(rows, np.int64)
        call(
            logits.data_ptr(), logits.shape[1], places.ctypes.data, masks.ctypes.data, masks.shape[1], len(rows),
            threads_here(),
        )  # fmt: skip

    return remove


def torch_remove_tokens(logits: torch.Tensor, rows: Sequence[int], masks: np.ndarray) -> None:
    # Packed, because the copy is 32 times as large otherwise.
    index = to_device(torch.from_numpy(masks.view(np.uint8)), logits.device).int().flatten()
    biases = _bias_of_bytes(logits.device).index_select(0, index).view(len(rows), -1)[:, : logits.shape[1]]
    if len(rows) == len(logits):
        logits += biases
    else:
        logits.index_add_(0, send(rows, logits.device), biases)


@functools.cache
def _bias_of_bytes(device: torch.device) -> torch.Tensor:
    """Return the bias of each bit of each byte, float32 [256, 8]: 0 for an allowed token, else -inf."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return to_device(torch.from_numpy(np.where(bits, np.float32(0), np.float32(-np.inf))), device)
