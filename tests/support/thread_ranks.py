"""A fake of `Group` that runs the ranks of a model as threads of this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from skipjoin.model.parallel import GroupError, Shard

T = TypeVar("T")
# How long one rank waits for another.
TIMEOUT_S = 30.0


class Meeting:
    def __init__(self, tp_size: int, pp_size: int) -> None:
        self.tp_size, self.pp_size = tp_size, pp_size
        self.barriers = [threading.Barrier(tp_size) for _ in range(pp_size)]
        self.tables: list[list[torch.Tensor | None]] = [[None] * tp_size for _ in range(pp_size)]
        self.inboxes = [queue.SimpleQueue[torch.Tensor | None]() for _ in range(tp_size * pp_size)]

    def groups(self) -> list[ThreadGroup]:
        ranks = range(self.tp_size * self.pp_size)
        return [ThreadGroup(Shard.of_rank(rank, self.tp_size, self.pp_size), self) for rank in ranks]


class ThreadGroup:
    def __init__(self, shard: Shard, meeting: Meeting) -> None:
        self.shard = shard
        self.waited_s = 0.0
        self.calls = {"all_reduce": 0, "gather": 0, "send": 0, "receive": 0}
        self._meeting = meeting

    def count_once(self, total: torch.Tensor) -> None:
        if self.shard.tp_rank:
            total.zero_()

    def all_reduce(self, x: torch.Tensor) -> None:
        self.calls["all_reduce"] += 1
        first, *others = self._exchange(x)
        x.copy_(first)
        for other in others:
            x += other

    def gather(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        self.calls["gather"] += 1
        assert part.shape[1] == sizes[self.shard.tp_rank]
        return torch.cat(self._exchange(part), dim=1) if self.shard.tp_size > 1 else part

    def send(self, x: torch.Tensor) -> None:
        self.calls["send"] += 1
        self._meeting.inboxes[self.shard.rank + self.shard.tp_size].put(x.clone())

    def receive(self, x: torch.Tensor) -> None:
        self.calls["receive"] += 1
        try:
            found = self._meeting.inboxes[self.shard.rank].get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise GroupError(f"{self.shard.name}: nothing to receive") from None
        if found is None:
            raise GroupError(f"{self.shard.name}: the stage before is gone")
        assert found.shape == x.shape
        x.copy_(found)

    def close(self) -> None:
        for barrier in self._meeting.barriers:
            barrier.abort()
        for inbox in self._meeting.inboxes:
            inbox.put(None)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        barrier, table = self._meeting.barriers[self.shard.pp_rank], self._meeting.tables[self.shard.pp_rank]
        table[self.shard.tp_rank] = x.clone()
        try:
            barrier.wait(TIMEOUT_S)
            found = [entry for entry in table if entry is not None]
            barrier.wait(TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise GroupError(f"{self.shard.name}: another rank of the stage is gone") from None
        return found


def on_ranks(tp_size: int, pp_size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """Run `work` on all ranks concurrently and return its results, or raise the first cause of a failure."""
    groups = Meeting(tp_size, pp_size).groups()

    def guarded(group: ThreadGroup) -> T:
        torch.set_num_threads(1)
        try:
            return work(group)
        except BaseException:
            group.close()
            raise

    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(guarded, group) for group in groups]
        wait(futures, TIMEOUT_S)
        failures = [future.exception() for future in futures]
    # A `GroupError` is usually a consequence of another rank's failure.
    for failure in sorted(filter(None, failures), key=lambda failure: isinstance(failure, GroupError)):
        raise failure
    return [future.result() for future in futures]
