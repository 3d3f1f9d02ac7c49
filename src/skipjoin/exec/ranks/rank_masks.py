from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from skipjoin.core.request import Request
from skipjoin.exec.ranks.messages import MaskBegun, MaskDone

Answers = list[tuple[bool, float]]


@dataclass(eq=False, slots=True)
class RankMaskState:
    """`MaskState` on all ranks that sample. `future` is running while all ranks work on it that have not answered."""

    is_slow: bool = False
    uncharged_s: float = 0.0
    future: Future[RankMaskState] = field(default_factory=Future)
    waiting: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)
    answers: Answers = field(default_factory=list)

    def note(self, answers: Answers) -> None:
        """Combine the answers: a request is slow if it is slow on one rank, and is charged the longest time."""
        self.is_slow = any(is_slow for is_slow, _ in answers)
        self.uncharged_s += max(seconds for _, seconds in answers)


class RankMasks:
    """`MasksAhead` on ranks. A mask is computed when it is on all ranks that sample.

    Args:
        send: Orders all ranks to compute a request's mask, and returns the request's number.
        receive: Receives the messages that have come. Given a rank, waits for its next one at most some seconds.
    """

    def __init__(
        self, ranks: Collection[int], send: Callable[[Request], int], receive: Callable[[int | None, float], None]
    ) -> None:
        self._ranks = frozenset(ranks)
        self._send, self._receive = send, receive
        self._states: dict[Request, RankMaskState] = {}
        self._ordered: dict[int, RankMaskState] = {}  # by the request's number, until all ranks have answered

    def start(self, request: Request) -> Future[RankMaskState]:
        self._states[request] = RankMaskState()
        return self.advance(request)

    def advance(self, request: Request) -> Future[RankMaskState]:
        state = self._states[request]
        state.future, state.waiting, state.begun, state.answers = Future(), set(self._ranks), set(), []
        self._ordered[self._send(request)] = state
        return state.future

    def state_of(self, request: Request) -> RankMaskState | None:
        return self._states.get(request)

    def wait(self, futures: Collection[Future[Any]], timeout_s: float, *, for_all: bool = False) -> None:
        deadline = time.monotonic() + timeout_s
        self._receive(None, 0.0)
        while True:
            missing = [future for future in futures if not future.done()]
            left = deadline - time.monotonic()
            if not missing or left <= 0 or not (for_all or len(missing) == len(futures)):
                return
            waiting = (state for state in self._ordered.values() if state.future in missing)
            self._receive(min(next(waiting).waiting), left)

    def on_answer(self, rank: int, answer: MaskBegun | MaskDone) -> None:
        state = self._ordered[answer.request]
        if isinstance(answer, MaskBegun):
            state.begun.add(rank)
        else:
            state.waiting.remove(rank)
            state.answers.append((answer.is_slow, answer.seconds))
        if not state.future.running() and state.waiting <= state.begun:
            state.future.set_running_or_notify_cancel()
        if not state.waiting:
            del self._ordered[answer.request]
            state.note(state.answers)
            state.future.set_result(state)

    def on_finished(self, request: Request) -> None:
        self._states.pop(request, None)
