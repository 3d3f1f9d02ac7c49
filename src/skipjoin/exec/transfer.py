"""Moves on their way beside compute: who carries them, and which have ended."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol

import torch

from skipjoin.core.step import Direction, Move
from skipjoin.exec.kv_store import KVStore

_log = logging.getLogger(__name__)

# How often events of a stream are asked while somebody waits for one, in seconds.
_POLL_S = 100e-6


class Ended(NamedTuple):
    """Moves that ended, each list in the order in which they did. Of a failed one any part may have been copied."""

    landed: list[Move]
    failed: list[Move]


class Copier(Protocol):
    """Carries moves while the model runs. One thread, the model's, makes all calls but `close`."""

    def run_blocking(self, moves: Sequence[Move]) -> Ended:
        """Carry out moves ahead of what the calling thread computes, or queues on its stream, next; those out first,
        for the others may go where they leave. Does not wait for those that were begun.

        On a CPU they have ended on return. On CUDA they have been queued: those in `landed` have landed once the
        stream is past this point, hence once any slice of the step has. One that fails costs its own request only."""
        ...

    def begin(self, moves: Sequence[Move]) -> None:
        """Let the moves follow those that are on their way, and all that the calling thread has computed, or queued
        on its stream, so far. Returns at once."""
        ...

    def landed(self, timeout_s: float = 0.0) -> Ended:
        """The moves that ended since the last call. Where none has, waits up to `timeout_s` seconds for one; not if
        none is on its way."""
        ...

    def close(self) -> None:
        """Drop the moves that have not begun and wait for the one that has. Nothing may be called afterwards."""
        ...


def copier_for(store: KVStore) -> Copier:
    """The copier that suits the store's device."""
    return StreamCopier(store) if store.device.tensor.is_cuda else ThreadCopier(store)


def log_failure(move: Move, error: BaseException) -> None:
    """Tell why a move failed; the request's KV is lost, the request is not."""
    _log.error(
        "copying %d KV blocks of request %s, %s, failed: %s",
        len(move.source), move.request.id, move.direction.value, error, exc_info=error,
    )  # fmt: skip


def copy_in_order(store: KVStore, moves: Sequence[Move]) -> Ended:
    """Carry out moves on the calling thread, or on its stream, those out first."""
    ended = Ended([], [])
    for move in sorted(moves, key=lambda move: move.direction is Direction.IN):
        try:
            store.copy(move)
        except Exception as error:
            log_failure(move, error)
            ended.failed.append(move)
        else:
            ended.landed.append(move)
    return ended


class ThreadCopier:
    """Copies on a CPU: one thread of its own, move after move.

    The store's copy uses no thread but that one, so none of the model's, and no torch operation.
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
        # One thread: they end in the order in which they began.
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
    """Copies on CUDA, between the device and a page-locked host pool: a stream for each direction, as the link carries
    both at once, and the model's own stream for moves that a step waits for.

    Why no more order is needed than begin's waiting for the model's stream:

    - Moves blocking a step are queued on the model's stream between the step before and this one. So they read what
      all earlier steps wrote, and all that follows there may write where they read. They overtake what was begun.
    - A move that begins beside a step waits for what is on the model's stream by then: for all earlier steps, and for
      the blocking moves of this and of earlier plans. That is what makes room for the moves in: device blocks that a
      blocking move out leaves are free at once, every other block only when the plan, or the move, that has it has been
      settled, hence is past on its stream.
    - Two moves that were begun have no block in common. Source and target of either are fenced until it has landed, so
      the ledger cannot name them again, nor can a step touch them; and a move back begins after the one out has landed.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._device = store.device.tensor.device
        self._lanes = {direction: _Lane(torch.cuda.Stream(self._device), deque()) for direction in Direction}

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
        # What is queued on a stream cannot be taken back; it ends by itself, and the pools must live until then.
        for lane in self._lanes.values():
            lane.stream.synchronize()

    def _ended(self) -> Ended:
        """The moves that have ended by now. On each stream they end in the order in which they began."""
        ended = Ended([], [])
        for _, on_way in self._lanes.values():
            while on_way and on_way[0][1].query():
                move, _, has_failed = on_way.popleft()
                (ended.failed if has_failed else ended.landed).append(move)
        return ended


class _Lane(NamedTuple):
    """One direction. on_way: with each move the event that comes after its copies, and whether queueing them failed."""

    stream: torch.cuda.Stream
    on_way: deque[tuple[Move, torch.cuda.Event, bool]]
