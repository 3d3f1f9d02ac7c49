from __future__ import annotations

import logging
from collections.abc import Callable

from skipjoin.core.step import Direction, Move
from skipjoin.model.kv_cache import PagedKV, QuantizedKV
from skipjoin.model.ops.block_quant import BlockQuantizer, TorchQuantizer, block_quantizer

_log = logging.getLogger(__name__)


class QuantizedCopies:
    """Quantizes KV on swap-out and dequantizes it on swap-in (ALISE section 3.2)."""

    def __init__(self, device: PagedKV, host: QuantizedKV) -> None:
        self._device, self._host = device, host
        if not device.tensor.is_cuda:
            # Requested here because it may have to be compiled first.
            self._quantizer = block_quantizer()
        else:
            self._quantizer = (_kernels() if host.tensor.is_pinned() else None) or TorchQuantizer()
            # Compiled here rather than in the first step that needs it. Both blocks are zeros.
            self._run(lambda by: by.quantize(host, device, (0,), (0,), host.shape[1]))
            self._run(lambda by: by.dequantize(device, host, (0,), (0,)))

    def copy(self, move: Move) -> None:
        host, device = self._host, self._device
        if not move.source:
            return
        if move.direction is Direction.OUT:
            last = move.tokens - (len(move.source) - 1) * device.block_size
            self._run(lambda by: by.quantize(host, device, move.target, move.source, last))
        else:
            self._run(lambda by: by.dequantize(device, host, move.target, move.source))

    def _run(self, work: Callable[[BlockQuantizer], None]) -> None:
        try:
            work(self._quantizer)
        except Exception as error:  # the compiler or the driver may not support the kernels
            if isinstance(self._quantizer, TorchQuantizer):
                raise
            _log.warning("the kernels that quantize KV fail, so torch's operations do it, slower: %s", error)
            self._quantizer = TorchQuantizer()
            work(self._quantizer)


def _kernels() -> BlockQuantizer | None:
    try:
        from skipjoin.model.kernels.block_quant import TritonQuantizer  # noqa: PLC0415 (an optional back end)
    except ImportError:
        return None
    return TritonQuantizer()
