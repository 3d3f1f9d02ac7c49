from __future__ import annotations

from collections.abc import Sequence

import torch

from skipjoin.core.step import Direction, Move, StateMove, StateSizes
from skipjoin.exec.copy_engine import CopyEngine, OptionalKernel, Pairs, copy_engine
from skipjoin.kv_format import SWAP_FORMATS, CacheFormat
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import AUTO, PagedKV, SwapPool
from skipjoin.model.ops.block_copy import span_copy
from skipjoin.model.parallel import WHOLE, Shard
from skipjoin.model.state_cache import StateCache
from skipjoin.model.transfer import to_device


class SpanCopies:
    """Copies slots between blocks (bidirectional sharing, BROS section 5), on CUDA as one kernel launch if possible."""

    def __init__(self, device: PagedKV, host: PagedKV) -> None:
        self._device = device
        is_cuda = device.tensor.is_cuda
        self._is_usable = len(device.head_views()) == 1 and (not is_cuda or host.tensor.is_pinned())
        self._kernel = OptionalKernel(
            "block_copy", "copy_spans", "slots are copied one by one", is_usable=is_cuda and self._is_usable
        )
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
        views, others = target.head_views(), source.head_views()
        if self._is_usable and not self._device.tensor.is_cuda:
            to, rows = views[0], others[0]
            shape = to.shape[1], size, to.shape[3] * to.element_size()
            self._copy(to.data_ptr(), rows.data_ptr(), shape, (move.target, move.source, firsts, counts))
        elif not self._launch(target, source, torch.tensor((move.target, move.source, firsts, counts))):
            for block, other, (first, count) in zip(move.target, move.source, move.spans, strict=True):
                slots = slice(first, first + count)
                for to, rows in zip(views, others, strict=True):
                    to[block, :, slots].copy_(rows[other, :, slots], non_blocking=True)

    def _launch(self, target: PagedKV, source: PagedKV, spans: torch.Tensor) -> bool:
        device = self._device.tensor.device
        return self._kernel.runs(lambda copy: copy(target.head_view(), source.head_view(), to_device(spans, device)))


class KVStore:
    """KV blocks of both tiers in block-major layout, so that a block moves as one contiguous copy.

    `states` are slots for state that is no KV, whose rows move as they are.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        device_blocks: int,
        cpu_blocks: int,
        block_size: int,
        shard: Shard = WHOLE,
        of: CacheFormat = AUTO,
        swap_dtype: str = "auto",
        link_bytes_per_s: float | None = None,
        states: StateSizes | None = None,
    ) -> None:
        self.states = states
        self.swap_dtype = swap_dtype
        self.link_bytes_per_s = link_bytes_per_s
        slots = 1 if states is None else states.device + states.snapshots
        self.device = PagedKV(device_blocks, block_size, config, dtype, device, of=of, shard=shard, state_slots=slots)
        self.cpu: PagedKV | SwapPool | None = None
        self._engine: CopyEngine | None = None
        self._spans: SpanCopies | None = None
        self._cpu_states: StateCache | None = None
        swap, pin = SWAP_FORMATS[swap_dtype], device.type == "cuda"
        if not cpu_blocks:
            return
        if swap.is_exact:
            self.cpu = PagedKV(cpu_blocks, block_size, config, dtype, "cpu", of=of, pin=pin, shard=shard)
            self._spans = SpanCopies(self.device, self.cpu)
        else:
            self.cpu = SwapPool(cpu_blocks, block_size, config, swap, pin=pin, shard=shard)
        self._engine = copy_engine(self.device, self.cpu)
        if states is not None and states.cpu:
            self._cpu_states = StateCache(states.cpu, config, dtype, "cpu", pin=pin, shard=shard)

    def link_seconds(self, move: Move) -> float:
        if self.link_bytes_per_s is None or self.cpu is None:
            return 0.0
        return move.blocks(self.device.block_size) * self.cpu.block_bytes / self.link_bytes_per_s

    def copy(self, move: Move) -> None:
        if self.cpu is None or self._engine is None:
            raise ValueError("a plan moves KV blocks, but there is no CPU pool")
        source = self.cpu if move.direction is Direction.IN else self.device
        target = self.cpu if move.direction is Direction.OUT else self.device
        if len(move.source) != len(move.target):
            raise ValueError(f"a move has {len(move.source)} blocks in source and {len(move.target)} in target")
        if not move.spans and -(-move.tokens // self.device.block_size) != len(move.source):
            raise ValueError(f"{move.tokens} tokens do not end in the last of {len(move.source)} blocks")
        _check("source", move.source, source)
        _check("target", move.target, target)
        if move.state is not None:
            self._copy_state(move.direction, move.state)
        if not move.spans:
            last = move.tokens - (len(move.source) - 1) * self.device.block_size
            self._engine.copy(move.direction, Pairs(move.source, move.target), last)
        elif self._spans is None or isinstance(target, SwapPool) or isinstance(source, SwapPool):
            raise ValueError(f"parts of a block do not move where the CPU tier has swap_dtype {self.swap_dtype}")
        else:
            self._spans.copy(target, source, move)

    def _copy_state(self, direction: Direction, state: StateMove) -> None:
        if self.device.states is None or self._cpu_states is None:
            raise ValueError("a plan moves state, but there is no pool for it in CPU memory")
        here, there = self.device.states.tensor, self._cpu_states.tensor
        source, target = (here, there) if direction is Direction.OUT else (there, here)
        target[state.target].copy_(source[state.source], non_blocking=True)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            assert self.device.states is not None
            self.device.states.tensor[target].copy_(self.device.states.tensor[source])


def _check(side: str, blocks: Sequence[int], pool: PagedKV | SwapPool) -> None:
    if blocks and not 0 <= min(blocks) <= max(blocks) < pool.num_blocks:
        wrong = next(block for block in blocks if not 0 <= block < pool.num_blocks)
        raise ValueError(f"{side} of a move must lie in [0, {pool.num_blocks}), got block {wrong}")
