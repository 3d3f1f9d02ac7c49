from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from skipjoin.core.step import Move
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.ops.block_copy import span_copy
from skipjoin.model.transfer import to_device

_log = logging.getLogger(__name__)

# Arguments: target and source pool as [blocks, heads, block_size, head_dim], and an int64 [4, n] tensor on the device
# with target blocks, source blocks, first slots and counts.
SpansKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class SpanCopies:
    """Copies slots between blocks (bidirectional sharing, BROS section 5), on CUDA as one kernel launch if possible."""

    def __init__(self, device: PagedKV, host: PagedKV) -> None:
        self._device = device
        self._kernel: SpansKernel | None = None
        if not device.tensor.is_cuda:
            # Requested here because it may have to be compiled first.
            self._copy = span_copy()
        elif host.tensor.is_pinned() and (kernel := _spans_kernel()) is not None:
            self._kernel = kernel
            # Compiled here rather than in the first step that needs it. Both blocks are zeros.
            self._launch(host, device, torch.tensor([[0], [0], [0], [1]]))

    def copy(self, target: PagedKV, source: PagedKV, move: Move) -> None:
        size = self._device.block_size
        if len(move.spans) != len(move.source) or sum(span.slots for span in move.spans) != move.tokens:
            raise ValueError(f"{len(move.spans)} spans of {len(move.source)} blocks do not hold {move.tokens} tokens")
        if not all(0 <= first < first + count <= size for first, count in move.spans):
            raise ValueError(f"spans of a move must lie in [0, {size}), got {move.spans}")
        firsts, counts = zip(*move.spans, strict=True)
        to, rows = target.head_view(), source.head_view()
        if not self._device.tensor.is_cuda:
            shape = to.shape[1], size, to.shape[3] * to.element_size()
            self._copy(to.data_ptr(), rows.data_ptr(), shape, (move.target, move.source, firsts, counts))
        elif not self._launch(target, source, torch.tensor((move.target, move.source, firsts, counts))):
            for block, other, (first, count) in zip(move.target, move.source, move.spans, strict=True):
                slots = slice(first, first + count)
                to[block, :, slots].copy_(rows[other, :, slots], non_blocking=True)

    def _launch(self, target: PagedKV, source: PagedKV, spans: torch.Tensor) -> bool:
        if self._kernel is None:
            return False
        try:
            self._kernel(target.head_view(), source.head_view(), to_device(spans, self._device.tensor.device))
        except Exception as error:  # the compiler or the driver may not support the kernel
            _log.warning("the kernel that copies KV slots fails, so they are copied one by one, slower: %s", error)
            self._kernel = None
            return False
        return True


def _spans_kernel() -> SpansKernel | None:
    try:
        from skipjoin.model.kernels.block_copy import copy_spans  # noqa: PLC0415 (an optional back end)
    except ImportError:
        return None
    return copy_spans
