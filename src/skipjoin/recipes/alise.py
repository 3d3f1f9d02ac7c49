from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from skipjoin.core.policy_set import Policies
from skipjoin.core.request import Request
from skipjoin.options import Option
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.mlfq import shortest_step
from skipjoin.policies.predictors import ForecastQuantile, forecast_tokens
from skipjoin.policies.remaining import RemainingTime
from skipjoin.policies.wait_times import ShortestWithWaits
from skipjoin.recipes.parts import EvictionChoice, eviction_of, preemptive
from skipjoin.recipes.registry import Forecasts, Params, Settings, recipe

# About 200 s on the machine of the evaluation, for which it was chosen (benchmarks/papers/alise/constants).
_AGING_STEPS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class AgingParams(Params):
    """Aging (ALISE section 3.1, "virtual aging") and eviction (section 4.3)."""

    aging_s: Annotated[
        float | None,
        Option(
            "Seconds of age that count as much as e times less remaining work; 0 ignores age (default: 8192 of the "
            "shortest step).",
            low=0,
            high=1e9,
        ),
    ] = None
    eviction: EvictionChoice = "proactive"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastParams(AgingParams):
    length: Annotated[
        str,
        Option(
            "Output length that a forecast stands for: a quantile of its distribution, or its mean, which with the "
            "forecaster alise is the paper's weighted mean of similar prompts",
            choices=("quantile", "mean"),
        ),
    ] = "quantile"
    length_quantile: Annotated[
        float,
        Option(
            "Quantile of the forecast that is used as the output length, with length=quantile. The length doubles each "
            "time the output exceeds it.",
            above=0,
            high=0.999,
        ),
    ] = 0.3


def shortest(s: Settings, p: AgingParams, lengths: Callable[[Request], float]) -> Policies:
    aging_s = _AGING_STEPS * shortest_step(s.cost) if p.aging_s is None else p.aging_s or math.inf

    def ordering() -> ShortestWithWaits:
        return ShortestWithWaits(RemainingTime(ExecutionTime(s.cost), lengths, aging_s=aging_s))

    return preemptive(s, ordering, eviction_of(s, p.eviction))


@recipe(forecasts=Forecasts.LEARNED)
def alise(s: Settings, p: ForecastParams) -> Policies:
    """ALISE: shortest predicted remaining time first, with aging and proactive swapping in the engine's swap_dtype."""
    return shortest(s, p, forecast_tokens if p.length == "mean" else ForecastQuantile(p.length_quantile))
