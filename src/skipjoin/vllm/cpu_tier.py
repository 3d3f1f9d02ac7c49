from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from skipjoin.vllm.tier_options import TierOptions


@dataclass(slots=True)
class Copies:
    saves: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class StepCopies(KVConnectorMetadata):
    """Copies of one step; the overlapped ones may take until the next step begins."""

    blocking: Copies = field(default_factory=Copies)
    overlapped: Copies = field(default_factory=Copies)


class CpuTier(KVConnectorBase_V1):
    """CPU tier for the KV of requests that wait, for Skipjoin's scheduler only.

    The scheduler's process sends the next step's `copies` to the workers' instances.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.options = TierOptions.read(vllm_config)
        self.block_bytes = sum(
            group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in kv_cache_config.kv_cache_groups
        )
        self.total = self.options.blocks(self.block_bytes)
        self.copies = StepCopies()
        self._device_blocks = kv_cache_config.num_blocks
        # By layer, with blocks in the first dimension.
        self._device: list[torch.Tensor] = []
        self._cpu: list[torch.Tensor] = []
        self._stream: Any = None
        self._copied: Any = None  # event after the last overlapped copies

    # A request whose KV is lost is recomputed.
    requires_kv_delivery = False

    # -- scheduler ----------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> StepCopies:
        copies, self.copies = self.copies, StepCopies()
        return copies

    # -- worker -------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for name, layer in kv_caches.items():
            dims = [dim for dim in (0, 1) if layer.shape[dim] == self._device_blocks]
            if len(dims) != 1:
                raise ValueError(
                    f"CpuTier finds no dimension of {self._device_blocks} blocks in the KV cache of {name}, whose "
                    f"shape is {tuple(layer.shape)}: leave --kv-transfer-config out"
                )
            blocks = layer.movedim(dims[0], 0)
            self._device.append(blocks)
            shape = (self.total, *blocks.shape[1:])
            self._cpu.append(torch.empty(shape, dtype=layer.dtype, pin_memory=layer.is_cuda))
        if self._device[0].is_cuda:
            self._stream = torch.cuda.Stream()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Copy before the step overwrites blocks. vLLM calls this first in every step."""
        copies: StepCopies = kv_connector_metadata
        if self._stream is None:
            self._copy(copies.blocking)
            self._copy(copies.overlapped)
            return
        main = torch.cuda.current_stream()
        if self._copied is not None:
            main.wait_event(self._copied)
            self._copied = None
        self._copy(copies.blocking)
        if copies.overlapped.saves or copies.overlapped.loads:
            self._stream.wait_stream(main)
            with torch.cuda.stream(self._stream):
                self._copy(copies.overlapped)
                self._copied = self._stream.record_event()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def _copy(self, copies: Copies) -> None:
        for device, cpu in zip(self._device, self._cpu, strict=True):
            _copy_blocks(device, cpu, copies.saves)
            _copy_blocks(cpu, device, copies.loads)


def _copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    for one, other in pairs:
        target[other].copy_(source[one], non_blocking=True)
