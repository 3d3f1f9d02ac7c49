from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class FairThreads:
    """Threads that run the calls of clients in turn, and those of one in order. Thread-safe."""

    def __init__(self, threads: int, *, niceness: int = 0) -> None:
        self._most, self._niceness = threads, niceness
        self._queues: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._is_closed = False

    def submit(self, client: str, work: Callable[..., ResultT], *args: object) -> Future[ResultT]:
        future: Future[ResultT] = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the threads are closed")
            self._queues.setdefault(client, deque()).append((future, partial(work, *args)))
            if not self._idle and len(self._threads) < self._most:
                thread = threading.Thread(target=self._run, name=f"skipjoin-grammar-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return future

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            waiting = [future for queue in self._queues.values() for future, _ in queue]
            self._queues.clear()
            self._changed.notify_all()
        for future in waiting:
            future.cancel()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        if self._niceness and hasattr(os, "setpriority"):
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + self._niceness)
        while (call := self._next()) is not None:
            future, work = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del call, future, work  # an idle thread keeps nothing alive

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            while not self._queues:
                if self._is_closed:
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            client, queue = self._queues.popitem(last=False)
            call = queue.popleft()
            if queue:
                self._queues[client] = queue  # behind the other clients
            return call
