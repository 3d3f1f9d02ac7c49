"""What several recipes are composed of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from skipjoin.core.policy import AdmissionPolicy, Batcher, EvictionPolicy, Ordering, Policies
from skipjoin.core.request import Request
from skipjoin.options import ConfigError, Knob
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.batching import Greedy
from skipjoin.policies.best_effort import LimitedBestEffort
from skipjoin.policies.eviction import ProactiveSwap
from skipjoin.policies.fairness import Fair, FairSteps
from skipjoin.policies.ordering import Prioritized
from skipjoin.policies.predictors import forecast_tokens, most_tokens
from skipjoin.policies.stages import EvenStages
from skipjoin.recipes.registry import Settings

# Where the true output lengths of an oracle of experiments come from.
Oracle = Annotated[
    str,
    Knob(
        "Whether every request runs to its max_tokens, which then is its true length; without it only simulate "
        "knows the lengths",
        choices=("none", "max-tokens"),
    ),
]

# How much is claimed beyond what is expected (EconoServe section 2.3).
Padding = Annotated[
    float,
    Knob(
        "Share of the expected output that is claimed besides; below 0: that is not claimed at first.",
        above=-1,
        high=10,
    ),
]
ForwardTokens = Annotated[
    int | None,
    Knob("Tokens up to which prompts fill a step (default: what saturates the device).", low=1, high=1 << 20),
]
LengthRange = Annotated[int, Knob("Tokens by which lengths that count as one differ at most.", low=1, high=1 << 20)]
# Tokens of a KV pool that is not known yet.
_ANY_POOL = 1 << 16


def greedy(s: Settings, max_tokens: int, *, chunked: bool) -> Batcher:
    """Requests run in order until a step of `max_tokens` tokens is full. chunked: whether prompts may be cut."""
    return staged(s, Greedy(s.max_seqs, max_tokens, chunked=chunked), max_tokens, cuts=chunked)


def staged(s: Settings, batcher: Batcher, max_tokens: int, *, cuts: bool) -> Batcher:
    """The batcher of each step, of `max_tokens` prompt tokens at most; in a pipeline its steps share out what there is.
    cuts: whether prompts may be cut."""
    if s.stages == 1:
        return batcher
    seqs, tokens = s.stages * s.max_seqs, s.stages * max_tokens
    return EvenStages(batcher, s.cost, s.stages, most_seqs=seqs, most_tokens=tokens, cuts=cuts)


def fair(s: Settings, make: Callable[[], Ordering]) -> Callable[[], Ordering]:
    """The ordering for each client by itself, and clients by the service that they have had, where they are told
    apart."""
    weight, limits = s.fair_output_weight, s.limits
    if weight is None:
        return make
    pool = _ANY_POOL if limits is None else limits.device_blocks * limits.block_size
    return lambda: Fair(make, lead=pool, output_weight=weight)


def banded(
    s: Settings, make: Callable[[], Ordering], *, best_effort: Callable[[], Ordering] | None = None
) -> Prioritized:
    """The service classes and priorities as strict bands, each with an ordering of its own, which is fair between
    clients where they are told apart. best_effort: as in `classed`."""
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
) -> Policies:
    """The service classes and priorities as strict bands, each with an ordering of its own, and steps that best-effort
    requests lengthen only as far as real-time ones can wait, and clients only by the number of clients, where they are
    told apart. best_effort: the ordering of a best-effort band, where it is another one."""
    ordering = banded(s, make, best_effort=best_effort)
    limited = LimitedBestEffort(batcher, s.cost, ordering.is_best_effort)
    steps = limited if s.fair_output_weight is None else FairSteps(limited)
    return Policies(ordering, steps, admission, eviction)


def preemptive(s: Settings, ordering: Callable[[], Ordering], eviction: EvictionPolicy | None = None) -> Policies:
    """What the preemptive systems share, whatever their order. eviction: None: KV is swapped ahead of need."""
    batcher = greedy(s, s.max_tokens, chunked=True)
    return classed(s, ordering, batcher, OnDemand(), eviction or ProactiveSwap(s.cost))


def true_lengths(name: str, s: Settings, oracle: str) -> Callable[[Request], float]:
    """The true output lengths, for a recipe. oracle: an `Oracle`. Raises `ConfigError` if they are not known."""
    if oracle == "max-tokens":
        return most_tokens
    if not s.has_true_forecasts:
        raise ConfigError(
            f"recipe {name} needs true output lengths: set oracle to max-tokens if every request runs to max_tokens"
        )
    return forecast_tokens
