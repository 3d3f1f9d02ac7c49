from __future__ import annotations

import random

import pytest

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy import Batcher
from skipjoin.core.policy_set import Policies
from skipjoin.core.refusals import Refusal
from skipjoin.core.request import Request
from skipjoin.core.step import StepPlan, StepResult
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.batching import ChunkedBuilder, Greedy
from skipjoin.policies.eviction import Recompute
from skipjoin.policies.ordering import Fcfs
from skipjoin.policies.whole_prompts import WholePrompts
from support.load import make


def plans_of(batcher: Batcher, seed: int, *, overlap: bool) -> list[tuple[object, ...]]:
    """Return what the steps of a random load compute, with blocks, and their events."""
    draw = random.Random(seed)
    policies = Policies(Fcfs(), batcher, OnDemand(), Recompute())
    scheduler = Scheduler(policies, KVLedger(24, 0, 4), depth=2 if overlap else 1, overlap=overlap)
    core, plans, found, now = EngineCore(scheduler), list[StepPlan](), list[tuple[object, ...]](), 0.0
    for number in range(24):
        core.add(make(number, draw.randint(1, 9), draw.randint(1, 30)), now)
    while core.requests or plans:
        now += 0.01
        while (plan := core.start_step(now)) is not None:
            plans.append(plan)
            found.append(tuple((piece.request.id, *piece[1:]) for piece in plan.slices))
        for request in draw.sample(sorted(core.requests.values(), key=lambda one: one.id), len(core.requests) // 8):
            request.progress.await_grammar(draw.random() < 0.5)
        if not plans:
            for request in core.requests.values():
                request.progress.await_grammar(False)
            continue
        plan = plans.pop(0)
        core.finish_step(StepResult(plan, [7 if piece.samples else None for piece in plan.slices], 0.01), now)
        found += [(type(event).__name__,) for event in core.take_events()]
    return found


@pytest.mark.parametrize("overlap", [False, True])
def test_decodes_that_the_batcher_is_not_asked_about_are_planned_as_the_others(overlap: bool) -> None:
    """The wrapper changes no verdict, and is asked about every request."""
    for seed in range(12):
        counted = plans_of(Greedy(6, 16, chunked=False), seed, overlap=overlap)
        asked = plans_of(WholePrompts(Greedy(6, 16, chunked=False)), seed, overlap=overlap)
        assert counted == asked
        assert len(counted) > 100


def test_a_builder_with_an_offer_of_its_own_is_asked_about_decodes() -> None:
    class Asked(ChunkedBuilder):
        def offer(self, request: Request, tokens: int) -> int | Refusal:
            return super().offer(request, tokens)

    class Counted(ChunkedBuilder):
        pass

    assert Counted.counts_decodes
    assert not Asked.counts_decodes

    class Named(Asked):
        @property
        def decodes(self) -> int:
            return 0

    assert Named.counts_decodes
