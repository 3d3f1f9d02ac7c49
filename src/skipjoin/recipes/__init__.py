"""Serving systems by name. Each is a composition of policies; none has a class of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from skipjoin.core.policy import Batcher, CostModel, LengthPredictor, Ordering, Policies
from skipjoin.policies.admission import OnDemand, WholeMaximum
from skipjoin.policies.batching import Greedy, RunToCompletion
from skipjoin.policies.eviction import DROP_SHARE, Defer, ProactiveSwap, Recompute, Swap
from skipjoin.policies.mlfq import PROMOTION_SHARE, SkipJoinMlfq
from skipjoin.policies.ordering import Fcfs, FixedKey, Prioritized, ShortestRemaining
from skipjoin.policies.stages import EvenStages


@dataclass(frozen=True, slots=True)
class Settings:
    """What a recipe is built from.

    cost: the profile of model and machine. max_seqs, max_tokens: most requests and tokens in a step.
    starvation_s: how long a request may go without running before `fastserve` and `mlfq` promote it. paced: whether
    promotions, and newcomers that make others lose their KV, may take a small share of the time only; where waiting is
    bounded, nothing may pace them. quantum_s: of the first queue; None: the shortest iteration. predictor: the true
    output lengths, which `srpt` needs. stages: of a pipeline, between which batches are shared out; as many plans must
    be in flight, without overlap.
    """

    cost: CostModel
    max_seqs: int = 256
    max_tokens: int = 2048
    starvation_s: float = 30.0
    paced: bool = True
    quantum_s: float | None = None
    predictor: LengthPredictor | None = None
    stages: int = 1


Recipe = Callable[[Settings], Policies]
RECIPES: dict[str, Recipe] = {}


def recipe(build: Recipe) -> Recipe:
    """Register a recipe under its function's name, with hyphens."""
    RECIPES[build.__name__.replace("_", "-")] = build
    return build


def build(name: str, settings: Settings) -> Policies:
    """The policies of the recipe called `name`. Raises ValueError, naming those that exist, if there is none, and where
    the recipe needs something that the settings lack."""
    if name not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(sorted(RECIPES))}, got {name!r}")
    return RECIPES[name](settings)


def _greedy(s: Settings, max_tokens: int, *, chunked: bool) -> Batcher:
    batcher = Greedy(s.max_seqs, max_tokens, chunked=chunked)
    if s.stages == 1:
        return batcher
    seqs, tokens = s.stages * s.max_seqs, s.stages * max_tokens
    return EvenStages(batcher, s.cost, s.stages, most_seqs=seqs, most_tokens=tokens, cuts=chunked)


def _static(s: Settings) -> Batcher:
    batcher = RunToCompletion(s.max_seqs, s.max_tokens)
    if s.stages == 1:
        return batcher
    # One batch for all stages, and who is held back while it recruits would wait for its end.
    tokens = s.stages * s.max_tokens
    return EvenStages(batcher, s.cost, s.stages, most_seqs=s.max_seqs, most_tokens=tokens, cuts=False, holds_back=False)


@recipe
def static(s: Settings) -> Policies:
    """As FasterTransformer schedules: a batch runs until its last request is done, and only then the next begins."""
    return Policies(Prioritized(Fcfs), _static(s), WholeMaximum(), Recompute())


@recipe
def orca(s: Settings) -> Policies:
    """Iteration-level batching; every request owns its maximum of KV from the start."""
    return Policies(Prioritized(Fcfs), _greedy(s, s.max_tokens, chunked=False), WholeMaximum(), Recompute())


@recipe
def fcfs(s: Settings) -> Policies:
    """As vLLM schedules: first come, first served, KV on demand, recomputation under pressure."""
    return Policies(Prioritized(Fcfs), _greedy(s, s.max_tokens, chunked=False), OnDemand(), Recompute())


@recipe
def sarathi(s: Settings) -> Policies:
    """First come, first served with prompts cut into chunks that share steps with decodes."""
    return Policies(Prioritized(Fcfs), _greedy(s, min(512, s.max_tokens), chunked=True), OnDemand(), Recompute())


def _preemptive(s: Settings, ordering: Callable[[], Ordering]) -> Policies:
    """What the preemptive systems share, whatever their order."""
    batcher = _greedy(s, s.max_tokens, chunked=True)
    return Policies(Prioritized(ordering), batcher, OnDemand(), ProactiveSwap(s.cost, drop_share=_drop_share(s)))


def _mlfq(s: Settings, *, skip_join: bool) -> SkipJoinMlfq:
    share = PROMOTION_SHARE if s.paced else math.inf
    return SkipJoinMlfq(
        s.cost, quantum_s=s.quantum_s, starvation_s=s.starvation_s, promotion_share=share, skip_join=skip_join
    )


def _drop_share(s: Settings) -> float:
    return DROP_SHARE if s.paced else math.inf


@recipe
def fastserve(s: Settings) -> Policies:
    """FastServe: skip-join multi-level feedback queue, KV swapped ahead of need."""
    return _preemptive(s, lambda: _mlfq(s, skip_join=True))


@recipe
def fastserve_reactive(s: Settings) -> Policies:
    """FastServe, KV swapped before the step that is short of blocks."""
    return replace(fastserve(s), eviction=Swap(s.cost, drop_share=_drop_share(s)))


@recipe
def fastserve_recompute(s: Settings) -> Policies:
    """FastServe, KV dropped where blocks are short."""
    return replace(fastserve(s), eviction=Recompute())


@recipe
def fastserve_defer(s: Settings) -> Policies:
    """FastServe, newcomers wait where blocks are short."""
    return replace(fastserve(s), eviction=Defer())


@recipe
def mlfq(s: Settings) -> Policies:
    """Plain multi-level feedback queue: every request joins the first queue (FastServe section 4.1, strawman)."""
    return _preemptive(s, lambda: _mlfq(s, skip_join=False))


@recipe
def fixed_priority(s: Settings) -> Policies:
    """Shortest prompt first, for good (FastServe section 4.1, strawman)."""
    return _preemptive(s, lambda: FixedKey(lambda request: len(request.prompt)))


@recipe
def srpt(s: Settings) -> Policies:
    """Shortest remaining time first: the oracle of experiments, where the predictor knows the true lengths."""
    predictor = s.predictor
    if predictor is None:
        raise ValueError("recipe srpt needs a predictor that knows the true output lengths")
    return _preemptive(s, lambda: ShortestRemaining(s.cost, predictor))
