"""Baselines of ALISE's evaluation (sections 4.2 and 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

from skipjoin.core.policy import Policies
from skipjoin.recipes import Forecasts, Settings, alise, recipe
from skipjoin.recipes.alise import AgingParams, ForecastParams, shortest
from skipjoin.recipes.parts import Oracle, true_lengths


@recipe(forecasts=Forecasts.LEARNED, needs_lossless_swap=True)
def alise_fp(s: Settings, p: ForecastParams) -> Policies:
    """ALISE without quantization: swapping preserves KV exactly."""
    return alise.alise(s, p)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgingOracleParams(AgingParams):
    """Aging parameters and the source of true output lengths."""

    oracle: Oracle = "none"


@recipe(forecasts=Forecasts.TRUE)
def alise_oracle(s: Settings, p: AgingOracleParams) -> Policies:
    """ALISE with true output lengths, the oracle of its experiments."""
    return shortest(s, p, true_lengths("alise-oracle", s, p.oracle))
