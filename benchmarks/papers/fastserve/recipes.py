"""Baselines of FastServe's evaluation (sections 4.1 and 6.1)."""

from __future__ import annotations

import sys
from pathlib import Path

from skipjoin.core.policy import Batcher
from skipjoin.core.policy_set import Policies
from skipjoin.policies.eviction import Recompute
from skipjoin.policies.ordering import Fcfs, FixedKey
from skipjoin.policies.stages import EvenStages
from skipjoin.recipes import Settings, recipe
from skipjoin.recipes.fastserve import QueueParams, queues
from skipjoin.recipes.parts import banded, classed, greedy, preemptive

# `skipjoin serve --recipe` loads this file by its path.
sys.path.append(str(Path(__file__).parents[2]))
from papers.fastserve.static import RunToCompletion, WholeMaximum


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
    return EvenStages(batcher, s.cost, s.stages, max_seqs=s.max_seqs, max_tokens=tokens, cuts=False, holds_back=False)


@recipe
def orca(s: Settings) -> Policies:
    """Iteration-level batching as in Orca, with KV for prompt and max_tokens reserved at admission."""
    return classed(s, Fcfs, greedy(s, s.max_tokens, chunked=False), WholeMaximum(), Recompute())


@recipe
def fixed_priority(s: Settings) -> Policies:
    """Shortest prompt first, without changes of priority (FastServe section 4.1, strawman)."""
    return preemptive(s, lambda: FixedKey(lambda request: len(request.prompt)))


@recipe
def mlfq(s: Settings, p: QueueParams) -> Policies:
    """Plain multi-level feedback queue: every request joins the first queue (FastServe section 4.1, strawman)."""
    return queues(s, p, skip_join=False)
