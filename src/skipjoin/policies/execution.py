"""Execution time by a linear model: what a request takes, from the lengths of its prompt and of its output."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, linear_regression

from skipjoin.core.policy import CostModel
from skipjoin.core.step import StepShape

# Lengths in tokens that the model is fitted at: 32 to 2,048, evenly on a log scale.
_SAMPLES = tuple(round(32 * 2 ** (octave / 2)) for octave in range(13))


def prefill_alone(cost: CostModel, tokens: int) -> float:
    """Seconds of the prefill of so many tokens, without other requests."""
    return cost.step(StepShape(prefill=tokens, attention=tokens * (tokens + 1) // 2))


def decode_alone(cost: CostModel, context: int) -> float:
    """Seconds of a decode step at a context of so many tokens, without other requests."""
    return cost.step(StepShape(decodes=1, context=context))


def scaled_jct(cost: CostModel, scale: float, prompt: int) -> Callable[[float], float]:
    """The JCT objective, in seconds, by the output tokens L: scale x (t_p + t_g x L), with the prefill of so many
    prompt tokens and a decode step at that context, both alone (EconoServe section 4). No output's length is in it but
    L."""
    prefill_s, decode_s = prefill_alone(cost, prompt), decode_alone(cost, prompt)
    return lambda tokens: scale * (prefill_s + decode_s * tokens)


class ExecutionTime:
    """T(s, n) = T0 s + n (alpha s + beta) seconds for a prompt of s tokens and an output of n, fitted to what a cost
    model says of prefills and of single decodes (ALISE section 3.1, equations 3 to 5). Fitted again when the cost model
    revises itself.

    t0, alpha, beta: the coefficients, in seconds. quality: share of the variance of prefill times and of decode times
    that the model explains (R squared).
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._fit()

    @property
    def revision(self) -> int:
        """Changes when answers given before no longer hold."""
        if self._cost.revision != self._revision:
            self._fit()
        return self._revision

    def prefill(self, tokens: int) -> float:
        """Seconds of a prefill, as of the revision that was asked for last."""
        return self.t0 * tokens

    def decode(self, context: int) -> float:
        """Seconds of a decode of a request with so many tokens, as of the revision that was asked for last."""
        return self.alpha * context + self.beta

    def _fit(self) -> None:
        self._revision = self._cost.revision
        prefills = [prefill_alone(self._cost, n) for n in _SAMPLES]
        decodes = [decode_alone(self._cost, n) for n in _SAMPLES]
        self.t0 = linear_regression(_SAMPLES, prefills, proportional=True).slope
        self.alpha, self.beta = linear_regression(_SAMPLES, decodes)
        self.quality = (_explained(prefills, self.prefill), _explained(decodes, self.decode))


def _explained(seconds: list[float], model: Callable[[int], float]) -> float:
    """R squared of a model at `_SAMPLES`; 1 where all times are equal."""
    mean = fmean(seconds)
    total = sum((one - mean) ** 2 for one in seconds)
    left = sum((one - model(tokens)) ** 2 for tokens, one in zip(_SAMPLES, seconds, strict=True))
    return 1 - left / total if total > 0 else 1.0
