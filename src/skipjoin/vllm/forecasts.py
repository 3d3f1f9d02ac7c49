from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from skipjoin.core.forecast import Forecast
from skipjoin.core.request import FinishReason, Request
from skipjoin.forecast import ForecastConfig, Forecaster, Predicted, default_folder, make_forecaster

_log = logging.getLogger("vllm.skipjoin")

# Maximum seconds from a change until it is saved, which is what a killed process loses.
SAVE_EVERY_S = 30.0
_CLOSE_S = 10.0


class LengthForecasts:
    """Forecaster that predicts and learns in its own thread, so that no step waits for it."""

    def __init__(self, forecaster: Forecaster, folder: Path | None = None) -> None:
        self._forecaster, self._folder = forecaster, folder
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ready: deque[tuple[Request, Forecast]] = deque()
        self._predicted: dict[Request, Predicted] = {}  # used by the thread only
        self._save_at = float("inf")
        self.made = 0
        self._thread = threading.Thread(target=self._run, name="skipjoin-forecasts", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, config: ForecastConfig | None, model: str) -> LengthForecasts | None:
        if config is None:
            return None
        forecaster = make_forecaster(config, model)
        if config.forecast_dir == "none":
            return cls(forecaster)
        folder = default_folder() if config.forecast_dir is None else Path(config.forecast_dir)
        forecaster.load(folder)
        return cls(forecaster, folder)

    def arrived(self, request: Request) -> None:
        request.progress.expect(self._forecaster.prior(request.max_tokens))
        self._work.put(lambda: self._predict(request))

    def ready(self) -> Iterator[tuple[Request, Forecast]]:
        while self._ready:
            yield self._ready.popleft()

    def finished(self, request: Request) -> None:
        tokens, reason = len(request.progress.output), request.progress.finish_reason
        self._work.put(lambda: self._learn(request, tokens, reason))

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(_CLOSE_S)

    # -- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=SAVE_EVERY_S)
            except queue.Empty:
                self._save_if_due()
                continue
            if work is None:
                self._save_at = min(self._save_at, time.monotonic())
                self._save_if_due()
                return
            try:
                work()
            except Exception:  # a forecast is an estimate; the engine must not fail with it
                _log.exception("a forecast failed; its request is served without one")
            self._save_if_due()

    def _predict(self, request: Request) -> None:
        if request.progress.finish_reason is not None:
            return
        predicted = self._forecaster.forecast(request.prompt, request.max_tokens)
        self._predicted[request] = predicted
        self._ready.append((request, predicted.forecast))
        self.made += 1

    def _learn(self, request: Request, tokens: int, reason: FinishReason | None) -> None:
        predicted = self._predicted.pop(request, None)
        if not tokens:
            return
        if predicted is None:  # it finished first
            predicted = self._forecaster.forecast(request.prompt, request.max_tokens)
        self._forecaster.learn(predicted, tokens, exact=reason is FinishReason.STOP)
        if self._save_at == float("inf"):
            self._save_at = time.monotonic() + SAVE_EVERY_S

    def _save_if_due(self) -> None:
        if self._folder is not None and time.monotonic() >= self._save_at and len(self._forecaster):
            self._forecaster.save(self._folder)
            self._save_at = float("inf")
