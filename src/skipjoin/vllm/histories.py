from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from threading import Lock
from typing import Any, NamedTuple

from skipjoin.core.events import Arrived, Event, Finished, Token
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy_set import Policies
from skipjoin.core.request import FinishReason, Request
from skipjoin.observe.explanation import Standing, explained, standing
from skipjoin.observe.histories import MAX_FINISHED, HistoryLog
from skipjoin.observe.history import Competitor, History
from skipjoin.observe.reasons import OptionNames, reason_texts, words_of
from skipjoin.recipes import find

_OPTIONS = OptionNames(
    recipe="recipe in --additional-config",
    params="params in --additional-config",
    kv="--kv-cache-memory-bytes",
    objectives="",
    best_effort_wait="best_effort_wait_s in --additional-config",
)
# vLLM's id of a sequence: the number of the sample, if there are several, the kind of response, the id that the client
# chose or got, the number of the prompt if it is a completion, and a random part.
_ID = r"(?:(?P<sample>\d+)_)?(?:(?=cmpl-)(?:cmpl-)?{0}-(?P<prompt>\d+)|(?:[a-z]+[-_])?{0})(?:-[0-9a-f]{{8}})?"
# Time for which an explanation waits for a step of the engine.
_ANSWER_S = 1.0
_RANDOM = re.compile(r"^(?:\d+_)?(.+?)(?:-[0-9a-f]{8})?$")


class Limits(NamedTuple):
    max_num_seqs: int
    max_num_batched_tokens: int
    device_blocks: int
    block_size: int
    recipe: str


class RequestHistories:
    """Intervals of live and recent requests, written by vLLM's engine and read by a listener's thread."""

    def __init__(self, limits: Limits, engine: int, clock: Callable[[], float]) -> None:
        self._log = HistoryLog()
        self._engine, self._clock = engine, clock
        names = tuple(find(limits.recipe).parameters)
        self._reasons = reason_texts(limits, _OPTIONS._replace(param_names=names))
        self._names: dict[int, str] = {}  # vLLM's ids by number, of the requests in the log
        self._finished: deque[int] = deque()
        self._asked: deque[tuple[int, Future[Standing | None]]] = deque()
        self._lock = Lock()

    # -- the engine ---------------------------------------------------------------------------------------

    def observe(self, events: Iterable[Event]) -> None:
        """Process events of the planner, which reports neither arrivals, tokens nor ends."""
        with self._lock:
            self._log.observe(events)

    def answer(self, policies: Policies, kv: KVAccounts) -> None:
        """Answer the listener's questions on the engine's thread, which alone may ask policies."""
        while self._asked:
            number, answer = self._asked.popleft()
            live = {request.id: request for request in self._log.requests}
            if (request := live.get(number)) is None:
                answer.set_result(None)
            else:
                facts = policies.explain(request, self._clock(), kv)
                answer.set_result(standing(request, live.values(), policies.ordering, facts))

    def arrived(self, request: Request, name: str, now: float) -> None:
        self._names[request.id] = name
        self.observe((Arrived(request, now),))

    def generated(self, request: Request, now: float) -> None:
        self.observe((Token(request, now, request.progress.output[0], None),))

    def finished(self, request: Request, reason: FinishReason, now: float) -> None:
        self.observe((Finished(request, now, reason),))
        self._finished.append(request.id)
        if len(self._finished) > MAX_FINISHED:
            del self._names[self._finished.popleft()]

    # -- questions ----------------------------------------------------------------------------------------

    def explain(self, name: str) -> dict[str, Any] | None:
        """Return the explanation of the request with this response id or `x-request-id`, or None if it is unknown."""
        now = self._clock()
        choices: list[dict[str, Any]] = []
        for number in self._numbers(name):
            with self._lock:
                history = self._log.find(number, now)
                competitors = self._log.competitors(history, now) if history is not None else []
            if history is not None:
                choices.append(self._choice(history, len(choices), now, competitors))
        if not choices:
            return None
        return {
            "id": name,
            "request_id": name,
            "choices": choices,
            "lost_choices": 0,
            "reasons": words_of(self._reasons),
        }

    def _choice(self, history: History, choice: int, now: float, competitors: list[Competitor]) -> dict[str, Any]:
        return {
            "choice": choice,
            "replica": self._engine,
            **explained(history, now, time.time(), self._reasons, self._standing(history)),
            "competitors": [self._competitor(other) for other in competitors],
        }

    def _standing(self, history: History) -> Standing | None:
        """Return what the engine's next step answers, or None if it does not come soon."""
        if history.ended is not None:
            return None
        answer: Future[Standing | None] = Future()
        self._asked.append((history.number, answer))
        try:
            return answer.result(_ANSWER_S)
        except TimeoutError:
            return None

    def _competitor(self, other: Competitor) -> dict[str, Any]:
        found = _RANDOM.match(self._names.get(other.number, ""))
        return {
            "id": found[1] if found is not None else None,
            "choice": None,
            "seconds": other.seconds,
            "service": other.service,
            "is_finished": other.is_finished,
        }

    def _numbers(self, name: str) -> list[int]:
        pattern, found = re.compile(_ID.format(re.escape(name))), {}
        for number, full in list(self._names.items()):
            if name in full and (match := pattern.fullmatch(full)) is not None:
                # Clients may choose equal ids. The latest request is meant.
                found[int(match["prompt"] or 0), int(match["sample"] or 0)] = number
        return [found[choice] for choice in sorted(found)]
