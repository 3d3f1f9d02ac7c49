from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F

from skipjoin.model.one_shot import OneShotSum, one_shot_sum
from skipjoin.model.parallel import GroupError, Shard

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed has it only at run time


# Beyond this size, reading all tensors of all ranks takes longer than two rounds over parts of them.
MAX_GATHERED_BYTES = 256 << 10


class TorchGroup:
    """`Group` over torch.distributed. A process has one rank and at most one group at a time.

    NCCL is for CUDA, except for small sums; it is not tested on several devices yet. `timeout_s` limits one call; the
    first call, until all ranks have joined.
    """

    def __init__(self, shard: Shard, store: Store, *, backend: str = "gloo", timeout_s: float) -> None:
        self.shard = shard
        self.waited_s = 0.0
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
    """Replace `x` by its sum over the group, which adds the ranks' elements in the same order everywhere.

    `all_reduce` of Gloo and NCCL begins with another rank in each part of a tensor, so that from three ranks on the sum
    of a row would depend on which requests run together.
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
    """Add all parts to the first, rounding after each addition, as the kernel of `one_shot` does."""
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total
