"""Links to ranks of small models, which run on threads of this process or in processes connected by Gloo."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from copiers import Keeps, LateCopier, keeps_nothing
from engines import CONFIGS, GRAMMARS, make_store
from torch import distributed

from skipjoin.core.step import Direction, Move
from skipjoin.exec.base import RankError
from skipjoin.exec.graphs import CudaRecorder, DecodeGraphs
from skipjoin.exec.ranks.rank import Rank
from skipjoin.exec.ranks.sharded import ShardedExecutor
from skipjoin.model.loader import random_model
from skipjoin.model.parallel import Group, Shard
from skipjoin.model.torch_group import TorchGroup
from support.thread_ranks import Meeting

# Timeouts in seconds for a plan or the start of the processes, and for one rank that waits for another.
PLAN_S = 30.0
START_S = 90.0
GROUP_S = 20.0
# Three layers give two stages unequal shares.
LAYERS = 3
PRELOADED = ["skipjoin.exec.ranks.rank", "skipjoin.model.loader", "skipjoin.model.torch_group"]
_INTERPRETER = threading.Lock()


class EverySecond:
    """Predicate that fails every second move in each of these directions, the same ones on all ranks."""

    def __init__(self, directions: Sequence[str]) -> None:
        self._seen = dict.fromkeys((Direction[name] for name in directions), 0)

    def __call__(self, move: Move) -> bool:
        if move.direction in self._seen:
            self._seen[move.direction] += 1
        return self._seen.get(move.direction, 1) % 2 == 0


def make_rank(
    group: Group,
    send: Callable[[bytes], object],
    family: str,
    *,
    device_blocks: int,
    cpu_blocks: int = 0,
    late: int | None = None,
    fails: Sequence[str] = (),
    keeps: Keeps = keeps_nothing,
    swap_dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    recorder: CudaRecorder | None = None,
) -> Rank:
    """Return a rank of the family's small model; see `engines.engine` for the other arguments.

    Args:
        fails: Directions in which half of the moves fail.
        recorder: Recorder of decode graphs; with one, attention supports padding.
    """
    shape = CONFIGS[family] | {"num_hidden_layers": LAYERS}
    attention = "auto" if recorder is None else "torch"  # which is replaced below
    model = random_model(shape, seed=3, group=group, attention=attention, kv_cache_dtype=kv_cache_dtype)
    store = make_store(model, device_blocks, cpu_blocks, fails=EverySecond(fails), keeps=keeps, swap_dtype=swap_dtype)
    graphs = None
    if recorder is not None:
        from skipjoin.model.attention.triton_backend import TritonAttention  # noqa: PLC0415

        class OneAtATime(TritonAttention):
            """Attention under a lock, because Triton's interpreter is not thread-safe."""

            def attend(self, *args: Any, **options: Any) -> torch.Tensor:
                with _INTERPRETER:
                    return super().attend(*args, **options)

        model.attention = OneAtATime()
        graphs = DecodeGraphs(model, store.device, recorder, sizes=[1, 3], longest=64)
    copier = None if late is None else LateCopier(store, late)
    return Rank(model, store, send, graphs=graphs, copier=copier, grammars=GRAMMARS)


class ThreadLink:
    """Link to a rank on a thread."""

    def __init__(
        self, make: Callable[[Callable[[bytes], None]], Rank], alter: Callable[[bytes], bytes] = lambda message: message
    ) -> None:
        self._alter = alter
        self._there: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._back: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(make,), daemon=True)
        self._thread.start()

    def _serve(self, make: Callable[[Callable[[bytes], None]], Rank]) -> None:
        torch.set_num_threads(1)
        rank = make(self._back.put)
        while (message := self._there.get()) is not None:
            rank.run(message)
        rank.close()

    def send(self, message: bytes) -> None:
        self._there.put(self._alter(message))

    def is_ready(self) -> bool:
        return not self._back.empty()

    def receive(self, timeout_s: float) -> bytes:
        try:
            return self._back.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None

    def close(self) -> None:
        self._there.put(None)
        self._thread.join(PLAN_S)


def thread_executor(
    tp: int, pp: int, family: str, alter: Callable[[int], Callable[[bytes], bytes]] | None = None, **store: Any
) -> ShardedExecutor:
    def link(group: Group) -> ThreadLink:
        altered = alter(group.shard.rank) if alter else lambda message: message
        return ThreadLink(lambda send: make_rank(group, send, family, **store), altered)

    links = [link(group) for group in Meeting(tp, pp).groups()]
    return ShardedExecutor(links, tp_size=tp, timeout_s=PLAN_S)


def _serve(rank: int, tp: int, pp: int, meeting_point: str, connection: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = distributed.FileStore(meeting_point, tp * pp)
    group = TorchGroup(Shard.of_rank(rank, tp, pp), store, timeout_s=GROUP_S)
    current: Rank | None = None
    connection.send_bytes(b"ready")
    # The loop ends when the other side closes the connection.
    with suppress(EOFError):
        while True:
            message = connection.recv_bytes()
            if message == b"c":
                connection.send_bytes(check_collectives(group))
            elif message[:1] == b"m":
                settings = json.loads(message[1:])
                current = make_rank(group, connection.send_bytes, settings.pop("family"), **settings)
            else:
                current.run(message[1:])
    group.close()


def check_collectives(group: TorchGroup) -> bytes:
    """Return the collectives with wrong results over all types of models; empty if all are right."""
    shard, wrong = group.shard, []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        own = torch.full((3, 2), 2.0 + shard.tp_rank, dtype=dtype)
        total = torch.ones((3, 2), dtype=dtype)
        group.count_once(total)
        total += own
        group.all_reduce(total)
        sizes = [4 + rank for rank in range(shard.tp_size)]  # ragged
        gathered = group.gather(torch.full((2, sizes[shard.tp_rank]), float(shard.tp_rank), dtype=dtype), sizes)
        expected = [float(rank) for rank, size in enumerate(sizes) for _ in range(size)]
        wrong += [f"{dtype} sum"] * (total.unique().tolist() != [1.0 + sum(range(2, 2 + shard.tp_size))])
        wrong += [f"{dtype} gather"] * (gathered.tolist() != [expected] * 2)
        wrong += [f"{dtype} sum of {rows} rows" for rows in (1, 8, 301) if not _adds_rows_alike(group, rows, dtype)]
        # Two in a row, because no side waits for the other.
        if not shard.is_last:
            for number in range(2):
                group.send(own * 10 + number)
        if not shard.is_first:
            for number in range(2):
                group.receive(total)
                wrong += [f"{dtype} sent {number}"] * (not torch.equal(total, own * 10 + number))
    return ", ".join(wrong).encode()


def _adds_rows_alike(group: TorchGroup, rows: int, dtype: torch.dtype) -> bool:
    """Return whether the sums of the last rows are those in the order of ranks, whatever rows are before them."""
    tp_size = group.shard.tp_size
    of_ranks = [torch.randn((301, 769), generator=torch.Generator().manual_seed(rank)) for rank in range(tp_size)]
    parts = [rank.to(dtype)[-rows:] for rank in of_ranks]
    total = parts[group.shard.tp_rank].clone()
    group.all_reduce(total)
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    return torch.equal(total, expected)


class ProcessLink:
    def __init__(self, process: multiprocessing.process.BaseProcess, connection: Connection) -> None:
        self.process, self._connection = process, connection

    def make(self, settings: dict[str, Any]) -> None:
        self._connection.send_bytes(b"m" + json.dumps(settings).encode())

    def send(self, message: bytes) -> None:
        with suppress(OSError):
            self._connection.send_bytes(b"p" + message)

    def is_ready(self) -> bool:
        return self._connection.poll()

    def receive(self, timeout_s: float) -> bytes:
        try:
            if not self._connection.poll(timeout_s):
                raise TimeoutError
            return self._connection.recv_bytes()
        except (EOFError, ConnectionError):
            raise RankError(f"process {self.process.pid} is gone") from None

    def close(self) -> None:
        """Keep the process, which may get another model."""


class Processes:
    """Processes of `tp` x `pp` ranks, which can run one model after another."""

    def __init__(self, tp: int, pp: int, folder: Path) -> None:
        # A fork server imports torch and forks the ranks before it has any threads.
        context = multiprocessing.get_context("forkserver")
        if forkserver._forkserver._preload_modules != PRELOADED:  # that of a simulation runs
            forkserver._forkserver._stop()
        context.set_forkserver_preload(PRELOADED)
        self.tp, self.pp = tp, pp
        self.links = []
        for rank in range(tp * pp):
            ours, theirs = context.Pipe()
            arguments = (rank, tp, pp, str(folder / "meeting"), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.links.append(ProcessLink(process, ours))
        for link in self.links:
            assert link.receive(START_S) == b"ready"

    def check_collectives(self) -> list[bytes]:
        for link in self.links:
            link._connection.send_bytes(b"c")
        return [link.receive(PLAN_S) for link in self.links]

    def executor(self, family: str, **store: Any) -> ShardedExecutor:
        for link in self.links:
            link.make({"family": family, **store})
        return ShardedExecutor(self.links, tp_size=self.tp, timeout_s=PLAN_S)


@contextmanager
def processes(tp: int, pp: int, folder: Path) -> Iterator[Processes]:
    started = Processes(tp, pp, folder)
    try:
        yield started
    finally:
        for link in started.links:
            link._connection.close()
        deadline = time.monotonic() + 5
        for link in started.links:
            link.process.join(max(0.0, deadline - time.monotonic()))
            if link.process.is_alive():
                link.process.kill()
                link.process.join()
