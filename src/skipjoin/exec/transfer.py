"""Carrying out moves of KV blocks overlapped with steps."""

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
# Interval at which `landed` polls the events of a stream while it waits, in seconds.
_POLL_S = 100e-6


class Ended(NamedTuple):
    """Moves that ended, each list in the order in which they ended. A failed move may have copied some blocks."""

    landed: list[Move]
    failed: list[Move]


class Copier(Protocol):
    """Carries out moves while the model runs. The model's thread makes all calls except `close`."""

    def run_blocking(self, moves: Sequence[Move]) -> Ended:
        """Carry out moves before the work that the calling thread computes, or queues on its stream, next. Moves out
        run first, since other moves may reuse their blocks, and moves in run last. Does not wait for moves started
        with `begin`.

        On a CPU the moves have ended on return. On CUDA they are queued: those in `landed` have landed once the stream
        has passed this point, hence before any slice of the step runs. A failed move costs only its own request's KV.
        """
        ...

    def begin(self, moves: Sequence[Move]) -> None:
        """Start moves after those in flight, and after all work that the calling thread has computed, or queued on its
        stream, so far. Returns at once."""
        ...

    def landed(self, timeout_s: float = 0.0) -> Ended:
        """The moves that ended since the last call. If none has ended and some are in flight, waits up to `timeout_s`
        seconds for one."""
        ...

    def close(self) -> None:
        """Drop the moves that have not started and wait for the running one. No method may be called afterwards."""
        ...


def copier_for(store: KVStore) -> Copier:
    """The copier for the store's device."""
    return StreamCopier(store) if store.device.tensor.is_cuda else ThreadCopier(store)


def log_failure(move: Move, error: BaseException) -> None:
    """Log why a move failed. The request's KV is lost; the request continues."""
    _log.error(
        "copying %d KV blocks of %s, %s, failed: %s",
        len(move.source), f"request {move.request.id}" if move.request is not None else "the prefix cache",
        move.direction.value, error, exc_info=error,
    )  # fmt: skip


def copy_in_order(store: KVStore, moves: Sequence[Move]) -> Ended:
    """Carry out moves on the calling thread, or queue them on its stream; moves out first, moves in last."""
    ended = Ended([], [])
    for move in sorted(moves, key=lambda move: _ORDER[move.direction]):
        try:
            store.copy(move)
        except Exception as error:
            log_failure(move, error)
            ended.failed.append(move)
        else:
            ended.landed.append(move)
    return ended


class ThreadCopier:
    """Copies on a CPU, one move after the other on a thread of its own.

    The store's copy runs on that thread alone: it uses no torch operation, hence none of the model's threads. Only
    without a compiler do moves to a host pool of 8 bits use some.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._on_way: deque[tuple[Move, Future[None]]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="skipjoin-copy")

    def run_blocking(self, moves: Sequence[Move]) -> Ended:
        return copy_in_order(self._store, moves)

    def begin(self, moves: Sequence[Move]) -> None:
        self._on_way.extend((move, self._thread.submit(self._store.copy, move)) for move in moves)

    def landed(self, timeout_s: float = 0.0) -> Ended:
        ended, on_way = Ended([], []), self._on_way
        if on_way and timeout_s > 0:
            wait([on_way[0][1]], timeout_s)
        # One thread runs the copies, so they end in order.
        while on_way and on_way[0][1].done():
            move, copy = on_way.popleft()
            if (error := copy.exception()) is None:
                ended.landed.append(move)
            else:
                log_failure(move, error)
                ended.failed.append(move)
        return ended

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


class StreamCopier:
    """Copies on CUDA, between the device and a page-locked host pool: one stream per direction, since the link carries
    both at once, and the model's own stream for blocking moves.

    No ordering is needed beyond the wait for the model's stream in `begin`:

    - Blocking moves are queued on the model's stream between the previous step and this one. They read what all earlier
      steps wrote, and later work on that stream may write where they read. They overtake overlapped moves.
    - An overlapped move waits for the work on the model's stream at the time of `begin`: all earlier steps, and the
      blocking moves of this and earlier plans. This makes the target blocks of moves in safe: the source blocks of a
      blocking move out are free at once; every other block becomes free when the plan or move that uses it is settled,
      hence has passed on its stream.
    - No two overlapped moves share a block. The ledger fences source and target until the move has landed, so that no
      other move or step can use them; a move back starts after the move out has landed. A copy for the prefix cache
      alone has no fence around its source: where something writes there before it has landed, nothing reads the copy.
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
                    # After a failure too: copies queued before it still use the move's blocks.
                    end = torch.cuda.Event()
                    end.record(stream)
                    on_way.append((move, end, has_failed))

    def landed(self, timeout_s: float = 0.0) -> Ended:
        deadline = time.perf_counter() + timeout_s
        while not (ended := self._ended()).landed and not ended.failed and time.perf_counter() < deadline:
            if not any(lane.on_way for lane in self._lanes.values()):
                break
            time.sleep(_POLL_S)
        return ended

    def close(self) -> None:
        # Work queued on a stream cannot be cancelled; the pools must live until it ends.
        for lane in self._lanes.values():
            lane.stream.synchronize()

    def _ended(self) -> Ended:
        """The moves that have ended so far; on each stream they end in order."""
        ended = Ended([], [])
        for _, on_way in self._lanes.values():
            while on_way and on_way[0][1].query():
                move, _, has_failed = on_way.popleft()
                (ended.failed if has_failed else ended.landed).append(move)
        return ended


class _Lane(NamedTuple):
    """One direction. on_way: each move in flight, the event recorded after its copies, and whether queueing them
    failed."""

    stream: torch.cuda.Stream
    on_way: deque[tuple[Move, torch.cuda.Event, bool]]
