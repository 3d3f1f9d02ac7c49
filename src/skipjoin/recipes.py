"""Serving systems by name. Each is a composition of policies; none has a class of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from skipjoin.core.policy import CostModel, LengthPredictor, Ordering, Policies
from skipjoin.policies.batching import Greedy
from skipjoin.policies.ordering import Fcfs, Prioritized, ShortestRemaining, SkipJoinMlfq
from skipjoin.policies.predictors import MaxTokens
from skipjoin.policies.pressure import Recompute
from skipjoin.policies.reservation import OnDemand, WholeMaximum


@dataclass(frozen=True, slots=True)
class Settings:
    """What a recipe is built from.

    cost: the profile of model and machine. max_seqs, max_tokens: most requests and tokens in a step.
    starvation_s: how long a request may go without running before `fastserve` promotes it. predictor: the output
    lengths that `srpt` believes.
    """

    cost: CostModel
    max_seqs: int = 256
    max_tokens: int = 2048
    starvation_s: float = 3.0
    predictor: LengthPredictor = field(default_factory=MaxTokens)


Recipe = Callable[[Settings], Policies]
RECIPES: dict[str, Recipe] = {}


def recipe(build: Recipe) -> Recipe:
    """Register a recipe under its function's name."""
    RECIPES[build.__name__] = build
    return build


def build(name: str, settings: Settings) -> Policies:
    """The policies of the recipe called `name`. Raises ValueError, naming those that exist, if there is none."""
    if name not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(sorted(RECIPES))}, got {name!r}")
    return RECIPES[name](settings)


@recipe
def orca(s: Settings) -> Policies:
    """Iteration-level batching; every request owns its maximum of KV from the start."""
    return Policies(Prioritized(Fcfs), Greedy(s.max_seqs, s.max_tokens, chunked=False), WholeMaximum(), Recompute())


@recipe
def fcfs(s: Settings) -> Policies:
    """As vLLM schedules: first come, first served, KV on demand, recomputation under pressure."""
    return Policies(Prioritized(Fcfs), Greedy(s.max_seqs, s.max_tokens, chunked=False), OnDemand(), Recompute())


@recipe
def sarathi(s: Settings) -> Policies:
    """First come, first served with prompts cut into chunks that share steps with decodes."""
    return Policies(
        Prioritized(Fcfs), Greedy(s.max_seqs, min(512, s.max_tokens), chunked=True), OnDemand(), Recompute()
    )


@recipe
def fastserve(s: Settings) -> Policies:
    """Skip-join multi-level feedback queue."""

    def ordering() -> Ordering:
        return SkipJoinMlfq(s.cost, starvation_s=s.starvation_s)

    return Policies(Prioritized(ordering), Greedy(s.max_seqs, s.max_tokens, chunked=True), OnDemand(), Recompute())


@recipe
def srpt(s: Settings) -> Policies:
    """Shortest remaining time first: the oracle of experiments, where the predictor knows the true lengths."""

    def ordering() -> Ordering:
        return ShortestRemaining(s.cost, s.predictor)

    return Policies(Prioritized(ordering), Greedy(s.max_seqs, s.max_tokens, chunked=True), OnDemand(), Recompute())
