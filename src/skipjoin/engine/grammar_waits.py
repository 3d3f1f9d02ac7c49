from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from typing import Any

from skipjoin.core.engine import EngineCore
from skipjoin.core.request import Request
from skipjoin.core.step import Slice, StepResult
from skipjoin.exec.rank_spec import ModelExecutor
from skipjoin.exec.sampling import is_constrained

# Maximum time that a step waits for masks, and its maximum share of the step before, so that most requests with slow
# masks need not sit out a step.
_MASK_WAIT_S, _MASK_WAIT_SHARE = 0.002, 0.25
# Called with a request and the seconds that its masks took.
OnCost = Callable[[Request, float], None]


class GrammarWaits:
    """Keeps requests out of the plans while their grammar is compiled, or while a mask that takes long is computed."""

    def __init__(self, core: EngineCore, executor: ModelExecutor, on_cost: OnCost) -> None:
        self._core = core
        self._executor = executor
        self._on_cost = on_cost
        self._pending: dict[Future[Any], Request] = {}
        self._mask_wait_s = _MASK_WAIT_S

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, request: Request) -> None:
        """Let a new request wait for its grammar, unless that is ready. Call before `EngineCore.add`."""
        started = self._executor.compile_grammar(request)
        if started is not None and not started.done():
            request.awaits_grammar = True
            self._pending[started] = request

    def on_plan(self, slices: Iterable[Slice]) -> None:
        """Keep requests with slow masks out of further plans until the token of this one is known."""
        for request in _constrained(slices):
            ahead = self._executor.ahead
            request.awaits_grammar = ahead is not None and ahead.is_slow(request)

    def on_result(self, result: StepResult) -> None:
        """Start to compute the masks after a plan's tokens."""
        self._mask_wait_s = min(_MASK_WAIT_S, _MASK_WAIT_SHARE * result.seconds)
        for request in _constrained(result.plan.slices):
            if (ahead := self._executor.ahead) is None or request.finish_reason is not None:
                continue
            if seconds := ahead.uncharged_s(request):
                self._on_cost(request, seconds)
            if request.awaits_grammar or ahead.is_slow(request):
                request.awaits_grammar = True
                if not request.in_flight:
                    self._pending[ahead.advance(request)] = request

    def release(self, timeout_s: float = 0.0) -> None:
        """Let requests run that no longer wait, after at most `timeout_s` until the first one is."""
        if self._pending:
            self._release(wait(self._pending, timeout_s, FIRST_COMPLETED).done)

    def release_masks(self) -> None:
        """Let requests run that no longer wait, after a short time for masks."""
        masks = [future for future, request in self._pending.items() if request.planned]
        if masks:
            wait(masks, self._mask_wait_s, ALL_COMPLETED)
        self.release()

    def _release(self, done: Iterable[Future[Any]]) -> None:
        for future in done:
            request = self._pending.pop(future)
            if request.finish_reason is None and not future.cancelled():
                future.result()
            self._core.grammar_compiled(request)


def _constrained(slices: Iterable[Slice]) -> list[Request]:
    """Return the requests whose next token the slices sample from a grammar."""
    return [slice_.request for slice_ in slices if slice_.samples and is_constrained(slice_.request.sampling)]
