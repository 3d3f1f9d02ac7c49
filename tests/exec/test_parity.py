"""The simulator and the engine make the same plans for one trace, at each depth."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from copiers import HarshStore
from engines import BLOCK_SIZE, VOCAB, tiny_model

from skipjoin.config import EngineConfig
from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Computed, Event, Moved, Planned
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy_set import Policies
from skipjoin.core.request import Request, RequestOptions
from skipjoin.core.step import Move, StepPlan
from skipjoin.engine.scheduling import make_scheduler
from skipjoin.exec.local import LocalExecutor
from skipjoin.exec.sampling import Sampling
from skipjoin.exec.simulated import SimulatedExecutor, SimulatedHandle
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.eviction import Swap
from skipjoin.recipes import Settings
from skipjoin.sampling import SamplingParams
from skipjoin.sim.driver import Replica, simulate
from skipjoin.sim.experiments.machines import Machine
from support.policies import SYSTEMS, SpillAny
from support.recipes import RECIPES, build, own
from support.watch import plan_value
from support.worlds import exhaustive

# Moves take about as long as steps, so that some are in flight for several steps.
COST = LinearCost(floor=0.01, prefill_token=1e-3, decode=1e-4, context_token=1e-5, block=1.5e-3)
BLOCKS = 16
SETTINGS = Settings(COST, max_seqs=4, max_tokens=24, has_true_forecasts=True)
# With a CPU tier the other recipes plan as without one, and without one all variants of a system plan alike.
SWAPPING = [recipe for recipe in RECIPES if isinstance(build(recipe, SETTINGS).eviction, Swap)]
# These reserve their expected need and move little.
EXACT = [recipe for recipe in SWAPPING if not isinstance(build(recipe, SETTINGS).admission, OnDemand)]


SPILLING, FAIR = "fastserve, spilling", "fastserve, fair"


# Returns the scheduler of policies and a ledger.
MakeScheduler = Callable[[Policies, KVLedger], Scheduler]


def of_engine(depth: int) -> MakeScheduler:
    """Return what an engine makes of `--pipeline-depth`."""
    config = EngineConfig(pipeline_depth=depth)
    return lambda policies, kv: make_scheduler(config, policies, kv, config.plans_in_flight("cpu"))


def of_simulator(depth: int) -> MakeScheduler:
    (system,) = Machine(model="opt-13b").systems("fcfs", pipeline_depth=depth)
    return partial(system.scheduler, receives_kv=False)


def policies_of(recipe: str) -> Policies:
    name = "fastserve" if recipe in (SPILLING, FAIR) else recipe
    settings = replace(SETTINGS, fair_output_weight=2.0) if recipe == FAIR else SETTINGS
    policies = build(name, settings, own(name, {"starvation_s": 0.5}))
    return replace(policies, eviction=SpillAny(COST)) if recipe == SPILLING else policies


class LocalOnVirtualClock(SimulatedExecutor):
    """Executor with the tokens of the model and the durations and completion times of the cost model."""

    def __init__(self, local: LocalExecutor) -> None:
        super().__init__(COST)
        self._local = local
        self._early: list[Move] = []  # complete, but not yet on the virtual clock

    def submit(self, plan: StepPlan, now: float) -> SimulatedHandle:
        timed = super().submit(plan, now)
        result = self._local.submit(plan, now).result()
        self._early += result.completed
        for move in timed.outcome.completed:
            while move not in self._early:
                self._early += self._local.submit(StepPlan(plan.id, ()), now).result().completed
            self._early.remove(move)
        return SimulatedHandle(replace(timed.outcome, tokens=result.tokens), timed.ready_at)

    def on_finished(self, request: Request) -> None:
        self._local.on_finished(request)


def trace() -> list[Request]:
    draw = random.Random(4)
    now, requests = 0.0, []
    for number in range(20):
        now += draw.expovariate(12)
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 30))]
        sampling = Sampling(SamplingParams(temperature=0), 0, ())
        options = RequestOptions(client=f"client {number % 3}")
        requests.append(Request(number, now, prompt, draw.randint(1, 20), options=options, sampling=sampling))
    return requests


class Run:
    """One trace run through an executor."""

    def __init__(self, recipe: str, executor: SimulatedExecutor, cpu_blocks: int, scheduler: MakeScheduler) -> None:
        core = EngineCore(scheduler(policies_of(recipe), KVLedger(BLOCKS, cpu_blocks, BLOCK_SIZE)))
        self.made: list[tuple[object, ...]] = []
        self.moved = self.longest = self.max_in_flight = 0
        self._in_flight = 0
        self._begun: dict[Move, int] = {}
        requests = trace()
        simulate(Replica(core, executor), requests, on_events=self._note)
        self.outputs = [request.progress.output for request in requests]

    def _note(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Planned):
                plan = event.plan
                self._begun.update((move, len(self.made)) for move in (*plan.blocking, *plan.overlapped))
                self.made.append((round(event.now, 9), *plan_value(plan)))
                self._in_flight += 1
                self.max_in_flight = max(self.max_in_flight, self._in_flight)
            elif isinstance(event, Computed):
                self._in_flight -= 1
            elif isinstance(event, Moved):
                self.moved += 1
                self.longest = max(self.longest, len(self.made) - self._begun[event.move])


# A recipe that swaps has one depth without a CPU tier and the other with one. `exhaustive` exchanges them.
@pytest.mark.parametrize("turn", [0, exhaustive(1)])
@pytest.mark.parametrize(
    ("recipes", "cpu_blocks"), [(SYSTEMS, 0), ([*SWAPPING, SPILLING, FAIR], 40)], ids=["drop", "swap"]
)
def test_simulator_and_engine_make_the_same_plans(recipes: list[str], cpu_blocks: int, turn: int) -> None:
    model = tiny_model("llama")
    outputs = []
    for recipe in recipes:
        depth = 1 + ([*RECIPES, SPILLING, FAIR].index(recipe) + bool(cpu_blocks) + turn) % 2
        store = HarshStore(
            model.config,
            torch.float32,
            torch.device("cpu"),
            device_blocks=BLOCKS,
            cpu_blocks=cpu_blocks,
            block_size=BLOCK_SIZE,
        )
        local = LocalExecutor(model, store)
        real = Run(recipe, LocalOnVirtualClock(local), cpu_blocks, of_engine(depth))
        local.close()
        simulated = Run(recipe, SimulatedExecutor(COST), cpu_blocks, of_simulator(depth))
        assert real.made == simulated.made, (recipe, depth)
        assert (real.max_in_flight, simulated.max_in_flight) == (depth, depth), recipe
        assert len(real.made) > 30
        outputs.append(real.outputs)
        if cpu_blocks and recipe not in EXACT:
            assert real.moved > 5, (recipe, depth)
        if cpu_blocks and recipe == "fastserve":
            assert real.longest > 2
    # Sampling is greedy, so that every recipe yields the same tokens, whatever it moved or dropped.
    assert all(other == outputs[0] for other in outputs)
