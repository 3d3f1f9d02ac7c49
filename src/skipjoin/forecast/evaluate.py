from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from skipjoin.core.forecast import Forecast
from skipjoin.forecast.alise import Alise
from skipjoin.forecast.encode import FEATURES, Encoder
from skipjoin.forecast.forecaster import Forecaster, Predicted
from skipjoin.forecast.head import Example, Head
from skipjoin.forecast.index import VectorIndex
from skipjoin.forecast.mass import BINS, EDGES, Array
from skipjoin.forecast.models import Guess, Learned, Model, PriorOnly, Prompt
from skipjoin.forecast.prior import Prior

# Number of classes, as in SSJF's proxy.
CLASSES = 5
_RATE, _FIRST_SQUARES = 0.1, 1e-2


class ProxyClassifier(Model):
    """Multinomial logistic regression from hashed features to equally frequent classes of `lengths`."""

    name = "proxy"

    def __init__(self, lengths: Array) -> None:
        self._borders = np.unique(np.quantile(lengths, np.arange(1, CLASSES) / CLASSES))
        self._weights: Array = np.zeros((FEATURES, len(self._borders) + 1))
        self._squares: Array = np.full_like(self._weights, _FIRST_SQUARES)
        self._spread = self._seen(lengths)

    def _seen(self, lengths: Array) -> Array:
        counts = np.zeros((len(self._borders) + 1, BINS))
        np.add.at(counts, (self._class(lengths), np.searchsorted(EDGES, lengths, side="right") - 1), 1.0)
        return np.asarray(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0))

    def _class(self, lengths: Array) -> Array:
        return np.searchsorted(self._borders, lengths, side="left")

    def _probabilities(self, prompt: Prompt) -> Array:
        logits = prompt.features.weights @ self._weights[prompt.features.ids]
        exponentials = np.exp(logits - logits.max())
        return np.asarray(exponentials / exponentials.sum())

    def guess(self, prompt: Prompt, prior: Prior) -> Guess:
        return Guess(self._probabilities(prompt) @ self._spread, self.name)

    def learn(self, prompt: Prompt, guess: Guess, tokens: int, end: int, exact: bool) -> None:
        if not exact:
            return
        error = self._probabilities(prompt)
        error[int(self._class(np.array(tokens)))] -= 1.0
        ids, slope = prompt.features.ids, np.outer(prompt.features.weights, error)
        self._squares[ids] += slope * slope
        self._weights[ids] -= _RATE * slope / np.sqrt(self._squares[ids])


class HeadOnly(Model):
    name = "head"

    def __init__(self) -> None:
        self._head = Head(FEATURES)

    def guess(self, prompt: Prompt, prior: Prior) -> Guess:
        return Guess(self._head.mass(prompt.features.ids, prompt.features.weights), self.name)

    def learn(self, prompt: Prompt, guess: Guess, tokens: int, end: int, exact: bool) -> None:
        self._head.learn(Example(prompt.features.ids, prompt.features.weights, end, exact))


ORACLE, PERMUTED, TRAINED = "oracle", "permuted", "trained"
# Sampled pairs for pairwise accuracy.
_PAIRS = 200_000
# Runs of the control and their rows. A single run correlates by chance with prompt lengths, which are informative about
# output lengths.
_CONTROLS, _CONTROL_ROWS = 6, 4000
_QUARTILES = np.array([0.25, 0.5, 0.75])

Progress = Callable[[str, float], None]


class Sample(NamedTuple):
    prompt: Sequence[int]
    tokens: int
    second: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """Accuracy of forecasts, of ALISE's table 2 and more. Fields are None where they do not apply.

    Pearson correlations `r` are 0 if all forecasts are equal. Ties count half in `pairwise`, the share of ordered
    pairs.
    """

    name: str
    r: float
    r_log: float
    mae: float
    within_25: float
    accuracy: float
    pairwise: float
    coverage: float | None = None
    coverage_by_prompt: tuple[float, ...] | None = None  # by quartile of prompt length, shortest first
    milliseconds: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """Trains forecasters on `train`, predicting each row before learning it, and measures them on `test`."""

    train: Sequence[Sample]
    test: Sequence[Sample]
    encoder: Encoder
    entries: int
    most: int
    trained: Forecaster | None = None

    def run(self, progress: Progress) -> list[Figures]:
        lengths = self._lengths(self.train)
        models: list[Model] = [
            ProxyClassifier(lengths),
            Alise(self._index(), self.encoder.width),
            HeadOnly(),
            Learned(self._index()),
            PriorOnly(),
        ]
        found = [self._measure(model, progress) for model in models]
        if self.trained is not None:
            found.append(self._summary(TRAINED, *self._forecasts(self.trained, TRAINED, progress)))
        return [*found, self._oracle(), self._control(progress)]

    def _index(self) -> VectorIndex:
        return VectorIndex(self.encoder.width, self.entries, np.inf, lambda: 0.0)

    def _measure(self, model: Model, progress: Progress) -> Figures:
        return self._summary(model.name, *self._predict(model, self.train, model.name, progress))

    def _summary(self, name: str, made: Sequence[Predicted], seconds: Sequence[float]) -> Figures:
        intervals = [item.interval for item in made]
        return self.figures(name, [item.forecast for item in made], intervals, float(np.median(seconds)) * 1e3)

    def _predict(
        self, model: Model, train: Sequence[Sample], name: str, progress: Progress
    ) -> tuple[list[Predicted], list[float]]:
        forecaster = Forecaster(self.encoder, model)
        rows = len(train) + len(self.test)
        for number, sample in enumerate(train):
            made = forecaster.forecast(sample.prompt, self.most)
            forecaster.learn(made, min(sample.tokens, self.most), exact=sample.tokens <= self.most)
            progress(name, number / rows)
        return self._forecasts(forecaster, name, progress, len(train))

    def _forecasts(
        self, forecaster: Forecaster, name: str, progress: Progress, trained: int = 0
    ) -> tuple[list[Predicted], list[float]]:
        found, seconds = [], []
        for number, sample in enumerate(self.test, trained + 1):
            start = time.perf_counter()
            found.append(forecaster.forecast(sample.prompt, self.most))
            seconds.append(time.perf_counter() - start)
            progress(name, number / (trained + len(self.test)))
        return found, seconds

    def _oracle(self) -> Figures:
        known = [min(sample.second or sample.tokens, self.most) for sample in self.test]
        return self.figures(ORACLE, [Forecast(float(tokens), ORACLE) for tokens in known])

    def _control(self, progress: Progress) -> Figures:
        """Train on permuted lengths, from which nothing can be learned."""
        drawn = np.random.default_rng(0)
        return _mean_of([self._permuted(drawn, run, progress) for run in range(_CONTROLS)])

    def _permuted(self, drawn: np.random.Generator, run: int, progress: Progress) -> Figures:
        rows = Evaluation(self.train[:_CONTROL_ROWS], self.test[:_CONTROL_ROWS], self.encoder, self.entries, self.most)
        order = drawn.permutation(len(rows.train))
        train = [item._replace(tokens=rows.train[other].tokens) for item, other in zip(rows.train, order, strict=True)]
        made, _ = rows._predict(
            Learned(self._index()), train, PERMUTED, lambda name, share: progress(name, (run + share) / _CONTROLS)
        )
        return rows.figures(PERMUTED, [item.forecast for item in made], [item.interval for item in made])

    def figures(
        self,
        name: str,
        forecasts: Sequence[Forecast],
        intervals: Sequence[tuple[float, float]] | None = None,
        milliseconds: float | None = None,
    ) -> Figures:
        expected = np.array([forecast.tokens for forecast in forecasts])
        true = self._lengths(self.test)
        classes = np.unique(np.quantile(self._lengths(self.train), np.arange(1, CLASSES) / CLASSES))
        covered = None if intervals is None else _inside(np.array(intervals), true)
        return Figures(
            name,
            r=_correlation(expected, true),
            r_log=_correlation(np.log(expected), np.log(true)),
            mae=float(np.abs(expected - true).mean()),
            within_25=float((np.abs(expected - true) <= true / 4).mean()),
            accuracy=float((np.searchsorted(classes, expected) == np.searchsorted(classes, true)).mean()),
            pairwise=Pairs(true).in_order(expected),
            coverage=None if covered is None else float(covered.mean()),
            coverage_by_prompt=None if covered is None else self._by_prompt(covered),
            milliseconds=milliseconds,
        )

    def _lengths(self, samples: Sequence[Sample]) -> Array:
        return np.array([min(sample.tokens, self.most) for sample in samples], dtype=np.float64)

    def _by_prompt(self, covered: Array) -> tuple[float, ...]:
        prompts = np.array([len(sample.prompt) for sample in self.test])
        quartiles = np.searchsorted(np.quantile(prompts, _QUARTILES), prompts)
        return tuple(float(covered[quartiles == quartile].mean()) for quartile in np.unique(quartiles))


def _inside(intervals: Array, true: Array) -> Array:
    return np.asarray((intervals[:, 0] <= true) & (true <= intervals[:, 1]))


def _correlation(left: Array, right: Array) -> float:
    if np.ptp(left) < 1e-9 or np.ptp(right) < 1e-9:
        return 0.0
    return float(np.corrcoef(left, right)[0, 1])


class Pairs:
    """Pairs of the lengths `true`, (n,), that differ, out of `count` random pairs."""

    def __init__(self, true: Array, count: int = _PAIRS) -> None:
        left, right = np.random.default_rng(0).integers(len(true), size=(2, count))
        differ = true[left] != true[right]
        self._left, self._right = left[differ], right[differ]
        self._signs = np.sign(true[self._left].astype(np.float64) - true[self._right])

    def in_order(self, expected: Array) -> float:
        if not len(self._signs):
            return 0.5
        signs = np.sign(expected[self._left] - expected[self._right]) * self._signs
        return float((signs.mean() + 1) / 2)


def _mean_of(runs: Sequence[Figures]) -> Figures:
    fields = dataclasses.fields(Figures)[1:8]
    return Figures(
        runs[0].name, **{field.name: np.mean([getattr(run, field.name) for run in runs]).item() for field in fields}
    )
