"""Baseline of BROS's evaluation (section 2.2)."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from skipjoin.core.policy_set import Policies
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.batching import Greedy
from skipjoin.policies.eviction import Recompute
from skipjoin.policies.ordering import Fcfs
from skipjoin.recipes import Settings, recipe
from skipjoin.recipes.parts import banded, staged

# `skipjoin serve --recipe` loads this file by its path.
sys.path.append(str(Path(__file__).parents[2]))
from papers.bros.turns import ByTurn, Turn, Turns


@recipe
def round_robin(s: Settings) -> Policies:
    """Alternating steps of real-time and best-effort requests, each first come, first served (BROS section 2.2)."""
    turn = Turn()
    batcher = Turns(Greedy(s.max_seqs, s.max_tokens, chunked=False), turn)
    return Policies(
        ByTurn(turn, partial(banded, s, Fcfs)), staged(s, batcher, s.max_tokens, cuts=False), OnDemand(), Recompute()
    )
