from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, linear_regression

from skipjoin.core.policy import CostModel
from skipjoin.core.step import StepShape

# Lengths in tokens at which the model is fitted: 32 to 2,048, evenly spaced on a log scale.
_SAMPLES = tuple(round(32 * 2 ** (octave / 2)) for octave in range(13))


def prefill_alone(cost: CostModel, tokens: int) -> float:
    return cost.step(StepShape(prefill=tokens, attention=tokens * (tokens + 1) // 2))


def decode_alone(cost: CostModel, context: int) -> float:
    return cost.step(StepShape(decodes=1, context=context))


def scaled_jct(cost: CostModel, scale: float, prompt: int) -> Callable[[float], float]:
    """Return the JCT objective in seconds as a function of the output tokens L: scale x (t_p + t_g x L).

    t_p is the prefill of `prompt` tokens and t_g a decode step at that context (EconoServe section 4).
    """
    prefill_s, decode_s = prefill_alone(cost, prompt), decode_alone(cost, prompt)
    return lambda tokens: scale * (prefill_s + decode_s * tokens)


class ExecutionTime:
    """Execution time T(s, n) = T0 s + n (alpha s + beta) of s prompt tokens and n output tokens (ALISE section 3.1).

    The model is fitted to a cost model's prefills and single decodes, again after each revision.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._fit()

    @property
    def revision(self) -> int:
        """Revision of the cost model; checking it refits the model if needed."""
        if self._cost.revision != self._revision:
            self._fit()
        return self._revision

    def prefill(self, tokens: int) -> float:
        return self.t0 * tokens

    def prompt(self, tokens: int, cached: int = 0) -> float:
        """Return the device time of computing `tokens` after `cached` ones, besides the fixed time of a step."""
        attention = tokens * cached + tokens * (tokens + 1) // 2
        step = self._cost.step(StepShape(prefill=tokens, attention=attention)) - self._cost.step(StepShape())
        return max(self.prefill(tokens), step)

    def decode(self, context: int) -> float:
        return self.alpha * context + self.beta

    def _fit(self) -> None:
        self._revision = self._cost.revision
        prefills = [prefill_alone(self._cost, n) for n in _SAMPLES]
        decodes = [decode_alone(self._cost, n) for n in _SAMPLES]
        self.t0 = linear_regression(_SAMPLES, prefills, proportional=True).slope
        self.alpha, self.beta = linear_regression(_SAMPLES, decodes)
        self.quality = (_explained(prefills, self.prefill), _explained(decodes, self.decode))


def _explained(seconds: list[float], model: Callable[[int], float]) -> float:
    mean = fmean(seconds)
    total = sum((value - mean) ** 2 for value in seconds)
    left = sum((value - model(tokens)) ** 2 for tokens, value in zip(_SAMPLES, seconds, strict=True))
    return 1 - left / total if total > 0 else 1.0
