from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from skipjoin.forecast.mass import Array

_HIDDEN = 64
# Adam's usual settings, with a rate for single examples.
_RATE, _BETA_1, _BETA_2, _EPSILON = 1e-3, 0.9, 0.999, 1e-8
# Initial output (log of 128 tokens) and initial deviation of logs.
_FIRST_LOG, _FIRST_SPREAD = float(np.log(128.0)), float(np.log(3.0))
_KEPT = 0.995  # decay of the squared error per request
_NAMES = ("w1", "b1", "w2", "b2")
_BATCH = 32


class Estimate(NamedTuple):
    log_tokens: float
    spread: float


class Mlp:
    """Model log length = w2 . relu(w1 x + b1) + b2, trained by Adam. Requests that were cut off bound it from below."""

    def __init__(self, width: int) -> None:
        drawn = np.random.default_rng(0)
        self._parameters: dict[str, Array] = {
            "w1": drawn.standard_normal((_HIDDEN, width)) * np.sqrt(2.0 / width),
            "b1": np.zeros(_HIDDEN),
            "w2": drawn.standard_normal(_HIDDEN) * np.sqrt(1.0 / _HIDDEN),
            "b2": np.array([_FIRST_LOG]),
        }
        self._means = {name: np.zeros_like(value) for name, value in self._parameters.items()}
        self._squares = {name: np.zeros_like(value) for name, value in self._parameters.items()}
        self._steps = 0
        self._variance = _FIRST_SPREAD**2

    def copy(self) -> Mlp:
        made = Mlp(self._parameters["w1"].shape[1])
        made.restore(self.state())
        return made

    def estimate(self, x: Array) -> Estimate:
        return Estimate(float(self.logs(x[None])[0]), float(np.sqrt(self._variance)))

    def logs(self, x: Array) -> Array:
        return self._forward(x)[1]

    def _forward(self, x: Array) -> tuple[Array, Array]:
        own = self._parameters
        hidden = np.maximum(x @ own["w1"].T + own["b1"], 0.0)
        return hidden, hidden @ own["w2"] + own["b2"][0]

    def learn(self, x: Array, tokens: int, exact: bool) -> None:
        hidden, expected = self._forward(x[None])
        errors = expected - np.log(tokens)
        if not exact and errors[0] > 0:
            return
        self._variance = _KEPT * self._variance + (1 - _KEPT) * float(errors[0]) ** 2
        self._step(x[None], hidden, errors)

    def epoch(self, x: Array, logs: Array, drawn: np.random.Generator) -> None:
        order = drawn.permutation(len(x))
        for start in range(0, len(order), _BATCH):
            rows = order[start : start + _BATCH]
            hidden, expected = self._forward(x[rows])
            self._step(x[rows], hidden, expected - logs[rows])

    def expect_errors(self, errors: Array) -> None:
        self._variance = float(np.mean(errors**2))

    def _step(self, x: Array, hidden: Array, errors: Array) -> None:
        share = errors / len(errors)
        back = share[:, None] * self._parameters["w2"] * (hidden > 0)
        self._descend({"w1": back.T @ x, "b1": back.sum(axis=0), "w2": share @ hidden, "b2": share.sum(keepdims=True)})

    def _descend(self, slopes: dict[str, Array]) -> None:
        self._steps += 1
        scale = _RATE * np.sqrt(1 - _BETA_2**self._steps) / (1 - _BETA_1**self._steps)
        for name, slope in slopes.items():
            mean, square = self._means[name], self._squares[name]
            mean += (1 - _BETA_1) * (slope - mean)
            square += (1 - _BETA_2) * (slope * slope - square)
            self._parameters[name] -= scale * mean / (np.sqrt(square) + _EPSILON)

    def state(self) -> dict[str, Array]:
        parts = {"parameters": self._parameters, "means": self._means, "squares": self._squares}
        arrays = {f"{part}.{name}": values[name].copy() for part, values in parts.items() for name in _NAMES}
        return arrays | {"progress": np.array([self._steps, self._variance])}

    def restore(self, state: Mapping[str, Array]) -> None:
        for part, values in (("parameters", self._parameters), ("means", self._means), ("squares", self._squares)):
            for name in _NAMES:
                values[name][...] = state[f"{part}.{name}"]
        self._steps, self._variance = int(state["progress"][0]), float(state["progress"][1])
