from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.request import Request
from skipjoin.core.step import StepPlan
from skipjoin.core.waits import WaitReason
from skipjoin.recipes import RECIPES
from support.load import make
from support.reasons import Decision
from support.watch import WatchedCore, run
from support.worlds import PIPELINES, Pipeline, world_of


class ToldCore(WatchedCore):
    """Engine core that checks the reasons of each decision, and asks the policies about each request."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.seen = set[WaitReason]()

    def start_step(self, now: float) -> StepPlan | None:
        evictions = {request: request.progress.evictions for request in self.requests.values()}
        plan = super().start_step(now)
        if plan is None:
            return None
        evicted = {
            request for request in self.requests.values() if request.progress.evictions > evictions.get(request, 0)
        }
        decision = Decision(self, plan, evicted)
        wrong = {request.id: decision.waits[request] for request in decision.waiting if not decision.is_true(request)}
        assert not wrong, decision
        self.seen.update(decision.waits[request].reason for request in decision.waiting)
        policies = self.scheduler.policies
        for request in list(self.requests.values())[:3]:
            facts = policies.explain(request, now, self.kv)
            assert facts, "every recipe explains itself"
            assert all(fact.label and fact.meaning.endswith(".") for fact in facts)
        return plan


def drawn(seed: int) -> Iterator[Request]:
    """Yield requests of two clients and of both classes, many of which come at once."""
    rng, now = random.Random(seed), 0.0
    for number in range(14):
        now += rng.choice((0.0, 0.0, 0.05))
        prompt, output = rng.randint(1, 70), rng.randint(1, 40)
        best_effort, client = rng.random() < 0.4, str(number % 2)
        yield make(number, prompt, output, arrival=now, best_effort=best_effort, client=client)


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@settings(max_examples=2)
@given(
    pipeline=st.sampled_from(PIPELINES),
    sizes=st.fixed_dictionaries({"device_blocks": st.sampled_from([40, 90]), "max_seqs": st.sampled_from([3, 8])}),
    weight=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 999),
)
def test_the_reason_of_a_wait_agrees_with_the_step(
    recipe: str, pipeline: Pipeline, sizes: dict[str, int], weight: float | None, seed: int
) -> None:
    world = world_of(recipe, pipeline, None, fair_output_weight=weight, **sizes)
    core = ToldCore(world.core().scheduler)
    run(world, list(drawn(seed)), core=core)


def test_bros_says_that_all_slots_run() -> None:
    """Real-time requests take all slots; the best-effort one behind them waits for a slot."""
    world = world_of("bros", (1, False, 1), None, device_blocks=200, max_seqs=2)
    core = ToldCore(world.core().scheduler)
    run(world, [make(number, 8, 30, best_effort=number == 2) for number in range(3)], core=core)
    assert core.seen == {WaitReason.NO_SLOT}
