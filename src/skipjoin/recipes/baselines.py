from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from skipjoin.core.policy_set import Policies
from skipjoin.options import Option
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.eviction import Recompute
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.ordering import Fcfs
from skipjoin.policies.remaining import RemainingTime
from skipjoin.policies.valued import Valued
from skipjoin.recipes.parts import Oracle, classed, greedy, preemptive, true_lengths
from skipjoin.recipes.registry import Forecasts, Params, Settings, recipe


@recipe
def fcfs(s: Settings) -> Policies:
    """First come, first served as in vLLM, with KV allocated on demand and recomputation when blocks are short."""
    return classed(s, Fcfs, greedy(s, s.max_tokens, chunked=False), OnDemand(), Recompute())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkParams(Params):
    chunk_tokens: Annotated[
        int, Option("Maximum number of tokens in a step, decodes and chunks of prompts together.", low=1, high=1 << 20)
    ] = 512


@recipe
def sarathi(s: Settings, p: ChunkParams) -> Policies:
    """First come, first served with chunked prompts that share steps with decodes, as in Sarathi."""
    batcher = greedy(s, min(p.chunk_tokens, s.max_tokens), chunked=True)
    return classed(s, Fcfs, batcher, OnDemand(), Recompute())


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleParams(Params):
    oracle: Oracle = "none"


@recipe(forecasts=Forecasts.TRUE)
def srpt(s: Settings, p: OracleParams) -> Policies:
    """Shortest remaining time first with true output lengths, an oracle for experiments."""
    lengths = true_lengths("srpt", s, p.oracle)
    return preemptive(s, lambda: Valued(RemainingTime(ExecutionTime(s.cost), lengths)))
