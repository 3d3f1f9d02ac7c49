"""ALISE and its variants."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from skipjoin.core.policy import EvictionPolicy, Policies
from skipjoin.core.request import Request
from skipjoin.options import Option
from skipjoin.policies.eviction import Defer, ProactiveSwap, Recompute, Swap
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.predictors import ForecastQuantile
from skipjoin.policies.remaining import RemainingTime
from skipjoin.policies.wait_times import ShortestWithWaits
from skipjoin.recipes.parts import Oracle, preemptive, true_lengths
from skipjoin.recipes.registry import Forecasts, Params, Settings, recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class AgingParams(Params):
    """Aging parameters (ALISE section 3.1, "virtual aging")."""

    aging_s: Annotated[
        float,
        Option(
            "Seconds of age that make a request as good as one that has e times less to do; 0: age does not count.",
            low=0,
            high=1e9,
        ),
    ] = 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastParams(AgingParams):
    """Aging and forecast parameters."""

    length_quantile: Annotated[
        float,
        Option(
            "Share of a forecast's distribution below the length that a request is taken to get; where it gets longer, "
            "that doubles.",
            above=0,
            high=0.999,
        ),
    ] = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class AgingOracleParams(AgingParams):
    """Aging parameters and the source of true output lengths."""

    oracle: Oracle = "none"


def _shortest(s: Settings, p: AgingParams, eviction: EvictionPolicy, lengths: Callable[[Request], float]) -> Policies:
    def ordering() -> ShortestWithWaits:
        return ShortestWithWaits(RemainingTime(ExecutionTime(s.cost), lengths, aging_s=p.aging_s or math.inf))

    return preemptive(s, ordering, eviction)


def _alise(s: Settings, p: ForecastParams, eviction: EvictionPolicy) -> Policies:
    return _shortest(s, p, eviction, ForecastQuantile(p.length_quantile))


@recipe(forecasts=Forecasts.LEARNT)
def alise(s: Settings, p: ForecastParams) -> Policies:
    """ALISE: shortest predicted remaining time first, with aging and proactive swapping in the engine's swap_dtype."""
    return _alise(s, p, ProactiveSwap(s.cost))


@recipe(forecasts=Forecasts.LEARNT, needs_lossless_swap=True)
def alise_fp(s: Settings, p: ForecastParams) -> Policies:
    """ALISE without quantization: swapping preserves KV exactly."""
    return _alise(s, p, ProactiveSwap(s.cost))


@recipe(forecasts=Forecasts.LEARNT)
def alise_reactive(s: Settings, p: ForecastParams) -> Policies:
    """ALISE with reactive swapping, when a step is short of blocks."""
    return _alise(s, p, Swap(s.cost))


@recipe(forecasts=Forecasts.LEARNT)
def alise_recompute(s: Settings, p: ForecastParams) -> Policies:
    """ALISE with recomputation: drops KV when blocks are short (ALISE section 4.3)."""
    return _alise(s, p, Recompute())


@recipe(forecasts=Forecasts.LEARNT)
def alise_defer(s: Settings, p: ForecastParams) -> Policies:
    """ALISE with deferral: new requests wait when blocks are short (ALISE section 4.3)."""
    return _alise(s, p, Defer())


@recipe(forecasts=Forecasts.TRUE)
def alise_oracle(s: Settings, p: AgingOracleParams) -> Policies:
    """ALISE with true output lengths, the oracle of its experiments."""
    return _shortest(s, p, ProactiveSwap(s.cost), true_lengths("alise-oracle", s, p.oracle))
