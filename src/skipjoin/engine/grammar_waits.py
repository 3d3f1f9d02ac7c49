from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from skipjoin.core.engine import EngineCore
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import Slice, StepResult
from skipjoin.engine.live_constraints import LiveConstraints
from skipjoin.exec.grammars_ahead import MaskState
from skipjoin.exec.rank_spec import ModelExecutor
from skipjoin.exec.sampling import is_constrained
from skipjoin.model.grammar_mask import too_expensive

# Maximum time that a step waits for masks, and its maximum share of the step before, so that most requests with slow
# masks need not sit out a step.
_MASK_WAIT_S, _MASK_WAIT_SHARE = 0.002, 0.25
# Seconds for a grammar and its first mask, or a mask, from the time that a thread begins. Within their other limits,
# they take 0.2 s at most of a core, and masks 0.1 s on a machine that is eight times slower.
_MAX_AHEAD_S = 10.0
# Called with a request, which may be finished, and the seconds that its grammar and masks took.
OnCost = Callable[[Request, float], None]


class GrammarWaits:
    """Keeps requests out of the plans while their grammar is compiled, or a slow mask is computed."""

    def __init__(self, core: EngineCore, executor: ModelExecutor, clock: Callable[[], float], on_cost: OnCost) -> None:
        self._core = core
        self._clock = clock
        self._executor = executor
        self._on_cost = on_cost
        self._live = LiveConstraints()
        self._pending: dict[Future[Any], Request] = {}
        self._begun: dict[Future[Any], float] = {}
        self._mask_wait_s = _MASK_WAIT_S

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, request: Request) -> None:
        """Let a new request wait for its grammar, unless that is ready. Call before `EngineCore.add`."""
        if not is_constrained(request.sampling) or self._executor.ahead is None:
            return
        if self._live.add(request):
            self._start(request)
        else:
            request.progress.await_grammar(True)

    def on_plan(self, slices: Iterable[Slice]) -> None:
        """Keep requests with slow masks out of further plans until the token of this one is known."""
        for request in _constrained(slices):
            state = self._state_of(request)
            request.progress.await_grammar(state is not None and state.is_slow)

    def on_result(self, result: StepResult) -> None:
        self._mask_wait_s = min(_MASK_WAIT_S, _MASK_WAIT_SHARE * result.seconds)
        for request in _constrained(result.plan.slices):
            if (state := self._state_of(request)) is None or request.progress.finish_reason is not None:
                continue
            self._charge(request, state)
            if request.progress.awaits_grammar or state.is_slow:
                request.progress.await_grammar(True)
                if not request.progress.in_flight:
                    assert self._executor.ahead is not None
                    self._pending[self._executor.ahead.advance(request)] = request

    def on_finished(self, request: Request) -> None:
        if is_constrained(request.sampling) and self._executor.ahead is not None:
            self._live.on_finished(request)

    def restart(self) -> None:
        self._live = LiveConstraints()
        self._pending.clear()
        self._begun.clear()
        for request in self._core.requests.values():
            request.progress.await_grammar(False)
            self.add(request)

    def release(self, timeout_s: float = 0.0) -> None:
        self._wait(self._pending, timeout_s)
        for future in [future for future in self._pending if future.done()]:
            self._release(future)
        self._end_overdue()
        for request in self._live.admitted():
            request.progress.await_grammar(False)
            self._start(request)

    def release_masks(self) -> None:
        begun = [future for future, request in self._pending.items() if request.progress.planned]
        self._wait(begun, self._mask_wait_s, for_all=True)
        self.release()

    def _start(self, request: Request) -> None:
        assert self._executor.ahead is not None
        started = self._executor.ahead.start(request)
        if started is not None and not started.done():
            request.progress.await_grammar(True)
            self._pending[started] = request

    def _state_of(self, request: Request) -> MaskState | None:
        return None if self._executor.ahead is None else self._executor.ahead.state_of(request)

    def _wait(self, futures: Iterable[Future[Any]], timeout_s: float, *, for_all: bool = False) -> None:
        if (ahead := self._executor.ahead) is not None and (waiting := list(futures)):
            ahead.wait(waiting, timeout_s, for_all=for_all)

    def _release(self, future: Future[Any]) -> None:
        request = self._pending.pop(future)
        self._begun.pop(future, None)
        if not future.cancelled():
            self._charge(request, future.result())
        request.progress.await_grammar(False)

    def _end_overdue(self) -> None:
        """End requests for which a thread works too long, because it cannot be interrupted."""
        now = self._clock()
        for future, request in self._pending.items():
            begun = self._begun.setdefault(future, now) if future.running() else now
            if now - begun > _MAX_AHEAD_S and request.progress.finish_reason is None:
                why = too_expensive(len(request.progress.output), f"its next step took more than {_MAX_AHEAD_S:g} s")
                self._core.abort(request.id, now, FinishReason.ERROR, why, is_refused=True)

    def _charge(self, request: Request, state: MaskState) -> None:
        if seconds := state.uncharged_s:
            state.uncharged_s = 0.0
            self._on_cost(request, seconds)


def _constrained(slices: Iterable[Slice]) -> list[Request]:
    return [slice_.request for slice_ in slices if slice_.samples and is_constrained(slice_.request.sampling)]
