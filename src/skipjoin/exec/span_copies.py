from __future__ import annotations

import torch

from skipjoin.core.step import Move
from skipjoin.exec.copy_engine import OptionalKernel
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.ops.block_copy import span_copy
from skipjoin.model.transfer import to_device


class SpanCopies:
    """Copies slots between blocks (bidirectional sharing, BROS section 5), on CUDA as one kernel launch if possible."""

    def __init__(self, device: PagedKV, host: PagedKV) -> None:
        self._device = device
        is_cuda = device.tensor.is_cuda
        is_usable = is_cuda and host.tensor.is_pinned()
        self._kernel = OptionalKernel("block_copy", "copy_spans", "slots are copied one by one", is_usable=is_usable)
        # Compiled here rather than in the first step that needs it. Both blocks are zeros.
        if is_cuda:
            self._launch(host, device, torch.tensor([[0], [0], [0], [1]]))
        else:
            self._copy = span_copy()

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
        views, device = (target.head_view(), source.head_view()), self._device.tensor.device
        return self._kernel.runs(lambda copy: copy(*views, to_device(spans, device)))
