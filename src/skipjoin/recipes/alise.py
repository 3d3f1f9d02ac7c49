"""ALISE and its variants: what each says about forecasts, aging and KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from skipjoin.core.policy import EvictionPolicy, Policies
from skipjoin.core.request import Request
from skipjoin.knobs import Knob
from skipjoin.policies.eviction import Defer, ProactiveSwap, Recompute, Swap
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.predictors import forecast_tokens
from skipjoin.policies.remaining import RemainingTime
from skipjoin.policies.wait_times import ShortestWithWaits
from skipjoin.recipes.parts import Oracle, preemptive, true_lengths
from skipjoin.recipes.registry import Forecasts, Params, Settings, recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class AgingParams(Params):
    """How age counts (ALISE section 3.1, "virtual aging")."""

    aging: Annotated[
        float,
        Knob("Seconds of remaining time that a second of age makes up for; 0: requests do not age.", low=0, high=1e3),
    ] = 0.1
    aging_since: Annotated[
        str,
        Knob(
            "From when age counts: from its arrival, which bounds when a request ends, or since it ran last, which "
            "bounds how long it goes without a token",
            choices=("arrival", "last-run"),
        ),
    ] = "arrival"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgingOracleParams(AgingParams):
    """How age counts, and where true output lengths come from."""

    oracle: Oracle = "none"


def _alise(
    s: Settings,
    p: AgingParams,
    eviction: EvictionPolicy,
    lengths: Callable[[Request], float] = forecast_tokens,
) -> Policies:
    def ordering() -> ShortestWithWaits:
        value = RemainingTime(ExecutionTime(s.cost), lengths, aging=p.aging, since_arrival=p.aging_since == "arrival")
        return ShortestWithWaits(value)

    return preemptive(s, ordering, eviction)


@recipe(forecasts=Forecasts.LEARNT)
def alise(s: Settings, p: AgingParams) -> Policies:
    """ALISE: least predicted remaining time first, with aging; KV swapped ahead of need, in the engine's swap_dtype."""
    return _alise(s, p, ProactiveSwap(s.cost))


@recipe(forecasts=Forecasts.LEARNT, needs_lossless_swap=True)
def alise_fp(s: Settings, p: AgingParams) -> Policies:
    """ALISE without quantisation: KV returns from the host as it left."""
    return _alise(s, p, ProactiveSwap(s.cost))


@recipe(forecasts=Forecasts.LEARNT)
def alise_reactive(s: Settings, p: AgingParams) -> Policies:
    """ALISE, KV swapped before the step that is short of blocks."""
    return _alise(s, p, Swap(s.cost))


@recipe(forecasts=Forecasts.LEARNT)
def alise_recompute(s: Settings, p: AgingParams) -> Policies:
    """ALISE, KV dropped where blocks are short (ALISE section 4.3)."""
    return _alise(s, p, Recompute())


@recipe(forecasts=Forecasts.LEARNT)
def alise_defer(s: Settings, p: AgingParams) -> Policies:
    """ALISE, newcomers wait where blocks are short (ALISE section 4.3)."""
    return _alise(s, p, Defer())


@recipe(forecasts=Forecasts.TRUE)
def alise_oracle(s: Settings, p: AgingOracleParams) -> Policies:
    """ALISE with true output lengths: the oracle of its experiments."""
    return _alise(s, p, ProactiveSwap(s.cost), true_lengths("alise-oracle", s, p.oracle))
