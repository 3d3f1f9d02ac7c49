from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import torch

from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.cuda import use_device

T = TypeVar("T")


class OwnThread:
    def __init__(self, model: CausalLM, threads: int) -> None:
        self._pool = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="skipjoin-model", initializer=_begin, initargs=(model, threads)
        )

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self._pool.submit(work)

    def after_these(self, work: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # closed
            self._pool.submit(work)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class CallerThread:
    """The thread that asks for a result, which runs the calls up to it: with a busy CPU, another gains nothing."""

    def __init__(self, model: CausalLM, threads: int) -> None:
        self._model, self._threads = model, threads
        self._calls: deque[_Call[Any]] = deque()
        self._prepared: int | None = None  # the thread with the model's settings
        self._torch_threads = 1

    def submit(self, work: Callable[[], T]) -> Future[T]:
        call = _Call(work, self._run_until)
        self._calls.append(call)
        return call

    def after_these(self, work: Callable[[], object]) -> None:
        if self._calls:
            self._calls[-1].then.append(work)
        else:
            work()

    def close(self) -> None:
        self._calls.clear()

    def _run_until(self, last: Future[Any]) -> None:
        own = torch.get_num_threads()
        self._use_threads()
        try:
            while not last.done():
                self._calls.popleft().run()
        finally:
            torch.set_num_threads(own)  # which the caller may need for other work

    def _use_threads(self) -> None:
        if self._prepared != threading.get_ident():
            self._model.ops.use_threads(self._threads)
            self._prepared, self._torch_threads = threading.get_ident(), torch.get_num_threads()
        torch.set_num_threads(self._torch_threads)


class _Call(Future[T]):
    def __init__(self, work: Callable[[], T], run_until: Callable[[Future[Any]], None]) -> None:
        super().__init__()
        self._work, self._run_until = work, run_until
        self.then: list[Callable[[], object]] = []

    def result(self, timeout: float | None = None) -> T:
        self._run_until(self)
        return super().result(timeout)

    def run(self) -> None:
        try:
            self.set_result(self._work())
        except BaseException as error:
            self.set_exception(error)
        for work in self.then:
            work()


def _begin(model: CausalLM, threads: int) -> None:
    use_device(model.device)
    model.ops.use_threads(threads)
