from __future__ import annotations

import numpy as np

from skipjoin.forecast.encode import FEATURES
from skipjoin.forecast.head import Example, Head
from skipjoin.forecast.mass import BINS, EDGES, Array
from skipjoin.forecast.models import Guess, Model, Prompt
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
