from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from skipjoin.core.context import StepContext
from skipjoin.core.policy import BatchBuilder, Batcher, BatcherWrapper, Ordering
from skipjoin.core.refusals import HELD, Refusal
from skipjoin.core.request import Request
from skipjoin.policies.routed import Routed


class Turn:
    def __init__(self) -> None:
        self.best_effort = False


class ByTurn(Routed):
    """Ordering that ranks the current class first, without preemption, which would reverse in the next step."""

    def __init__(self, turn: Turn, make: Callable[[], Ordering]) -> None:
        self._turn = turn
        self._classes = {False: make(), True: make()}  # by `is_best_effort`

    def inner(self, request: Request) -> Ordering:
        return self._classes[request.is_best_effort]

    def inners(self) -> Iterable[Ordering]:
        first = self._turn.best_effort
        return self._classes[first], self._classes[not first]

    def rank(self, request: Request) -> Any:
        is_best_effort = request.is_best_effort
        return (is_best_effort != self._turn.best_effort, self._classes[is_best_effort].rank(request))

    def outranks(self, one: Request, other: Request) -> bool:
        return False

    def expected_order(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        return [(self.rank(request)[0], request) for request in sorted(requests, key=self.rank)]


class Turns(BatcherWrapper):
    """Batcher wrapper that alternates between both classes. If one cannot run, the other gets the step."""

    def __init__(self, batcher: Batcher, turn: Turn) -> None:
        super().__init__(batcher)
        self._turn = turn
        self._step: TurnBuilder | None = None

    def open(self, context: StepContext) -> BatchBuilder:
        if self._step is not None and self._step.has_run:
            self._turn.best_effort = not self._step.best_effort
        able = {request.is_best_effort for request, _ in context.candidates}
        served = self._turn.best_effort
        if able and served not in able:
            served = not served
        self._step = TurnBuilder(self.batcher.open(context), served)
        return self._step


class TurnBuilder:
    def __init__(self, inner: BatchBuilder, best_effort: bool) -> None:
        self.best_effort = best_effort
        self.has_run = False
        self._inner = inner

    def offer(self, request: Request, pending: int) -> int | Refusal:
        return self._inner.offer(request, pending) if request.is_best_effort == self.best_effort else HELD

    def take(self, request: Request, tokens: int) -> None:
        self.has_run = True
        self._inner.take(request, tokens)
