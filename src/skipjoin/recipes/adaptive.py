from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

from skipjoin.core.policy import Ordering
from skipjoin.core.policy_set import Policies
from skipjoin.options import Option
from skipjoin.policies.adaptive import Adaptive
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.batching import Yielding
from skipjoin.policies.gittins import GittinsIndex
from skipjoin.policies.proactive_swap import DisplacingSwap
from skipjoin.policies.program_book import ProgramBook
from skipjoin.policies.program_leases import ProgramLeases
from skipjoin.policies.programs import ByProgram
from skipjoin.recipes.parts import classed, staged
from skipjoin.recipes.registry import Forecasts, Params, Settings, recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveParams(Params):
    """Bounds on what later requests may take from earlier ones."""

    overtaking_s: Annotated[
        float,
        Option(
            "Seconds after a request's arrival from which no later request is preferred, except for its first token.",
            above=0,
            high=1e9,
        ),
    ] = 3600.0
    first_share: Annotated[
        float,
        Option(
            "Share of the time for first tokens and recomputation up to which first tokens precede other work.",
            low=0.01,
            high=1,
        ),
    ] = 0.5
    prompt_patience: Annotated[
        float,
        Option(
            "How many times its own prefill time later another request may arrive and still precede it because of a "
            "shorter prompt.",
            low=0,
            high=1e6,
        ),
    ] = 400.0
    programs: Annotated[
        bool, Option("Schedule the calls of a program as one, and keep its KV while it calls a tool.")
    ] = True


@recipe(forecasts=Forecasts.LEARNED)
def adaptive(s: Settings, p: AdaptiveParams) -> Policies:
    """Adaptive: learned Gittins index, first tokens first, aging by what ordering gains, and proactive swapping."""
    index = GittinsIndex(s.cost, s.max_seqs)

    def ordering() -> Adaptive:
        return Adaptive(
            index, overtaking_s=p.overtaking_s, first_share=p.first_share, prompt_patience=p.prompt_patience
        )

    # Between clients that take turns, first tokens would make them recompute KV for each other.
    eviction = DisplacingSwap(s.cost, slots=s.stages * s.max_seqs, exempts_first=s.fair_output_weight is None)
    batcher = Yielding(s.max_seqs, s.max_tokens, s.cost, tpot_s=math.inf if s.slo_s is None else s.slo_s)
    book = ProgramBook()
    leases = ProgramLeases(OnDemand(), book, s.cost)

    def of_programs(make: Callable[[], Ordering]) -> Callable[[], Ordering]:
        return (lambda: ByProgram(make, book, overtaking_s=p.overtaking_s)) if p.programs else make

    policies = classed(
        s,
        of_programs(ordering),
        staged(s, batcher, s.max_tokens, cuts=True),
        leases if p.programs else OnDemand(),
        eviction,
    )
    return replace(policies, learned=index.model, retention=leases if p.programs else None)
