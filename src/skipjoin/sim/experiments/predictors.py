from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import NamedTuple, Protocol

from skipjoin.config import ConfigError, unknown
from skipjoin.core.events import Event, Finished
from skipjoin.core.forecast import Forecast
from skipjoin.core.request import FinishReason, Request
from skipjoin.forecast import ForecastConfig, Predicted, make_forecaster, words
from skipjoin.forecast.config import FORECASTERS
from skipjoin.forecast.models import Prompt
from skipjoin.forecast.trained import Trained
from skipjoin.observe.forecasts import ForecastLog
from skipjoin.policies.dispatch import Dispatch
from skipjoin.workload.fields import number
from skipjoin.workload.request import WorkloadRequest
from skipjoin.workload.workload import Replay, Workload

Jobs = Sequence[WorkloadRequest]
# Forecaster that does not read prompts.
PRIOR = "prior"
# Texts whose vectors an encoder keeps, as runs replay the same rows.
_REMEMBERED = 20_000


class Prediction(NamedTuple):
    forecast: Forecast
    interval: tuple[float, float] | None = None  # 80 % interval in tokens; None without a distribution


class Predictor(Protocol):
    def forecast(self, request: Request) -> Prediction: ...
    def ended(self, event: Finished) -> None: ...

    def extend(self, jobs: Jobs, name: str) -> None:
        """Add jobs of a closed stream, whose requests have the next ids."""


class PredictorSpec(Protocol):
    def make(self, workload: Workload, jobs: Jobs, seed: int) -> Predictor: ...


# -- made from the truth ----------------------------------------------------------------------------------

# Maps jobs to predicted lengths, given a random generator.
Foresight = Callable[[Jobs, random.Random], Sequence[float]]


class Fixed:
    def __init__(
        self, lengths: Sequence[float], source: str, predict: Callable[[Jobs, str], Sequence[float]] | None = None
    ) -> None:
        self._lengths = list(lengths)
        self._source = source
        self._predict = predict

    def forecast(self, request: Request) -> Prediction:
        return Prediction(Forecast(max(1.0, self._lengths[request.id]), self._source))

    def ended(self, event: Finished) -> None:
        pass

    def extend(self, jobs: Jobs, name: str) -> None:
        assert self._predict is not None, "checked when the predictor was made"
        self._lengths.extend(self._predict(jobs, name))


@dataclass(frozen=True, slots=True)
class FromTruth:
    name: str
    foresight: Foresight

    def make(self, workload: Workload, jobs: Jobs, seed: int) -> Fixed:
        def predict(jobs: Jobs, name: str) -> Sequence[float]:
            return self.foresight(jobs, random.Random(f"{seed} predictor{name}")) if jobs else []

        return Fixed(predict(jobs, ""), self.name, predict)


def _oracle(jobs: Jobs, chance: random.Random) -> list[float]:
    return [job.output_tokens for job in jobs]


def _shuffled(jobs: Jobs, chance: random.Random) -> list[float]:
    lengths = _oracle(jobs, chance)
    chance.shuffle(lengths)
    return lengths


def _constant(tokens: float) -> Foresight:
    return lambda jobs, chance: [tokens] * len(jobs)


def _noise(sigma: float) -> Foresight:
    return lambda jobs, chance: [job.output_tokens * math.exp(sigma * chance.gauss(0, 1)) for job in jobs]


def _regress(correlation: float) -> Foresight:
    """Predict the conditional mean of the truth's logarithm, so that predictions vary less than the truth."""

    def lengths(jobs: Jobs, chance: random.Random) -> list[float]:
        logs = [math.log(job.output_tokens) for job in jobs]
        mean = fmean(logs)
        error = pstdev(logs) * correlation * math.sqrt(1 - correlation**2)
        return [math.exp(mean + correlation**2 * (log - mean) + error * chance.gauss(0, 1)) for log in logs]

    return lengths


@dataclass(frozen=True, slots=True)
class FromColumn:
    column: str

    def make(self, workload: Workload, jobs: Jobs, seed: int) -> Fixed:
        if not isinstance(workload, Replay):
            raise ConfigError(f"predictor column:{self.column} needs a trace, which has that column")
        if workload.closed:
            raise ConfigError(f"predictor column:{self.column} predicts nothing for closed streams, which have no rows")
        values = workload.trace.column(self.column)
        return Fixed([values[job.row or 0] for job in jobs], "column")


# -- learned from finished requests -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Learning:
    """A server's forecaster, untrained or with the state of `skipjoin predict train` in a folder."""

    name: str
    config: ForecastConfig

    def make(self, workload: Workload, jobs: Jobs, seed: int) -> Online:
        if self.name != PRIOR:
            if not isinstance(workload, Replay) or workload.closed:
                raise ConfigError(
                    f"predictor {self.name} reads prompts: it needs a trace with texts, and no closed streams"
                )
            workload.trace.check_texts()
        return Online(self.config, [job.prompt or "" for job in jobs])


class Online:
    def __init__(self, config: ForecastConfig, prompts: Sequence[str]) -> None:
        self._prompts = list(prompts)
        self._now = 0.0
        self._texts: dict[tuple[int, ...], str] = {}
        self._forecaster = make_forecaster(
            config,
            clock=lambda: self._now,
            text_of=lambda prompt: self._texts[tuple(prompt)],
            remembered=_REMEMBERED,
        )
        self._encoded: dict[int, Prompt] = {}
        self._predicted: dict[int, Predicted] = {}

    def forecast(self, request: Request) -> Prediction:
        self._now = request.arrival
        predicted = self._forecaster.predict(self._encode(request.id), request.max_tokens)
        self._predicted[request.id] = predicted
        return Prediction(predicted.forecast, predicted.interval)

    def _encode(self, number: int) -> Prompt:
        if number not in self._encoded:
            ahead = range(number, min(len(self._prompts), number + self._forecaster.batch))
            prompts = {number: words(self._prompts[number]) for number in ahead}
            self._texts = {tuple(prompts[number]): self._prompts[number] for number in ahead}
            self._encoded |= zip(ahead, self._forecaster.encode(list(prompts.values())), strict=True)
        return self._encoded.pop(number)

    def ended(self, event: Finished) -> None:
        self._now = event.now
        predicted, tokens = self._predicted.pop(event.request.id), len(event.request.progress.output)
        if tokens:
            self._forecaster.learn(predicted, tokens, exact=event.reason is FinishReason.STOP)

    def extend(self, jobs: Jobs, name: str) -> None:
        self._prompts.extend("" for _ in jobs)


# -- by name ----------------------------------------------------------------------------------------------

_FROM_TRUTH: dict[str, Foresight] = {"oracle": _oracle, "shuffled": _shuffled}
# By name: the parameter's name, minimum and maximum, and the function that uses it.
_WITH_NUMBER: dict[str, tuple[str, float, float, Callable[[float], Foresight]]] = {
    "noise": ("sigma", 0.0, 10.0, _noise),
    "regress": ("correlation", 0.0, 1.0, _regress),
    "constant": ("tokens", 1.0, 1e9, _constant),
}
STATE = "state"
FORMS = (
    *FORECASTERS,
    f"{STATE}:DIR",
    *_FROM_TRUTH,
    *(f"{name}:{row[0].upper()}" for name, row in _WITH_NUMBER.items()),
    "column:NAME",
)


def parse_predictor(text: str) -> PredictorSpec:
    name, _, argument = text.strip().partition(":")
    if text in FORECASTERS:
        return Learning(text, ForecastConfig(forecaster=text))
    if name == STATE and argument:
        return Learning(text, Trained.open(argument).configure(ForecastConfig(forecast_state=argument)))
    if text in _FROM_TRUTH:
        return FromTruth(text, _FROM_TRUTH[text])
    if name == "column" and argument:
        return FromColumn(argument)
    if name not in _WITH_NUMBER:
        raise unknown("predictor", text, FORMS)
    what, least, most, foresight = _WITH_NUMBER[name]
    value = number(f"predictor {name}: its {what}", argument, above=-math.inf, most=most)
    if value < least:
        raise ConfigError(f"predictor {name}: its {what} must be in [{least:g}, {most:g}], got {value:g}")
    return FromTruth(name, foresight(value))


def columns_of(text: str | None) -> list[str]:
    spec = None if text is None else parse_predictor(text)
    return [spec.column] if isinstance(spec, FromColumn) else []


def default_predictor(workload: Workload) -> str:
    has_texts = isinstance(workload, Replay) and workload.trace.has_texts
    return "learned" if has_texts and not workload.closed else PRIOR


class Predictions:
    """Dispatch rule that first gives each arriving request its prediction, and records the accuracy."""

    def __init__(
        self, dispatch: Dispatch, predictor: Predictor, *, jct: Callable[[float], float] | None = None
    ) -> None:
        self.log = ForecastLog()
        self.ignores_tokens = dispatch.ignores_tokens
        self._dispatch = dispatch
        self._predictor = predictor
        self._jct = jct
        self._predictions: dict[int, Prediction] = {}

    def choose(self, request: Request) -> int:
        self.predict(request)
        return self._dispatch.choose(request)

    def observe(self, replica: int, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                self.learn(event)
        self._dispatch.observe(replica, events)

    def predict(self, request: Request) -> None:
        prediction = self._predictions[request.id] = self._predictor.forecast(request)
        target = None
        if self._jct is not None and not request.is_best_effort:
            target = request.progress.target._replace(jct_s=self._jct(prediction.forecast.tokens))
        request.progress.expect(prediction.forecast, target)

    def learn(self, event: Finished) -> None:
        (forecast, interval), tokens = self._predictions.pop(event.request.id), len(event.request.progress.output)
        if event.reason is FinishReason.STOP:
            self.log.add(forecast.tokens, tokens, forecast.source, interval)
        self._predictor.ended(event)
