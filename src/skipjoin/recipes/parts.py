"""What several recipes are composed of."""

from __future__ import annotations

from collections.abc import Callable

from skipjoin.core.policy import Batcher, EvictionPolicy, Ordering, Policies
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.batching import Greedy
from skipjoin.policies.eviction import ProactiveSwap
from skipjoin.policies.ordering import Prioritized
from skipjoin.policies.stages import EvenStages
from skipjoin.recipes.registry import Settings


def greedy(s: Settings, max_tokens: int, *, chunked: bool) -> Batcher:
    """Requests run in order, until a step of `max_tokens` tokens is full. chunked: whether prompts may be cut."""
    batcher = Greedy(s.max_seqs, max_tokens, chunked=chunked)
    if s.stages == 1:
        return batcher
    seqs, tokens = s.stages * s.max_seqs, s.stages * max_tokens
    return EvenStages(batcher, s.cost, s.stages, most_seqs=seqs, most_tokens=tokens, cuts=chunked)


def preemptive(s: Settings, ordering: Callable[[], Ordering], eviction: EvictionPolicy | None = None) -> Policies:
    """What the preemptive systems share, whatever their order. eviction: None: KV is swapped ahead of need."""
    batcher = greedy(s, s.max_tokens, chunked=True)
    return Policies(Prioritized(ordering), batcher, OnDemand(), eviction or ProactiveSwap(s.cost))
