"""BROS and its baselines, for real-time and best-effort requests together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from skipjoin.core.policy import EvictionPolicy, Policies
from skipjoin.core.request import Target
from skipjoin.options import Option
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.batching import Greedy
from skipjoin.policies.deadlines import ByDeadline, NextTokens, StartedFirst
from skipjoin.policies.eviction import Lend, Recompute, Spill, Swap
from skipjoin.policies.ordering import Fcfs
from skipjoin.policies.packing import Packing
from skipjoin.policies.turns import ByTurn, Turn, Turns
from skipjoin.recipes.parts import banded, classed, staged
from skipjoin.recipes.registry import Params, Settings, recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingParams(Params):
    """Deadlines of tokens and sizes of steps (BROS sections 4.2 and 7.1)."""

    ttft_s: Annotated[
        float, Option("Time to the first token, of real-time requests without an objective.", above=0, high=1e6)
    ] = 0.4
    tpot_s: Annotated[
        float, Option("Time per token after it, of real-time requests without an objective.", above=0, high=1e6)
    ] = 0.2
    base_batch: Annotated[
        int,
        Option(
            "Up to how many requests a step takes best-effort ones when real-time requests ran late.",
            low=1,
            high=1 << 20,
        ),
    ] = 128
    overdue_s: Annotated[
        float,
        Option(
            "A real-time request that misses its deadline by so many seconds comes before all others.",
            above=0,
            high=1e9,
        ),
    ] = 10.0


def _packed(s: Settings, p: PackingParams, eviction: EvictionPolicy) -> Policies:
    tokens = NextTokens(Target(ttft_s=p.ttft_s, tpot_s=p.tpot_s))
    batcher = Packing(s.max_seqs, s.max_tokens, s.cost, tokens, base=p.base_batch)
    steps = staged(s, batcher, s.max_tokens, cuts=True)
    return classed(s, lambda: ByDeadline(tokens, p.overdue_s), steps, OnDemand(), eviction, best_effort=StartedFirst)


@recipe
def bros(s: Settings, p: PackingParams) -> Policies:
    """BROS: deadline-aware packing, bidirectional blocks of both service classes, lazy checkpoints of slots."""
    return _packed(s, p, Lend(s.cost))


@recipe
def bros_unshared(s: Settings, p: PackingParams) -> Policies:
    """BROS without shared blocks: swaps out only as many best-effort blocks as real-time requests need."""
    return _packed(s, p, Spill(s.cost))


@recipe
def bros_swap(s: Settings, p: PackingParams) -> Policies:
    """BROS with deadline-aware packing, but best-effort requests swapped as a whole."""
    return _packed(s, p, Swap(s.cost))


@recipe
def bros_recompute(s: Settings, p: PackingParams) -> Policies:
    """BROS without its KV management: best-effort requests recompute preempted KV (BROS section 7.4.1)."""
    return _packed(s, p, Recompute())


@recipe
def round_robin(s: Settings) -> Policies:
    """Alternating steps of real-time and best-effort requests, each first come, first served (BROS section 2.2)."""
    turn = Turn()
    batcher = Turns(Greedy(s.max_seqs, s.max_tokens, chunked=False), turn)
    return Policies(
        ByTurn(turn, partial(banded, s, Fcfs)), staged(s, batcher, s.max_tokens, cuts=False), OnDemand(), Recompute()
    )
