from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from skipjoin.core.request import Request
from skipjoin.exec.sampling import Sampling
from skipjoin.model.fair_threads import FairThreads
from skipjoin.model.grammar_mask import GrammarMask, GrammarState
from skipjoin.system.container import usable_cpus

# Maximum number of threads that compile grammars and compute masks outside of the steps, for each four cores one. Both
# release the GIL.
_MAX_THREADS = 4
# Lets the model's threads go first, which wait for each other in every step.
_NICENESS = 10


class MaskState(Protocol):
    is_slow: bool
    uncharged_s: float


class MasksAhead(Protocol):
    """Compiles grammars and computes slow masks outside of the steps. A future is running once its work begins."""

    def start(self, request: Request) -> Future[Any] | None:
        """Start to compile a request's grammar and its first mask. None if neither takes long."""
        ...

    def advance(self, request: Request) -> Future[Any]:
        """Start to compute the mask after a request's output. No plan may contain the request until that is done."""
        ...

    def state_of(self, request: Request) -> MaskState | None: ...

    def wait(self, futures: Collection[Future[Any]], timeout_s: float, *, for_all: bool = False) -> None: ...


class GrammarsAhead:
    """`MasksAhead` on threads, on which clients take turns. One thread makes all calls except `state_of`.

    `on_begin` is called on a working thread with each request.
    """

    def __init__(self, mask: GrammarMask, on_begin: Callable[[Request], object] = lambda request: None) -> None:
        self._mask, self._on_begin = mask, on_begin
        self._threads = FairThreads(max(1, min(_MAX_THREADS, usable_cpus() // 4)), niceness=_NICENESS)
        self._states: dict[Request, Future[GrammarState]] = {}

    def start(self, request: Request) -> Future[GrammarState] | None:
        params, options = _sampling(request).params, request.options
        structured = params.structured_outputs
        if structured is None:
            return None
        known = self._mask.grammars.known(structured, options.cache_salt)
        if known is None or known.is_slow or request.progress.output:
            self._states[request] = self._threads.submit(
                client_of(request), self._start, request, list(request.progress.output)
            )
            return self._states[request]
        started: Future[GrammarState] = Future()
        started.set_result(self._new(request))
        self._states[request] = started
        return None

    def advance(self, request: Request) -> Future[GrammarState]:
        return self._threads.submit(
            client_of(request), self._advance, request, self._states[request].result(), list(request.progress.output)
        )

    def state_of(self, request: Request) -> GrammarState | None:
        started = self._states.get(request)
        return None if started is None else started.result()

    def wait(self, futures: Collection[Future[Any]], timeout_s: float, *, for_all: bool = False) -> None:
        wait(futures, timeout_s, ALL_COMPLETED if for_all else FIRST_COMPLETED)

    def on_finished(self, request: Request) -> None:
        if (state := self._states.pop(request, None)) is not None:
            state.cancel()

    def close(self) -> None:
        self._threads.close()

    def _start(self, request: Request, output: list[int]) -> GrammarState:
        self._on_begin(request)
        begin = time.thread_time()
        state = self._new(request)
        state.uncharged_s = time.thread_time() - begin
        self._mask.compute_ahead(state, output)
        return state

    def _advance(self, request: Request, state: GrammarState, output: list[int]) -> GrammarState:
        self._on_begin(request)
        self._mask.compute_ahead(state, output)
        return state

    def _new(self, request: Request) -> GrammarState:
        params, _, eos = _sampling(request)
        state = self._mask.start(params, request.prompt, eos, request.options.cache_salt)
        assert state is not None
        return state


def client_of(request: Request) -> str:
    """Return whose grammars wait for each other: without shares of capacity, those of one API key and salt."""
    return request.options.client or request.options.cache_salt


def _sampling(request: Request) -> Sampling:
    assert isinstance(request.sampling, Sampling)
    return request.sampling
