from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from skipjoin.model.cuda import one_line
from skipjoin.model.parallel import Group, GroupError, Shard

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed has it only at run time

_log = logging.getLogger(__name__)
# Beyond this size, reading all tensors of all ranks takes longer than two rounds over parts of them.
MAX_GATHERED_BYTES = 256 << 10
# Beyond this size, having every GPU read everything takes longer than a ring.
MAX_BYTES = 256 << 10
# Types that the one-shot kernel adds, 16 bytes at a time.
_DTYPES, _STEP = (torch.bfloat16, torch.float32), 16


class TorchGroup(Group):
    """`Group` over torch.distributed. A process has one rank and at most one group at a time.

    NCCL is for CUDA, except for small sums; it is not tested on several devices yet. `timeout_s` limits one call; the
    first call, until all ranks have joined.
    """

    def __init__(self, shard: Shard, store: Store, *, backend: str = "gloo", timeout_s: float) -> None:
        super().__init__(shard)
        self._is_nccl = backend == "nccl"
        self._small: OneShotSum | None = None
        self._sending: tuple[dist.Work, torch.Tensor] | None = None
        self._stage: dist.ProcessGroup | None = None
        timeout = timedelta(seconds=timeout_s)
        with self._group_errors("joining the group"):
            dist.init_process_group(backend, store=store, rank=shard.rank, world_size=shard.ranks, timeout=timeout)
            # All ranks must create all groups, in the same order.
            for stage in range(shard.pp_size):
                first = stage * shard.tp_size
                made = dist.new_group(list(range(first, first + shard.tp_size)), timeout=timeout)
                if stage == shard.pp_rank:
                    self._stage = made
            if self._is_nccl and shard.tp_size > 1 and self._stage is not None:
                self._small = one_shot_sum(self._stage, torch.device("cuda", torch.cuda.current_device()))

    def count_once(self, total: torch.Tensor) -> None:
        if self.shard.tp_rank:
            total.zero_()

    def all_reduce(self, x: torch.Tensor) -> None:
        if self.shard.tp_size == 1:
            return
        with self._group_errors("adding up"):
            if self._small is not None and self._small.takes(x):
                self._small.add_up(x)
            elif self.shard.tp_size == 2:  # the order of two terms does not matter
                dist.all_reduce(x, group=self._stage)
            else:
                add_in_rank_order(x, self.shard.tp_size, self._stage)

    def gather(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        if self.shard.tp_size == 1:
            return part
        widest = max(sizes)
        padded = F.pad(part, (0, widest - part.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        with self._group_errors("gathering logits"):
            dist.all_gather(parts, padded, group=self._stage)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def send(self, x: torch.Tensor) -> None:
        x = x.contiguous()
        with self._group_errors("sending to the next stage"):
            self._end_sending()
            work = dist.isend(x, self.shard.rank + self.shard.tp_size)
        assert work is not None
        self._sending = (work, x)

    def receive(self, x: torch.Tensor) -> None:
        begin = time.perf_counter()
        with self._group_errors("receiving from the previous stage"):
            dist.recv(x, self.shard.rank - self.shard.tp_size)
            if x.is_cuda:
                torch.cuda.current_stream(x.device).synchronize()
        self.waited_s += time.perf_counter() - begin

    def close(self) -> None:
        # Connections close with the last reference to their group.
        self._sending = self._stage = self._small = None
        if not dist.is_initialized():
            return
        if self._is_nccl:
            # An orderly exit waits for queued work, hence for ranks that may be lost.
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()

    def _end_sending(self) -> None:
        if self._sending is not None:
            self._sending[0].wait()
            self._sending = None

    @contextmanager
    def _group_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise GroupError(f"{self.shard.name} failed in {doing}: {error}") from error


def add_in_rank_order(x: torch.Tensor, ranks: int, group: dist.ProcessGroup | None) -> None:
    """Replace `x` by its sum over the group, adding the ranks' elements in the same order everywhere.

    `all_reduce` of Gloo and NCCL begins with another rank in each part of a tensor. From three ranks on, the sum of a
    row would thus depend on its batch.
    """
    flat = x.view(-1)
    if x.nbytes <= MAX_GATHERED_BYTES:
        parts = [torch.empty_like(flat) for _ in range(ranks)]
        dist.all_gather(parts, flat, group=group)
        flat.copy_(_added(parts))
        return
    # Each rank adds one part of the tensor.
    rest = -len(flat) % ranks
    padded = F.pad(flat, (0, rest)) if rest else flat
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    total = _added(received.view(ranks, -1).unbind())
    dist.all_gather(list(padded.view(ranks, -1).unbind()), total, group=group)
    if rest:
        flat.copy_(padded[: len(flat)])


def _added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add all parts to the first, rounding after each addition, as the one-shot kernel does."""
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


class OneShotSum:
    """One-shot all-reduce on one machine, several times as fast as NCCL's rings for a decode's few kilobytes."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # Each rank may see a single GPU as number 0, and torch would take them for the same one.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        from torch.distributed import _symmetric_memory as symmetric  # noqa: PLC0415 (for cards)

        self._group = group
        self._held = symmetric.empty(MAX_BYTES, dtype=torch.uint8, device=device)
        self._shared: Any = symmetric.rendezvous(self._held, group)

    @staticmethod
    def takes(x: torch.Tensor) -> bool:
        return x.dtype in _DTYPES and x.is_contiguous() and x.nbytes <= MAX_BYTES and x.nbytes % _STEP == 0

    def add_up(self, x: torch.Tensor) -> None:
        held = self._held[: x.nbytes].view(x.dtype)
        held.copy_(x.view(-1))
        torch.ops.symm_mem.one_shot_all_reduce_out(held, "sum", self._group.group_name, x.view(-1))


def one_shot_sum(group: dist.ProcessGroup, device: torch.device) -> OneShotSum | None:
    """Return an all-reduce that works on all ranks, or None. All ranks must call this together."""
    found, why = None, "it adds up wrong"
    try:
        found = OneShotSum(group, device)
        probe = torch.full((64,), 2.0 + group.rank(), device=device)
        found.add_up(probe)
        size = group.size()
        works = bool((probe == 2.0 * size + size * (size - 1) / 2).all())
    except Exception as error:  # of the driver, or of GPUs that cannot reach each other's memory
        works, why = False, one_line(error)
    agreed = torch.tensor([float(works)], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    if agreed.item():
        return found
    _log.info("small sums over ranks use NCCL, as large ones do: %s", "another rank must" if works else why)
    return None
