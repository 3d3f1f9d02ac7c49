from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from skipjoin.core.policy import AdmissionPolicy, Batcher, EvictionPolicy, Ordering
from skipjoin.core.policy_set import Policies
from skipjoin.core.request import Request
from skipjoin.options import ConfigError, Option
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.batching import Greedy
from skipjoin.policies.best_effort import LimitedBestEffort, Patience
from skipjoin.policies.eviction import DROP_SHARE, Defer, Recompute, Swap
from skipjoin.policies.fairness import Fair, FairSteps
from skipjoin.policies.ordering import Prioritized
from skipjoin.policies.predictors import forecast_tokens, longest_output
from skipjoin.policies.proactive_swap import ProactiveSwap
from skipjoin.policies.stages import EvenStages
from skipjoin.recipes.registry import Settings

# Source of true output lengths for an oracle.
Oracle = Annotated[
    str,
    Option(
        "Source of true lengths outside of simulate: max-tokens assumes that every request runs to its max_tokens",
        choices=("none", "max-tokens"),
    ),
]

# What happens to KV when blocks run short.
EvictionChoice = Annotated[
    str,
    Option(
        "When memory runs short, KV is swapped ahead of need, swapped when a step lacks blocks, or dropped and "
        "recomputed, or new requests wait",
        choices=("proactive", "reactive", "recompute", "defer"),
    ),
]

# Margin of reservations (EconoServe section 2.3).
Padding = Annotated[
    float,
    Option(
        "Share of the expected output that is reserved in addition. Below 0: share that is not reserved at first.",
        above=-1,
        high=10,
    ),
]
ForwardTokens = Annotated[
    int | None,
    Option("Tokens up to which prompts fill a step (default: what saturates the device).", low=1, high=1 << 20),
]
LengthRange = Annotated[
    int, Option("Width of the ranges of length, in tokens. Lengths in one range are equal.", low=1, high=1 << 20)
]
# Tokens of a KV pool of unknown size.
_ANY_POOL = 1 << 16


def greedy(s: Settings, max_tokens: int, *, chunked: bool) -> Batcher:
    return staged(s, Greedy(s.max_seqs, max_tokens, chunked=chunked), max_tokens, cuts=chunked)


def staged(s: Settings, batcher: Batcher, max_tokens: int, *, cuts: bool) -> Batcher:
    """Return the batcher itself or, in a pipeline, a wrapper that balances its plans."""
    if s.stages == 1:
        return batcher
    seqs, tokens = s.stages * s.max_seqs, s.stages * max_tokens
    return EvenStages(batcher, s.cost, s.stages, max_seqs=seqs, max_tokens=tokens, cuts=cuts)


def fair(s: Settings, make: Callable[[], Ordering]) -> Callable[[], Ordering]:
    weight, limits = s.fair_output_weight, s.limits
    if weight is None:
        return make
    pool = _ANY_POOL if limits is None else limits.device_blocks * limits.block_size
    return lambda: Fair(make, lead=pool, output_weight=weight)


def banded(
    s: Settings, make: Callable[[], Ordering], *, best_effort: Callable[[], Ordering] | None = None
) -> Prioritized:
    return Prioritized(
        fair(s, make), best_effort=best_effort and fair(s, best_effort), best_effort_wait_s=s.best_effort_wait_s
    )


def classed(
    s: Settings,
    make: Callable[[], Ordering],
    batcher: Batcher,
    admission: AdmissionPolicy,
    eviction: EvictionPolicy,
    *,
    best_effort: Callable[[], Ordering] | None = None,
    patience: Patience | None = None,
) -> Policies:
    """Return policies with the ordering of `banded` and steps that limit best-effort requests and clients."""
    ordering = banded(s, make, best_effort=best_effort)
    limited = LimitedBestEffort(batcher, patience or Patience(s.cost), ordering.is_best_effort)
    steps = limited if s.fair_output_weight is None else FairSteps(limited)
    return Policies(ordering, steps, admission, eviction)


def preemptive(s: Settings, ordering: Callable[[], Ordering], eviction: EvictionPolicy | None = None) -> Policies:
    batcher = greedy(s, s.max_tokens, chunked=True)
    return classed(s, ordering, batcher, OnDemand(), eviction or eviction_of(s, "proactive"))


def eviction_of(s: Settings, name: str, *, drop_share: float = DROP_SHARE) -> EvictionPolicy:
    match name:
        case "reactive":
            return Swap(s.cost, drop_share=drop_share)
        case "recompute":
            return Recompute()
        case "defer":
            return Defer()
        case _:
            return ProactiveSwap(s.cost, slots=s.stages * s.max_seqs, drop_share=drop_share)


def true_lengths(name: str, s: Settings, oracle: str) -> Callable[[Request], float]:
    if oracle == "max-tokens":
        return longest_output
    if not s.has_true_forecasts:
        raise ConfigError(
            f"recipe {name} needs true output lengths: set oracle to max-tokens if every request runs to max_tokens"
        )
    return forecast_tokens
