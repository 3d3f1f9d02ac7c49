from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from skipjoin.core.forecast import Forecast
from skipjoin.core.request import FinishReason
from skipjoin.engine.forecasting import ForecastKeeper, Predicted, is_exact
from skipjoin.server.metrics import Metrics

# Requests the forecast of one prompt and calls the function with it. Returns None if too many requests are pending.
Ask = Callable[[Callable[[Forecast], None]], asyncio.Task[None] | None]
# The same for a prompt and the maximum number of its output tokens.
AskFor = Callable[[Sequence[int], int, Callable[[Forecast], None]], asyncio.Task[None] | None]

_log = logging.getLogger(__name__)

# Time that a request waits for its forecast, which takes 0.3 to 1 ms if cores are free. With timers in whole
# milliseconds and two thread switches, this adds less than 2 ms to the TTFT. A longer wait gains nothing: the prior
# serves until the forecast arrives, and where the order matters, requests wait longer in the engine.
PATIENCE_S = 0.001
# Maximum pending forecasts, which take about 50 ms. A request beyond that would start long before its forecast is
# ready, and keeps the prior's.
MAX_WAITING = 64
# Maximum finished requests that wait to be learned from, after which the oldest are dropped. Forecasts take precedence.
MAX_LESSONS = 4096
# Maximum time at shutdown for the remaining learning and the last save.
_CLOSE_S = 10.0


@dataclass(slots=True, eq=False)
class Expectation:
    """Expected output length of one prompt, which may be revised. Used on the event loop.

    Attributes:
        has_started: Whether a request of the prompt ran before the forecast arrived.
    """

    forecast: Forecast | None = None
    learn: Callable[[Predicted, Forecast | None, int, bool], None] | None = None
    ask: Ask | None = None
    predicted: Predicted | None = None
    has_started: bool = False
    _question: asyncio.Task[None] | None = None
    _revised: Forecast | None = None
    _requests: int = 0  # running
    _followers: list[Callable[[Forecast], None]] = field(default_factory=list)
    _ends: list[tuple[int, bool]] = field(default_factory=list)  # before the forecast arrived

    def follow(self, tell: Callable[[Forecast], None]) -> None:
        self._requests += 1
        self._followers.append(tell)
        if self.ask is not None:
            self._question, self.ask = self.ask(self._revise), None

    def started(self) -> None:
        self.has_started = self.has_started or self.predicted is None

    def settle(self, predicted: Predicted) -> None:
        self.predicted = predicted
        if self._revised is None:
            self._tell(predicted.forecast)
        for tokens, exact in self._ends:
            self._teach(tokens, exact)
        self._ends.clear()

    def ended(self, reason: FinishReason, tokens: int) -> None:
        self._requests -= 1
        if not self._requests:
            self._followers.clear()
            if self._question is not None:
                self._question.cancel()
        if self.learn is None or not tokens:
            return
        if self.predicted is None:
            self._ends.append((tokens, is_exact(reason)))
        else:
            self._teach(tokens, is_exact(reason))

    def _revise(self, forecast: Forecast) -> None:
        self._revised = forecast
        self._tell(forecast)

    def _tell(self, forecast: Forecast) -> None:
        self.forecast = forecast
        for tell in self._followers:
            tell(forecast)

    def _teach(self, tokens: int, exact: bool) -> None:
        assert self.learn is not None
        assert self.predicted is not None
        self.learn(self.predicted, self._revised, tokens, exact)


class _Question(NamedTuple):
    expectation: Expectation
    answer: asyncio.Future[None]
    prompt: Sequence[int]
    max_tokens: int
    owner: str


class Forecasting:
    """Forecaster in a thread of its own. Create it on the event loop."""

    def __init__(self, keeper: ForecastKeeper, metrics: Metrics, ask: AskFor | None = None) -> None:
        self._keeper = keeper
        self._ask_for = ask
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._asked: deque[_Question] = deque()
        self._lessons: deque[Callable[[], None]] = deque(maxlen=MAX_LESSONS)
        self._is_closing = False
        self._is_failing = False
        metrics.set("forecast_index_entries", len(keeper))
        self._thread = threading.Thread(target=self._work, name="skipjoin-forecasts", daemon=True)
        self._thread.start()

    async def expect(self, prompts: Sequence[tuple[Sequence[int], int]], owner: str = "") -> list[Expectation]:
        """Return the expectations of prompts (token ids, maximum output tokens) after at most `PATIENCE_S`."""
        asked = [self._ask(prompt, max_tokens, owner) for prompt, max_tokens in prompts]
        waiting = [answer for _, answer in asked if answer is not None]
        if waiting:
            await asyncio.wait(waiting, timeout=PATIENCE_S)
        for (expectation, answer), (_, max_tokens) in zip(asked, prompts, strict=True):
            if expectation.forecast is None:
                expectation.forecast = self._keeper.prior(max_tokens, owner)
                if answer is None:
                    self._metrics.count("forecasts_total", expectation.forecast.source)
        return [expectation for expectation, _ in asked]

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)

    # -- on the event loop --------------------------------------------------------------------------------

    def _ask(
        self, prompt: Sequence[int], max_tokens: int, owner: str
    ) -> tuple[Expectation, asyncio.Future[None] | None]:
        ask = None if self._ask_for is None else partial(self._ask_for, prompt, max_tokens)
        if len(self._asked) >= MAX_WAITING:
            return Expectation(ask=ask), None
        expectation, answer = Expectation(learn=partial(self._learn, owner), ask=ask), self._loop.create_future()
        with self._changed:
            self._asked.append(_Question(expectation, answer, prompt, max_tokens, owner))
            self._changed.notify()
        return expectation, answer

    def _learn(self, owner: str, predicted: Predicted, revised: Forecast | None, tokens: int, exact: bool) -> None:
        with self._changed:
            self._lessons.append(partial(self._take, owner, predicted, revised, tokens, exact))
            self._changed.notify()

    def _settle(
        self, expectation: Expectation, answer: asyncio.Future[None], predicted: Predicted, seconds: float
    ) -> None:
        expectation.settle(predicted)
        self._metrics.count("forecasts_total", predicted.forecast.source)
        self._metrics.observe("forecast_seconds", seconds)
        if expectation.has_started:
            self._metrics.count("forecasts_late_total")
        if not answer.done():
            answer.set_result(None)

    def _count_lesson(
        self, predicted: Predicted, revised: Forecast | None, tokens: int, exact: bool, entries: int
    ) -> None:
        metrics = self._metrics
        metrics.set("forecast_index_entries", entries)
        metrics.count("forecasts_learned_total", "exact" if exact else "censored")
        if exact or tokens >= predicted.most:
            expected = (revised or predicted.forecast).tokens
            metrics.observe("forecast_error_tokens", abs(expected - tokens))
            metrics.observe("forecast_error_octaves", abs(math.log2(expected / tokens)))
            if revised is None:
                low, high = predicted.interval
                place = "below" if tokens < low else "inside" if tokens <= high else "above"
                metrics.count("forecast_interval_total", place)

    # -- in the thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
                self._keeper.save_if_due()
                self._is_failing = False
            except Exception:
                # The prior serves instead. Log only once, because the next requests fail as well.
                if not self._is_failing:
                    _log.exception("output lengths cannot be forecast, or not be learned")
                self._is_failing = True
        self._keeper.close()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while True:
                if self._is_closing:
                    return self._lessons.popleft() if self._lessons else None
                if self._asked:
                    due = min(len(self._asked), self._keeper.batch)
                    return partial(self._forecast, [self._asked.popleft() for _ in range(due)])
                if self._lessons:
                    return self._lessons.popleft()
                if not self._changed.wait(self._keeper.save_in_s):
                    return self._keeper.save_if_due

    def _forecast(self, questions: Sequence[_Question]) -> None:
        begin = time.perf_counter()
        encoded = self._keeper.encode([question.prompt for question in questions])
        for (expectation, answer, _, max_tokens, owner), prompt in zip(questions, encoded, strict=True):
            predicted = self._keeper.predict(prompt, max_tokens, owner)
            self._report(partial(self._settle, expectation, answer, predicted, time.perf_counter() - begin))

    def _take(self, owner: str, predicted: Predicted, revised: Forecast | None, tokens: int, exact: bool) -> None:
        self._keeper.learn(predicted, tokens, exact=exact, owner=owner)
        self._report(partial(self._count_lesson, predicted, revised, tokens, exact, len(self._keeper)))

    def _report(self, tell: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(tell)
