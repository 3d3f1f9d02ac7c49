"""Moves on their way beside compute: who carries them, and which have ended."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol

import torch

from skipjoin.core.step import Move
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


class ThreadCopier:
    """Copies on a CPU: one thread of its own, move after move.

    The store's copy uses no thread but that one, so none of the model's, and no torch operation.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._on_way: deque[tuple[Move, Future[None]]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="skipjoin-copy")

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
    """Copies on CUDA: a stream of its own beside the model's, between the device and a pinned host pool.

    No device has run this yet: its test waits for one.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._device = store.device.tensor.device
        self._stream = torch.cuda.Stream(self._device)
        # With each move the event that comes after its copies, and whether queueing them failed.
        self._on_way: deque[tuple[Move, torch.cuda.Event, bool]] = deque()

    def begin(self, moves: Sequence[Move]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for move in moves:
                failed = False
                try:
                    self._store.copy(move)
                except Exception as error:
                    log_failure(move, error)
                    failed = True
                # After a failure too: copies queued before it still use the move's blocks.
                ended = torch.cuda.Event()
                ended.record(self._stream)
                self._on_way.append((move, ended, failed))

    def landed(self, timeout_s: float = 0.0) -> Ended:
        ended, on_way = Ended([], []), self._on_way
        deadline = time.perf_counter() + timeout_s
        while on_way and not on_way[0][1].query() and time.perf_counter() < deadline:
            time.sleep(_POLL_S)
        # One stream: they end in the order in which they began.
        while on_way and on_way[0][1].query():
            move, _, failed = on_way.popleft()
            (ended.failed if failed else ended.landed).append(move)
        return ended

    def close(self) -> None:
        # What is queued on a stream cannot be taken back; it ends by itself, and the pools must live until then.
        self._stream.synchronize()
