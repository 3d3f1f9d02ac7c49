from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from skipjoin.core.step import LINK, Move
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.transfer import POLL_S, Copier, Ended, StreamCopier, ThreadCopier


def copier_for(store: KVStore) -> Copier:
    device = store.device.tensor.device
    is_cuda = device.type == "cuda"
    copier: Copier = StreamCopier(store) if is_cuda else ThreadCopier(store)
    if store.link_bytes_per_s is None:
        return copier
    if not is_cuda:
        return ThrottledCopier(copier, store.link_seconds)
    return ThrottledCopier(copier, store.link_seconds, drain=lambda: torch.cuda.current_stream(device).synchronize())


class ThrottledCopier:
    """Copier whose moves finish no earlier than on a full-duplex link of limited bandwidth.

    Each copy runs at full speed, so only the mean is limited. Overlapped moves queue for their direction, and blocking
    ones go first and delay them. `drain` waits for the steps before a blocking move.
    """

    def __init__(
        self,
        copier: Copier,
        seconds_of: Callable[[Move], float],
        *,
        drain: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._copier = copier
        self._seconds_of = seconds_of
        self._drain = drain
        self._clock, self._sleep = clock, sleep
        self._free_at = dict.fromkeys(LINK, 0.0)
        self._due: dict[Move, float] = {}  # earliest end of each overlapped move in flight
        self._copied = Ended([], [])  # complete, but not yet due

    def run_blocking(self, moves: Sequence[Move]) -> Ended:
        seconds = sum(self._seconds_of(move) for move in moves if move.direction in LINK)
        if not seconds:
            return self._copier.run_blocking(moves)
        self._drain()
        start = self._clock()
        ended = self._copier.run_blocking(moves)
        self._free_at = {direction: max(at, start) + seconds for direction, at in self._free_at.items()}
        self._due = {move: at + seconds if at > start else at for move, at in self._due.items()}
        self._sleep(max(0.0, start + seconds - self._clock()))
        return ended

    def begin(self, moves: Sequence[Move]) -> None:
        self._copier.begin(moves)
        now, free_at = self._clock(), self._free_at
        for move in moves:
            if move.direction in free_at:
                free_at[move.direction] = max(free_at[move.direction], now) + self._seconds_of(move)
                self._due[move] = free_at[move.direction]

    def poll(self, timeout_s: float = 0.0) -> Ended:
        deadline = self._clock() + timeout_s
        while not any(ended := self._ended()) and (self._due or any(self._copied)) and self._clock() < deadline:
            self._sleep(POLL_S)
        return ended

    def close(self) -> None:
        self._copier.close()

    def _ended(self) -> Ended:
        now, ended = self._clock(), Ended([], [])
        for copied, more, done in zip(self._copied, self._copier.poll(), ended, strict=True):
            copied.extend(more)
            done.extend(move for move in copied if self._due.get(move, now) <= now)
            copied[:] = [move for move in copied if self._due.get(move, now) > now]
            for move in done:
                self._due.pop(move, None)
        return ended
