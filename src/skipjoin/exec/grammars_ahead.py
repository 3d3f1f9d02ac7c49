from __future__ import annotations

from concurrent.futures import Future

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


class GrammarsAhead:
    """Starts the grammars of requests, and computes the masks of the slow ones, outside of the steps.

    Clients take turns. All methods but `state_of` are called from one thread.
    """

    def __init__(self, mask: GrammarMask) -> None:
        self._mask = mask
        self._threads = FairThreads(
            max(1, min(_MAX_THREADS, usable_cpus() // 4)), "skipjoin-grammar", niceness=_NICENESS
        )
        self._states: dict[Request, Future[GrammarState]] = {}
        self._charged_s: dict[Request, float] = {}

    def start(self, request: Request) -> Future[GrammarState] | None:
        """Start to compile a request's grammar and its first mask. None if neither takes long."""
        params, options = _sampling(request).params, request.options
        structured = params.structured_outputs
        if structured is None:
            return None
        known = self._mask.grammars.known(structured, options.cache_salt)
        if known is None or known.is_slow or request.output:
            self._states[request] = self._threads.submit(_client(request), self._start, request, list(request.output))
            return self._states[request]
        started: Future[GrammarState] = Future()
        started.set_result(self._new(request))
        self._states[request] = started
        return None

    def is_slow(self, request: Request) -> bool:
        """Return whether a request's next mask should be computed by `advance`."""
        return request in self._states and self._state(request).is_slow

    def advance(self, request: Request) -> Future[None]:
        """Start to compute the mask after a request's output. No plan may contain the request until that is done."""
        state, output = self._state(request), list(request.output)
        return self._threads.submit(_client(request), self._mask.compute_ahead, state, output)

    def uncharged_s(self, request: Request) -> float:
        """Return the seconds that a request's masks took since the last call."""
        if request not in self._states:
            return 0.0
        before, now = self._charged_s.get(request, 0.0), self._state(request).seconds
        self._charged_s[request] = now
        return now - before

    def state_of(self, request: Request) -> GrammarState | None:
        return self._state(request) if request in self._states else None

    def on_finished(self, request: Request) -> None:
        if (state := self._states.pop(request, None)) is not None:
            state.cancel()
        self._charged_s.pop(request, None)

    def close(self) -> None:
        self._threads.close()

    def _state(self, request: Request) -> GrammarState:
        return self._states[request].result()

    def _start(self, request: Request, output: list[int]) -> GrammarState:
        state = self._new(request)
        self._mask.compute_ahead(state, output)
        return state

    def _new(self, request: Request) -> GrammarState:
        params, _, eos = _sampling(request)
        state = self._mask.start(params, request.prompt, eos, request.options.cache_salt)
        assert state is not None
        return state


def _client(request: Request) -> str:
    """Return whose grammars wait for each other. Without shares of capacity, they are those of one API key and salt."""
    return request.options.client or request.options.cache_salt


def _sampling(request: Request) -> Sampling:
    assert isinstance(request.sampling, Sampling)
    return request.sampling
