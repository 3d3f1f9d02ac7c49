"""A second ledger behind the planner: one tier, no sharing, and blocks without identity."""

from __future__ import annotations

from collections.abc import KeysView
from dataclasses import dataclass, replace
from typing import Any

import pytest

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Computed, Event, Preempted, Preemption
from skipjoin.core.kv.interface import BlockLedger
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import UNLIMITED, Request
from skipjoin.core.step import StepPlan
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.sim.driver import Replica, simulate
from support.load import load
from support.policies import EVICTIONS
from support.watch import World


@dataclass(eq=False, slots=True)
class Counts:
    """Blocks that one request holds. `device` has their number alone."""

    device: range = range(0)
    promised: int = 0
    room: int = 0
    tokens_before_drop: int = 0
    table: tuple[int, ...] = ()
    cpu: tuple[()] = ()
    away: int = 0
    moving: None = None
    is_settled: bool = True

    @property
    def size(self) -> int:
        return max(self.promised, len(self.device))


class CountingLedger(BlockLedger):
    """The methods that the Protocol requires of every ledger, and no others."""

    block_size = World.block_size
    device_total = World.device_blocks

    def __init__(self) -> None:
        self._held: dict[Request, Counts] = {}

    @property
    def device_free(self) -> int:
        return self.device_total - sum(len(held.device) for held in self._held.values())

    @property
    def available(self) -> int:
        return self.device_total - sum(held.size for held in self._held.values())

    def holders(self) -> KeysView[Request]:
        return self._held.keys()

    def blocks_of(self, request: Request, /) -> Counts | None:
        return self._held.get(request)

    def footprint(self, request: Request) -> int:
        return self._held.get(request, Counts()).size

    def filled(self, request: Request) -> int:
        return min(len(self._held[request].device), self.blocks_for(request.computed))

    def filled_after(self, request: Request, freed: int) -> int:
        keep = self.filled(request)
        return max(0, min(keep, self._held[request].size - freed))

    def shortfall(self, request: Request, tokens: int) -> int:
        return max(0, self.blocks_for(tokens) - self.footprint(request) - self.available)

    def shortfall_of_blocks(self, request: Request, tokens: int) -> int:
        return self.blocks_for(tokens) - len(self._held.get(request, Counts()).device) - self.device_free

    def shortfall_of_reservation(self, request: Request, blocks: int, parent: object) -> int:
        held = self._held.get(request, Counts())
        return max(blocks, len(held.device)) - held.size - self.available

    def reserve(self, request: Request, blocks: int, *, tokens: int | None = None, parent: object = None) -> None:
        held = self._held.setdefault(request, Counts())
        held.promised = blocks
        request.reserved_tokens = UNLIMITED if tokens is None else tokens
        self._resize(request, held, len(held.device))

    def grow(self, request: Request, tokens: int) -> Counts:
        held = self._held[request]
        self._resize(request, held, max(len(held.device), self.blocks_for(tokens)))
        assert self.device_free >= 0
        return held

    def trim(self, request: Request) -> None:
        self._cut(request, self.filled(request))

    def drop(self, request: Request, *, keep: int = 0) -> None:
        if not keep:
            self.release(request)
            return
        self._held[request].tokens_before_drop = request.computed
        self._cut(request, keep)

    def release(self, request: Request) -> None:
        if self._held.pop(request, None) is not None:
            request.reserved_tokens = UNLIMITED

    def clear(self) -> None:
        for request in list(self._held):
            self.release(request)

    def _cut(self, request: Request, keep: int) -> None:
        held = self._held[request]
        held.promised = 0
        if request.reserved_tokens != UNLIMITED:
            request.reserved_tokens = 0
        self._resize(request, held, keep)

    def _resize(self, request: Request, held: Counts, blocks: int) -> None:
        held.device = range(blocks)
        held.room = min(blocks * self.block_size, request.reserved_tokens)


def plain(part: Any) -> Any:
    """Return a part of an event without block numbers and with ids in place of requests."""
    if isinstance(part, Request):
        return part.id
    if isinstance(part, StepPlan):
        return part.id, [(piece.request.id, *piece[1:5]) for piece in part.slices], part.blocking, part.overlapped
    return part


def events_of(world: World, ledger: BlockLedger, best_effort: float) -> list[Event]:
    events: list[Event] = []
    core = EngineCore(Scheduler(world.policies(), ledger, depth=world.depth, overlap=world.overlap))
    requests = load(7, 80, outputs=(1, 30), best_effort=best_effort)
    simulate(Replica(core, SimulatedExecutor(world.cost, stages=world.stages)), requests, on_events=events.extend)
    assert all(request.finish_reason for request in requests)
    assert ledger.device_free == ledger.available == ledger.device_total
    return events


@pytest.mark.parametrize(
    "world",
    [
        World("fcfs"),
        World("orca"),
        World("fastserve-recompute"),
        World("fastserve-recompute", depth=2, overlap=True),
        World("sarathi", depth=2, stages=2),
        World("fastserve", eviction=EVICTIONS["spill"]),
    ],
    ids=lambda world: f"{world.recipe}-{world.depth}",
)
def test_a_ledger_that_only_counts_gives_the_same_plans(world: World) -> None:
    world = replace(world, cpu_blocks=0)
    runs = [
        [
            (type(event), *map(plain, event))
            for event in events_of(world, ledger, 0.3)
            if not isinstance(event, Computed)
        ]
        for ledger in (KVLedger(world.device_blocks, 0, world.block_size), CountingLedger())
    ]
    assert runs[0] == runs[1]
    drops = [event for event in runs[0] if event[0] is Preempted and event[3] is Preemption.DROP]
    assert len(drops) > 10 or world.recipe == "orca"
    assert any(kept for *_, kept in drops) == (world.eviction is not None)
