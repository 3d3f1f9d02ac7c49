from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from skipjoin.core.policy import CostModel, EvictionPolicy
from skipjoin.core.policy_set import Policies
from skipjoin.core.request import Target
from skipjoin.options import Option
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.best_effort import Patience
from skipjoin.policies.deadlines import ByDeadline, NextTokens, StartedFirst
from skipjoin.policies.eviction import Recompute, Share, Spill, Swap
from skipjoin.policies.packing import Packing, Replacing
from skipjoin.recipes.parts import classed, staged
from skipjoin.recipes.registry import Params, Settings, recipe

# The last is BROS without its KV management (section 7.4.1).
_EVICTIONS: Mapping[str, Callable[[CostModel], EvictionPolicy]] = {
    "share": Share,
    "partial": Spill,
    "swap": Swap,
    "recompute": lambda cost: Recompute(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingParams(Params):
    """Deadlines of tokens, sizes of steps (BROS sections 4.2 and 7.1), and eviction (section 5)."""

    ttft_s: Annotated[
        float, Option("Time to the first token, of real-time requests without an objective.", above=0, high=1e6)
    ] = 0.4
    tpot_s: Annotated[
        float, Option("Time per token after it, of real-time requests without an objective.", above=0, high=1e6)
    ] = 0.2
    base_batch: Annotated[
        int,
        Option(
            "Number of requests up to which a step takes best-effort ones after real-time requests were late.",
            low=1,
            high=1 << 20,
        ),
    ] = 128
    overdue_s: Annotated[
        float,
        Option(
            "A real-time request that misses its deadline by this many seconds may be first among those of its "
            "priority, for 5 % of the time.",
            above=0,
            high=1e9,
        ),
    ] = 10.0
    replacing: Annotated[
        str,
        Option(
            "Which real-time requests a best-effort one may postpone by a step if they can still meet their deadlines: "
            "those with a first token, any as in the paper, or none",
            choices=tuple(choice.value for choice in Replacing),
        ),
    ] = Replacing.NONE.value
    evicts: Annotated[
        str,
        Option(
            "Real-time requests that are evicted for those without a first token: late ones, as in the paper, or also "
            "those ahead of their time per token, furthest ahead first, where moving KV takes little time",
            choices=("late", "ahead"),
        ),
    ] = "late"
    eviction: Annotated[
        str,
        Option(
            "When memory runs short, best-effort requests share their blocks with real-time ones, swap out as many "
            "blocks as these need, swap out as a whole, or recompute",
            choices=tuple(_EVICTIONS),
        ),
    ] = "share"


@recipe
def bros(s: Settings, p: PackingParams) -> Policies:
    """BROS: deadline-aware packing, bidirectional blocks of both service classes, lazy checkpoints of slots."""
    target = Target(ttft_s=p.ttft_s, tpot_s=p.tpot_s)
    tokens = NextTokens(target, counts_lead=p.evicts == "ahead")
    patience = Patience(s.cost)
    batcher = Packing(
        s.max_seqs, s.max_tokens, s.cost, tokens, patience, base=p.base_batch, replacing=Replacing(p.replacing)
    )
    steps = staged(s, batcher, s.max_tokens, cuts=True)
    eviction = _EVICTIONS[p.eviction](s.cost)
    policies = classed(
        s,
        lambda: ByDeadline(tokens, p.overdue_s, s.cost),
        steps,
        OnDemand(),
        eviction,
        best_effort=StartedFirst,
        patience=patience,
    )
    return replace(policies, measured=tokens)
