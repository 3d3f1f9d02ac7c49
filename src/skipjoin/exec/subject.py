"""What is measured for a profile: a model in this process, or one on several ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from skipjoin.core.request import Request
from skipjoin.core.step import Move, Slice, StepPlan
from skipjoin.exec.guess import guess_cost
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.local import LocalExecutor
from skipjoin.exec.sharded import ShardedExecutor
from skipjoin.exec.worker import Sampling
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV
from skipjoin.policies.cost import LinearCost
from skipjoin.sampling import SamplingParams

SAMPLING = Sampling(SamplingParams(temperature=0), 0, ())
# Of the pools that transfers run between.
_TRANSFER_BYTES = 64 << 20


class Facts(NamedTuple):
    """A model and its device pool: num_blocks of block_size tokens. weight_bytes, block_bytes: over all ranks. guess:
    what its steps cost before anything is measured, all stages together."""

    config: ModelConfig
    device: torch.device
    weight_bytes: int
    block_size: int
    num_blocks: int
    block_bytes: int
    guess: LinearCost


class Subject(Protocol):
    """What a profile is measured on. Nobody else uses it meanwhile."""

    facts: Facts

    def run(self, plan: StepPlan) -> tuple[float, ...]:
        """Seconds that each stage takes for the plan while all other stages are at work, too."""
        ...

    def touch(self, blocks: int, tokens: int) -> int:
        """Write that many of the pool's first blocks, by requests of at most so many tokens; how many were. Memory that
        never was written is one page of zeros, which is read faster than any other."""
        ...

    def mover(self, most: int) -> tuple[int, Callable[[Move], float]] | None:
        """How many blocks, up to `most` or fewer where they are large, can be moved at once between pools, and what
        moves them and tells the seconds; None where there is no second pool."""
        ...


class LocalSubject:
    """A model of this process. Transfers run between pools of their own."""

    def __init__(self, executor: LocalExecutor) -> None:
        model, kv = executor.model, executor.store.device
        self._executor = executor
        self.facts = Facts(
            model.config,
            model.device,
            model.weight_bytes,
            kv.block_size,
            kv.num_blocks,
            kv.block_bytes,
            guess_cost(model, kv.block_size),
        )

    def run(self, plan: StepPlan) -> tuple[float, ...]:
        return (self._executor.submit(plan, 0.0).result().seconds,)

    def touch(self, blocks: int, tokens: int) -> int:
        self._executor.store.device.tensor[:blocks].fill_(0.01)
        return blocks

    def mover(self, most: int) -> tuple[int, Callable[[Move], float]]:
        model, size = self._executor.model, self.facts.block_size
        block_bytes = PagedKV.bytes_per_block(model.config, size, model.dtype, model.shard)
        most = max(4, min(most, _TRANSFER_BYTES // block_bytes))
        store = KVStore(
            model.config,
            model.dtype,
            model.device,
            device_blocks=most,
            host_blocks=most,
            block_size=size,
            shard=model.shard,
        )

        def seconds(move: Move) -> float:
            start = time.perf_counter()
            store.copy(move)
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            return time.perf_counter() - start

        return most, seconds


class RankedSubject:
    """A model on several ranks. Transfers are `before` moves of plans, between the pools that there are.

    host_blocks: of each rank.
    """

    def __init__(self, executor: ShardedExecutor, facts: Facts, *, stages: int, host_blocks: int) -> None:
        self._executor = executor
        self._stages = stages
        self._host_blocks = host_blocks
        self.facts = facts

    def run(self, plan: StepPlan) -> tuple[float, ...]:
        # While the middle one of so many is on any stage, the others keep all other stages busy.
        handles = [self._executor.submit(plan, 0.0) for _ in range(2 * self._stages - 1)]
        results = [handle.result() for handle in handles]
        middle = results[self._stages - 1]
        return tuple(stage.busy for stage in middle.stages) or (middle.seconds,)

    def touch(self, blocks: int, tokens: int) -> int:
        size = self.facts.block_size
        for first in range(0, blocks, tokens // size):
            table = tuple(range(first, min(blocks, first + tokens // size)))
            prompt = Request(first, 0.0, [0] * (len(table) * size), 1, sampling=SAMPLING)
            piece = Slice(prompt, 0, len(prompt.prompt), False, False, table)
            self._executor.submit(StepPlan(0, (piece,)), 0.0).result()
        return blocks

    def mover(self, most: int) -> tuple[int, Callable[[Move], float]] | None:
        most = min(most, self._host_blocks, self.facts.num_blocks)
        if not most:
            return None
        return most, lambda move: self._executor.submit(StepPlan(0, (), before=(move,)), 0.0).result().moving
