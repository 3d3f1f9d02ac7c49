from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from typing import NamedTuple

import numpy as np
import torch

from skipjoin.model.ops.build import declare, load_library
from skipjoin.model.ops.calls import CPP_DTYPES
from skipjoin.model.ops.threads import threads_here
from skipjoin.model.transfer import send, to_device

# The first two take contiguous float32 logits [n, vocab], the row of each mask, and the packed bits of the allowed
# tokens, int32 [len(rows), words]. The first sets the logits of other tokens to -inf, in place. The second returns the
# first token of each mask, int64 [len(rows)], whose logit is the largest of the mask's; each mask must have a token.
# The third returns the first token of each row with the largest logit; logits are contiguous, of any type of a model.
RemoveTokens = Callable[[torch.Tensor, Sequence[int], np.ndarray], None]
BestAllowed = Callable[[torch.Tensor, Sequence[int], np.ndarray], torch.Tensor]
Best = Callable[[torch.Tensor], torch.Tensor]


class MaskOps(NamedTuple):
    remove_tokens: RemoveTokens
    best_allowed: BestAllowed
    best: Best


def mask_ops(device: torch.device) -> MaskOps:
    return _on_cpu() if device.type == "cpu" else TORCH_MASK_OPS


@functools.cache
def _on_cpu() -> MaskOps:
    library = load_library()
    return TORCH_MASK_OPS if library is None else compiled_mask_ops(library)


def compiled_mask_ops(library: ctypes.CDLL) -> MaskOps:
    rows = c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64
    remove_in = declare(library.skipjoin_remove_tokens, *rows, c_int64)
    best_in = declare(library.skipjoin_best_allowed, *rows, c_void_p, c_int64)
    any_in = declare(library.skipjoin_best_tokens, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64)

    def remove(logits: torch.Tensor, rows: Sequence[int], masks: np.ndarray) -> None:
        places = np.array(rows, np.int64)
        remove_in(
            logits.data_ptr(), logits.shape[1], places.ctypes.data, masks.ctypes.data, masks.shape[1], len(rows),
            threads_here(),
        )  # fmt: skip

    def best_allowed(logits: torch.Tensor, rows: Sequence[int], masks: np.ndarray) -> torch.Tensor:
        places, found = np.array(rows, np.int64), np.empty(len(rows), np.int64)
        best_in(
            logits.data_ptr(), logits.shape[1], places.ctypes.data, masks.ctypes.data, masks.shape[1], len(rows),
            found.ctypes.data, threads_here(),
        )  # fmt: skip
        return torch.from_numpy(found)

    def best(logits: torch.Tensor) -> torch.Tensor:
        found = torch.empty(len(logits), dtype=torch.int64)
        kind = CPP_DTYPES.index(logits.dtype)
        any_in(kind, logits.data_ptr(), logits.shape[1], len(logits), found.data_ptr(), threads_here())
        return found

    return MaskOps(remove, best_allowed, best)


def _torch_remove_tokens(logits: torch.Tensor, rows: Sequence[int], masks: np.ndarray) -> None:
    biases = _biases(logits, masks)
    if len(rows) == len(logits):
        logits += biases
    else:
        logits.index_add_(0, send(rows, logits.device), biases)


def _torch_best_allowed(logits: torch.Tensor, rows: Sequence[int], masks: np.ndarray) -> torch.Tensor:
    if len(rows) < len(logits):
        logits = logits[send(rows, logits.device)]
    # Also an allowed token whose logit is -inf is better than all others.
    least = torch.finfo(logits.dtype).min
    return logits.nan_to_num(nan=least, neginf=least).add_(_biases(logits, masks)).argmax(-1)


def _torch_best(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":  # numpy is many times faster than torch
        return torch.from_numpy(logits.float().numpy().argmax(-1))
    return logits.argmax(-1)


TORCH_MASK_OPS = MaskOps(_torch_remove_tokens, _torch_best_allowed, _torch_best)


def _biases(logits: torch.Tensor, masks: np.ndarray) -> torch.Tensor:
    # Packed, because the copy is 32 times as large otherwise.
    index = to_device(torch.from_numpy(masks.view(np.uint8)), logits.device).int().flatten()
    return _bias_of_bytes(logits.device).index_select(0, index).view(len(masks), -1)[:, : logits.shape[1]]


@functools.cache
def _bias_of_bytes(device: torch.device) -> torch.Tensor:
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return to_device(torch.from_numpy(np.where(bits, np.float32(0), np.float32(-np.inf))), device)
