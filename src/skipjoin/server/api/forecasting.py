"""Forecasts of output lengths in the API process: made in a thread, or by another server that is asked meanwhile. Late
ones follow their requests."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from skipjoin.core.forecast import Forecast
from skipjoin.core.request import FinishReason
from skipjoin.engine.forecasting import ForecastKeeper, Predicted, is_exact
from skipjoin.server.metrics import Metrics

# Begins to ask for the forecast of one prompt, which the function gets if there is an answer. None: there is no room.
Ask = Callable[[Callable[[Forecast], None]], asyncio.Task[None] | None]
# Asks for the forecast of a prompt whose output has at most so many tokens.
AskFor = Callable[[Sequence[int], int, Callable[[Forecast], None]], asyncio.Task[None] | None]

_log = logging.getLogger(__name__)

# Seconds that a request waits for its forecast, which takes 0.3 to 1 ms where cores are free. Timers of the event loop
# are whole milliseconds, and handing over to the thread and back takes time, too: with 1 ms here the time to the first
# token grows by less than 2. Waiting for longer gains nothing: the prior serves until the forecast is there, and where
# the order matters, a request waits in the engine for longer than that.
PATIENCE_S = 0.001
# Forecasts that may be waiting. A burst's last one takes effect after as many times what one takes, some 50 ms; a
# request beyond that begins long before its forecast would be there, and keeps the prior's.
MOST_WAITING = 64
# Ends of requests that may be waiting to be learnt from. Forecasts come first; beyond it the oldest are forgotten.
MOST_LESSONS = 4096
# Seconds that the end of the server waits for the last lessons and the last save.
_CLOSE_S = 10.0


class Expectation:
    """What is expected of the outputs of one prompt, as it becomes known. It lives on the event loop.

    forecast: the best that is known now; None: none is made. predicted: the forecaster's, from which it learns.
    learn: takes how an output came out. ask: for another forecast, which counts more; it is asked when the first
    request begins, and the question is dropped when the last one has ended.
    """

    __slots__ = ("_ask", "_ends", "_followers", "_learn", "_question", "_requests", "_revised", "forecast", "predicted")

    def __init__(
        self,
        forecast: Forecast | None = None,
        learn: Callable[[Predicted, Forecast | None, int, bool], None] | None = None,
        ask: Ask | None = None,
    ) -> None:
        self.forecast = forecast
        self.predicted: Predicted | None = None
        self._learn = learn
        self._ask = ask
        self._question: asyncio.Task[None] | None = None
        self._revised: Forecast | None = None
        self._requests = 0  # that have begun and not ended
        self._followers: list[Callable[[Forecast], None]] = []
        self._ends: list[tuple[int, bool]] = []  # that came before the forecast

    def follow(self, tell: Callable[[Forecast], None]) -> None:
        """A request has begun: let `tell` know of forecasts that are still to come."""
        self._requests += 1
        self._followers.append(tell)
        if self._ask is not None:
            self._question, self._ask = self._ask(self._revise), None

    def settle(self, predicted: Predicted) -> None:
        """The forecaster's forecast is there."""
        self.predicted = predicted
        if self._revised is None:
            self._tell(predicted.forecast)
        for tokens, exact in self._ends:
            self._teach(tokens, exact)
        self._ends.clear()

    def ended(self, reason: FinishReason, tokens: int) -> None:
        """A request has ended, and its output has so many tokens."""
        self._requests -= 1
        if not self._requests:
            self._followers.clear()
            if self._question is not None:
                self._question.cancel()
        if self._learn is None or not tokens:
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
        assert self._learn is not None
        assert self.predicted is not None
        self._learn(self.predicted, self._revised, tokens, exact)


class Forecasting:
    """Expectations for prompts, from a forecaster that a thread of its own works with. Made on the event loop.

    ask: another server for each prompt, whose answer counts more.
    """

    def __init__(self, keeper: ForecastKeeper, metrics: Metrics, ask: AskFor | None = None) -> None:
        self._keeper = keeper
        self._ask_for = ask
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._asked: deque[Callable[[], None]] = deque()
        self._lessons: deque[Callable[[], None]] = deque(maxlen=MOST_LESSONS)
        self._is_closing = False
        self._is_failing = False
        metrics.indexed(len(keeper))
        self._thread = threading.Thread(target=self._work, name="skipjoin-forecasts", daemon=True)
        self._thread.start()

    async def expect(self, prompts: Sequence[tuple[Sequence[int], int]], owner: str = "") -> list[Expectation]:
        """The expectations for prompts, each with the most tokens of its output, after at most `PATIENCE_S` seconds.
        owner: a hash of the client's key, from whose requests alone they are learned."""
        asked = [self._ask(prompt, max_tokens, owner) for prompt, max_tokens in prompts]
        waiting = [answer for _, answer in asked if answer is not None]
        if waiting:
            await asyncio.wait(waiting, timeout=PATIENCE_S)
        for (expectation, answer), (_, max_tokens) in zip(asked, prompts, strict=True):
            if expectation.forecast is None:
                expectation.forecast = self._keeper.prior(max_tokens, owner)
                self._metrics.forecast_unready(expectation.forecast, is_late=answer is not None)
        return [expectation for expectation, _ in asked]

    def close(self) -> None:
        """Learn what is left to learn, save it, and end the thread. Waits for that."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)

    # -- on the event loop --------------------------------------------------------------------------------

    def _ask(
        self, prompt: Sequence[int], max_tokens: int, owner: str
    ) -> tuple[Expectation, asyncio.Future[None] | None]:
        """Begin to forecast; the future is done when the expectation has settled. None: there is no room to wait."""
        ask = None if self._ask_for is None else partial(self._ask_for, prompt, max_tokens)
        if len(self._asked) >= MOST_WAITING:
            return Expectation(ask=ask), None
        expectation, answer = Expectation(learn=partial(self._learn, owner), ask=ask), self._loop.create_future()
        self._put(self._asked, partial(self._forecast, expectation, answer, prompt, max_tokens, owner))
        return expectation, answer

    def _learn(self, owner: str, predicted: Predicted, revised: Forecast | None, tokens: int, exact: bool) -> None:
        self._put(self._lessons, partial(self._take, owner, predicted, revised, tokens, exact))

    def _put(self, queue: deque[Callable[[], None]], work: Callable[[], None]) -> None:
        with self._changed:
            queue.append(work)
            self._changed.notify()

    def _settle(
        self, expectation: Expectation, answer: asyncio.Future[None], predicted: Predicted, seconds: float
    ) -> None:
        expectation.settle(predicted)
        self._metrics.forecast(predicted.forecast, seconds)
        if not answer.done():
            answer.set_result(None)

    def _count_lesson(
        self, predicted: Predicted, revised: Forecast | None, tokens: int, exact: bool, entries: int
    ) -> None:
        self._metrics.learnt(predicted, revised, tokens, exact=exact)
        self._metrics.indexed(entries)

    # -- in the thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
                self._keeper.save_if_due()
                self._is_failing = False
            except Exception:
                # The prior serves then. One report is enough: the next requests fail alike.
                if not self._is_failing:
                    _log.exception("output lengths cannot be forecast, or not be learnt")
                self._is_failing = True
        self._keeper.close()

    def _next(self) -> Callable[[], None] | None:
        """The next work, for which it waits; None at the end."""
        with self._changed:
            while True:
                if self._is_closing:
                    return self._lessons.popleft() if self._lessons else None
                if queue := self._asked or self._lessons:
                    return queue.popleft()
                if not self._changed.wait(self._keeper.save_in_s):
                    return self._keeper.save_if_due

    def _forecast(
        self,
        expectation: Expectation,
        answer: asyncio.Future[None],
        prompt: Sequence[int],
        max_tokens: int,
        owner: str,
    ) -> None:
        begin = time.perf_counter()
        predicted = self._keeper.forecast(prompt, max_tokens, owner)
        self._report(partial(self._settle, expectation, answer, predicted, time.perf_counter() - begin))

    def _take(self, owner: str, predicted: Predicted, revised: Forecast | None, tokens: int, exact: bool) -> None:
        self._keeper.learn(predicted, tokens, exact=exact, owner=owner)
        self._report(partial(self._count_lesson, predicted, revised, tokens, exact, len(self._keeper)))

    def _report(self, tell: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(tell)
