from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from skipjoin.core.engine import EngineCore
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.step import StepResult, StepShape
from skipjoin.exec.simulated import SimulatedExecutor, exactly, none
from skipjoin.policies.cost import TrackedCost
from skipjoin.policies.eviction import KeepKv
from skipjoin.recipes import build
from skipjoin.sim.driver import Replica
from skipjoin.sim.experiments.submissions import END
from skipjoin.sim.experiments.system import System

# Any but `END`.
_TOKEN = 0


def make_replica(system: System, lengths: Sequence[int], *, together: bool, keeps_kv: bool, seed: str) -> Replica:
    """Build a replica.

    Args:
        together: Simulate decode-only steps at once, where that does not change the result.
        keeps_kv: Swap evicted KV, because the replica cannot compute prompts.
    """
    cost = TrackedCost(system.cost) if system.step_noise else None
    policies = build(system.recipe, replace(system.settings, cost=cost or system.cost), system.own_params)
    if keeps_kv:
        policies = replace(policies, eviction=KeepKv())
    kv = KVLedger(system.kv_blocks, system.cpu_blocks, system.block_size, states=system.states)
    core = EngineCore(system.scheduler(policies, kv, receives_kv=keeps_kv))
    executor = SimulatedExecutor(
        system.cost,
        _sampler(lengths),
        system.stage_shares or system.stages,
        alike=_alike(lengths) if together else none,
        jitter=exactly if cost is None else _jitter(system.step_noise, seed),
        block_size=system.block_size,
    )
    if cost is None:
        return Replica(core, executor, decision_s=system.decision_s)
    return Replica(core, executor, decision_s=system.decision_s, on_result=partial(_learn, cost))


def _learn(cost: TrackedCost, result: StepResult) -> None:
    if result.plan.slices:
        cost.learn(StepShape.of(result.plan.slices), result.seconds - result.moving)


def _jitter(noise: float, seed: str) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: rng.lognormvariate(-noise * noise / 2, noise)


def _sampler(lengths: Sequence[int]) -> Callable[[Request, int], int]:
    def sample(request: Request, position: int) -> int:
        return END if position + 1 - len(request.prompt) >= lengths[request.id] else _TOKEN

    return sample


def _alike(lengths: Sequence[int]) -> Callable[[Request], int]:
    return lambda request: lengths[request.id] - len(request.progress.output) - 1
