"""One trace through the simulated and the local executor: the same plans."""

from __future__ import annotations

import random

import torch
from engines import BLOCK_SIZE, VOCAB, tiny_model

from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event, Planned
from skipjoin.core.kv import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.scheduler import Scheduler
from skipjoin.core.step import StepPlan, StepResult
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.local import LocalExecutor, Sampling
from skipjoin.exec.simulated import SimulatedExecutor, SimulatedHandle
from skipjoin.policies.cost import LinearCost
from skipjoin.recipes import RECIPES, Settings, build
from skipjoin.sampling import SamplingParams
from skipjoin.sim.driver import Replica, simulate

COST = LinearCost(floor=0.01, prefill_token=1e-3, decode=1e-4, context_token=1e-5)
BLOCKS = 24


class LocalOnVirtualClock(SimulatedExecutor):
    """The tokens of the model, the time of the cost model."""

    def __init__(self, local: LocalExecutor) -> None:
        super().__init__(COST)
        self._local = local

    def submit(self, plan: StepPlan, now: float) -> SimulatedHandle:
        timed = super().submit(plan, now)
        result = self._local.submit(plan, now).result()
        return SimulatedHandle(StepResult(plan, result.tokens, timed.outcome.seconds), timed.ready_at)


def trace() -> list[Request]:
    draw = random.Random(4)
    now, requests = 0.0, []
    for number in range(40):
        now += draw.expovariate(12)
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 30))]
        sampling = Sampling(SamplingParams(temperature=0), 0, ())
        requests.append(Request(number, now, prompt, draw.randint(1, 20), sampling=sampling))
    return requests


def plans(recipe: str, depth: int, executor: SimulatedExecutor) -> list[tuple[object, ...]]:
    policies = build(recipe, Settings(COST, max_seqs=4, max_tokens=24, starvation_s=0.5))
    core = EngineCore(Scheduler(policies, KVLedger(BLOCKS, 0, BLOCK_SIZE), depth=depth, overlap=depth > 1))
    made: list[tuple[object, ...]] = []

    def note(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Planned):
                pieces = ((piece.request.id, *piece[1:]) for piece in event.plan.slices)
                made.append((round(event.now, 9), *pieces))

    simulate(Replica(core, executor), trace(), on_events=note)
    return made


def test_simulator_and_engine_make_the_same_plans() -> None:
    model = tiny_model("llama")
    for recipe in RECIPES:
        for depth in (1, 2):
            store = KVStore(
                model.config,
                torch.float32,
                torch.device("cpu"),
                device_blocks=BLOCKS,
                host_blocks=0,
                block_size=BLOCK_SIZE,
            )
            local = LocalExecutor(model, store)
            real = plans(recipe, depth, LocalOnVirtualClock(local))
            local.close()
            assert real == plans(recipe, depth, SimulatedExecutor(COST)), (recipe, depth)
            assert len(real) > 50
