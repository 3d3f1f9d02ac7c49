from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol

import torch

from skipjoin.core.step import LINK, Direction, Move
from skipjoin.exec.kv_store import KVStore

_log = logging.getLogger(__name__)

_ORDER = {direction: place for place, direction in enumerate((Direction.OUT, Direction.WITHIN, Direction.IN))}
# Interval at which `poll` reads the events of a stream while it waits, in seconds.
POLL_S = 100e-6


class Ended(NamedTuple):
    """Finished moves, in order. A failed move may have copied some blocks."""

    completed: list[Move]
    failed: list[Move]


class Copier(Protocol):
    """Executes moves. The model's thread makes all calls except `close`."""

    def run_blocking(self, moves: Sequence[Move]) -> Ended:
        """Execute moves before the next work of the calling thread or its stream: swap-outs first, swap-ins last.

        Moves started with `begin` are not waited for. A failed move loses the KV of its own request only.
        """
        ...

    def begin(self, moves: Sequence[Move]) -> None:
        """Start moves, without blocking, after those in flight and all prior work of the thread or stream."""
        ...

    def poll(self, timeout_s: float = 0.0) -> Ended:
        """Return moves that finished since the last call; wait up to `timeout_s` seconds for one in flight."""
        ...

    def close(self) -> None:
        """Drop moves that have not started and wait for the running one."""
        ...


def log_failure(move: Move, error: BaseException) -> None:
    _log.error(
        "copying %d KV blocks of %s, %s, failed: %s",
        len(move.source), f"request {move.request.id}" if move.request is not None else "the prefix cache",
        move.direction.value, error, exc_info=error,
    )  # fmt: skip


def copy_in_order(store: KVStore, moves: Sequence[Move]) -> Ended:
    ended = Ended([], [])
    for move in sorted(moves, key=lambda move: _ORDER[move.direction]):
        try:
            store.copy(move)
        except Exception as error:
            log_failure(move, error)
            ended.failed.append(move)
        else:
            ended.completed.append(move)
    return ended


class ThreadCopier:
    """Copies on a dedicated CPU thread, which (with a compiler) uses no torch threads."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._on_way: deque[tuple[Move, Future[None]]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="skipjoin-copy")

    def run_blocking(self, moves: Sequence[Move]) -> Ended:
        return copy_in_order(self._store, moves)

    def begin(self, moves: Sequence[Move]) -> None:
        self._on_way.extend((move, self._thread.submit(self._store.copy, move)) for move in moves)

    def poll(self, timeout_s: float = 0.0) -> Ended:
        ended, on_way = Ended([], []), self._on_way
        if on_way and timeout_s > 0:
            wait([on_way[0][1]], timeout_s)
        # One thread runs the copies, so they finish in order.
        while on_way and on_way[0][1].done():
            move, copy = on_way.popleft()
            if (error := copy.exception()) is None:
                ended.completed.append(move)
            else:
                log_failure(move, error)
                ended.failed.append(move)
        return ended

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


class StreamCopier:
    """Copies on CUDA between the device and a page-locked CPU pool, with one stream per direction.

    No ordering is needed beyond the wait for the model's stream in `begin`:

    - Blocking moves read what all earlier steps wrote, and later work on that stream may overwrite what they read.
    - An overlapped move waits for all earlier steps, and the blocking moves of this and earlier plans. Every block is
      freed when the plan or move that uses it is settled, except the source of a blocking swap-out.
    - No two overlapped moves share a block, because the ledger reserves source and target until the move finishes. A
      copy for the prefix cache leaves its source free, but is never read if that is written meanwhile.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._device = store.device.tensor.device
        self._lanes = {direction: _Lane(torch.cuda.Stream(self._device), deque()) for direction in LINK}

    def run_blocking(self, moves: Sequence[Move]) -> Ended:
        return copy_in_order(self._store, moves)

    def begin(self, moves: Sequence[Move]) -> None:
        model = torch.cuda.current_stream(self._device)
        for direction, (stream, on_way) in self._lanes.items():
            some = [move for move in moves if move.direction is direction]
            if not some:
                continue
            stream.wait_stream(model)
            with torch.cuda.stream(stream):
                for move in some:
                    has_failed = bool(copy_in_order(self._store, [move]).failed)
                    # Recorded after a failure too, since copies queued before it still use the move's blocks.
                    end = torch.cuda.Event()
                    end.record(stream)
                    on_way.append((move, end, has_failed))

    def poll(self, timeout_s: float = 0.0) -> Ended:
        deadline = time.perf_counter() + timeout_s
        while not (ended := self._ended()).completed and not ended.failed and time.perf_counter() < deadline:
            if not any(lane.on_way for lane in self._lanes.values()):
                break
            time.sleep(POLL_S)
        return ended

    def close(self) -> None:
        # Work queued on a stream cannot be cancelled, and the pools must outlive it.
        for lane in self._lanes.values():
            lane.stream.synchronize()

    def _ended(self) -> Ended:
        ended = Ended([], [])
        for _, on_way in self._lanes.values():
            while on_way and on_way[0][1].query():
                move, _, has_failed = on_way.popleft()
                (ended.failed if has_failed else ended.completed).append(move)
        return ended


class _Lane(NamedTuple):
    stream: torch.cuda.Stream
    on_way: deque[tuple[Move, torch.cuda.Event, bool]]
