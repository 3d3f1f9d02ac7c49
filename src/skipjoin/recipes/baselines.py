"""Baseline systems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from skipjoin.core.policy import Batcher, Policies
from skipjoin.options import Option
from skipjoin.policies.admission import OnDemand, WholeMaximum
from skipjoin.policies.batching import RunToCompletion
from skipjoin.policies.eviction import Recompute
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.ordering import Fcfs, FixedKey
from skipjoin.policies.remaining import RemainingTime
from skipjoin.policies.stages import EvenStages
from skipjoin.policies.valued import Valued
from skipjoin.recipes.parts import Oracle, banded, classed, greedy, preemptive, true_lengths
from skipjoin.recipes.registry import Forecasts, Params, Settings, recipe


@recipe
def static(s: Settings) -> Policies:
    """Static batching as in FasterTransformer: a batch starts when all requests of the last one have finished."""
    return Policies(banded(s, Fcfs), _until_all_end(s), WholeMaximum(), Recompute())


def _until_all_end(s: Settings) -> Batcher:
    batcher = RunToCompletion(s.max_seqs, s.max_tokens)
    if s.stages == 1:
        return batcher
    # All stages share one batch, so a request that is held back while it fills would wait for the whole batch.
    tokens = s.stages * s.max_tokens
    return EvenStages(batcher, s.cost, s.stages, most_seqs=s.max_seqs, most_tokens=tokens, cuts=False, holds_back=False)


@recipe
def orca(s: Settings) -> Policies:
    """Iteration-level batching as in Orca, with KV for prompt and max_tokens reserved at admission."""
    return classed(s, Fcfs, greedy(s, s.max_tokens, chunked=False), WholeMaximum(), Recompute())


@recipe
def fcfs(s: Settings) -> Policies:
    """First come, first served as in vLLM, with KV allocated on demand and recomputation when blocks are short."""
    return classed(s, Fcfs, greedy(s, s.max_tokens, chunked=False), OnDemand(), Recompute())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkParams(Params):
    """Prompt chunking parameters."""

    chunk_tokens: Annotated[
        int, Option("Most tokens in a step, decodes and chunks of prompts together.", low=1, high=1 << 20)
    ] = 512


@recipe
def sarathi(s: Settings, p: ChunkParams) -> Policies:
    """First come, first served with chunked prompts that share steps with decodes, as in Sarathi."""
    batcher = greedy(s, min(p.chunk_tokens, s.max_tokens), chunked=True)
    return classed(s, Fcfs, batcher, OnDemand(), Recompute())


@recipe
def fixed_priority(s: Settings) -> Policies:
    """Shortest prompt first, without changes of priority (FastServe section 4.1, strawman)."""
    return preemptive(s, lambda: FixedKey(lambda request: len(request.prompt)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleParams(Params):
    """Source of true output lengths."""

    oracle: Oracle = "none"


@recipe(forecasts=Forecasts.TRUE)
def srpt(s: Settings, p: OracleParams) -> Policies:
    """Shortest remaining time first with true output lengths, an oracle for experiments."""
    lengths = true_lengths("srpt", s, p.oracle)
    return preemptive(s, lambda: Valued(RemainingTime(ExecutionTime(s.cost), lengths)))
