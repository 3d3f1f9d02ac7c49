"""Baselines of ALISE's evaluation (sections 4.2 and 4.3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import Allocation, Deferral
from skipjoin.core.policy_set import Policies
from skipjoin.core.request import Request
from skipjoin.policies.eviction import Recompute
from skipjoin.policies.ordering import Fcfs
from skipjoin.recipes import Forecasts, Settings, recipe
from skipjoin.recipes.alise import AgingParams, shortest
from skipjoin.recipes.parts import Oracle, classed, greedy, true_lengths
from skipjoin.recipes.registry import Params


@dataclass(frozen=True, slots=True, kw_only=True)
class AgingOracleParams(AgingParams):
    """Aging parameters and the source of true output lengths."""

    oracle: Oracle = "none"


@recipe(forecasts=Forecasts.TRUE)
def alise_oracle(s: Settings, p: AgingOracleParams) -> Policies:
    """ALISE with true output lengths, the oracle of its experiments."""
    return shortest(s, p, true_lengths("alise-oracle", s, p.oracle))


class WholeOutput:
    """Reserves blocks for the prompt and the true output at admission, as vLLM's Orca (Oracle) does."""

    is_decode_invariant = True

    def __init__(self, lengths: Callable[[Request], float]) -> None:
        self._lengths = lengths

    def reserve(self, request: Request, target: int, kv: KVAccounts) -> Allocation | Deferral:
        tokens = len(request.prompt) + math.ceil(self._lengths(request))
        blocks = kv.blocks_for(max(target, request.progress.known, tokens))
        return Allocation(now=blocks, blocks=blocks) if blocks <= kv.available else Deferral.INCOMING


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleParams(Params):
    """Source of true output lengths."""

    oracle: Oracle = "none"


@recipe(forecasts=Forecasts.TRUE)
def orca_exact(s: Settings, p: OracleParams) -> Policies:
    """Iteration-level batching as in Orca, with KV for prompt and true output reserved at admission."""
    admission = WholeOutput(true_lengths("orca-exact", s, p.oracle))
    return classed(s, Fcfs, greedy(s, s.max_tokens, chunked=False), admission, Recompute())
