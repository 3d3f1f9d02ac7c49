"""The ledger of counts, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Computed, Event
from skipjoin.core.kv.interface import MISS, Hit
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.kv.operations import BlockLedger
from skipjoin.core.request import Request
from skipjoin.core.step import Move, StepPlan
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.sim.driver import Replica, simulate
from skipjoin.vllm.counts import GroupedPool, ManagedPool
from skipjoin.vllm.ledger import CountingLedger, GroupedLedger
from skipjoin.vllm.requests import FoundByEngine
from support.load import load, make
from support.watch import World
from support.worlds import checkered, exhaustive


@dataclass
class FakePool:
    total: int = 40
    block_size: int = 4
    free: int = 40
    holds: dict[Request, int] = field(default_factory=dict)
    shares: dict[Request, int] = field(default_factory=dict)
    hits: dict[Request, Hit] = field(default_factory=dict)

    def held(self, request: Request) -> int:
        return self.holds.get(request, 0)

    def shared(self, request: Request) -> int:
        return self.shares.get(request, 0)

    def hit(self, request: Request) -> Hit:
        return self.hits.get(request, MISS)


def described(event: Event) -> tuple[object, ...]:
    return (type(event).__name__, *map(plain, event))


def plain(part: object) -> object:
    if isinstance(part, Request):
        return part.id
    if isinstance(part, StepPlan):
        moves = [plain(move) for move in (*part.blocking, *part.overlapped)]
        return [(slice_.request.id, *slice_[1:5]) for slice_ in part.slices], moves
    if isinstance(part, Move):
        return part.direction, plain(part.request), len(part.source), part.tokens
    return part


def events_of(world: World, ledger: BlockLedger) -> list[tuple[object, ...]]:
    events: list[Event] = []
    core = EngineCore(Scheduler(world.policies(), ledger, depth=world.depth, overlap=world.overlap))
    requests = load(7, 80, outputs=(1, 30), best_effort=0.3)
    simulate(Replica(core, SimulatedExecutor(world.cost)), requests, on_events=events.extend)
    assert all(request.progress.finish_reason for request in requests)
    if ledger.reservations is not None:
        ledger.reservations.empty_accounts()
    assert ledger.device_free == ledger.available == ledger.device_total
    return [described(event) for event in events if not isinstance(event, Computed)]


@pytest.mark.parametrize(
    ("recipe", "depth"),
    [
        ("fcfs", 1),
        ("fastserve", 2),
        exhaustive("alise", 1),
        ("bros", 2),
        exhaustive("econoserve", 1),
        ("econoserve", 2),
        exhaustive("sarathi", 2),
    ],
)
def test_plans_equal_those_of_the_own_ledger_without_a_cpu_tier(recipe: str, depth: int) -> None:
    world = replace(World(recipe, depth=depth, overlap=depth == 2), cpu_blocks=0)
    own = KVLedger(world.device_blocks, 0, world.block_size)
    own.filled_after = lambda request, freed: 0  # evictions are whole here
    assert events_of(world, CountingLedger(FakePool())) == events_of(world, own)


class OwnPool(FakePool):
    ledger: CountingLedger

    def held(self, request: Request) -> int:
        held = self.ledger.blocks_of(request)
        return len(held.device) if held is not None else 0


@pytest.mark.parametrize(
    ("cpu_blocks", "which"), checkered([8, 60], [("fastserve", 1), ("adaptive", 2), ("alise", 2), ("bros", 1)])
)
def test_plans_equal_those_of_the_own_ledger_with_a_cpu_tier(cpu_blocks: int, which: tuple[str, int]) -> None:
    recipe, depth = which
    world = replace(World(recipe, depth=depth, overlap=depth == 2), cpu_blocks=cpu_blocks)
    own = KVLedger(world.device_blocks, cpu_blocks, world.block_size)
    own.filled_after = lambda request, freed: 0  # evictions are whole here
    own.sharing = None
    pool = OwnPool()
    pool.ledger = CountingLedger(pool, cpu_blocks)
    found = events_of(world, pool.ledger)
    assert found == events_of(world, own)
    assert any(name == "Moved" for name, *_ in found)
    assert pool.ledger.tiers.cpu_free == cpu_blocks


def test_prompts_are_priced_by_the_engines_block_pool() -> None:
    """`adaptive` asks again while a request waits, since others fill the cache."""
    pool = FakePool()
    ledger, policies = CountingLedger(pool), World("adaptive").policies()
    long, short = make(0, 120, prefix=FoundByEngine()), make(1, 40)
    for request in (long, short):
        policies.ordering.on_arrived(request, 0.0)
    assert list(policies.ordering.ranked(0.0)) == [short, long]
    pool.hits[long] = Hit(116, 0)
    ledger.refresh()
    policies.ordering.on_begin(0.0, ledger)
    assert list(policies.ordering.ranked(0.0)) == [long, short]


def test_lookups_of_the_planner_are_not_counted_by_vllm() -> None:
    logged = []

    def get_computed_blocks(request: object) -> tuple[object, int]:
        logged.append(manager.log_stats)
        return SimpleNamespace(blocks=([SimpleNamespace(ref_cnt=1), SimpleNamespace(ref_cnt=0)],)), 8

    manager = SimpleNamespace(
        block_pool=SimpleNamespace(num_gpu_blocks=9),
        coordinator=SimpleNamespace(single_type_managers=[SimpleNamespace(req_to_blocks={}, block_size=4)]),
        get_computed_blocks=get_computed_blocks,
        log_stats=True,
    )
    assert ManagedPool(manager).hit(make(0)) == Hit(8, 1)
    assert (logged, manager.log_stats) == ([False], True)


def test_shared_blocks_are_freed_with_their_last_holder() -> None:
    pool, one, other = FakePool(), make(0, prefix=FoundByEngine()), make(1, prefix=FoundByEngine())
    ledger = CountingLedger(pool)
    ledger.grow(one, 16)
    pool.holds[one], pool.free = 4, 36
    ledger.refresh()
    pool.hits[other] = Hit(12, 2)  # three blocks, of which another request holds two
    assert ledger.adopt(other) == Hit(12, 2)
    assert ledger.device_free == ledger.available == 35
    ledger.grow(other, 20)
    assert ledger.device_free == ledger.available == 33
    pool.holds[other], pool.shares, pool.free = 5, {one: 2, other: 2}, 33
    ledger.refresh()
    assert ledger.available == 33
    assert (ledger.footprint(one), ledger.footprint(other)) == (2, 3)
    ledger.release(one)
    assert ledger.device_free == ledger.available == 35


def test_reservations_count_beyond_the_blocks_that_the_engine_gave() -> None:
    pool, request = FakePool(), make(0)
    ledger = CountingLedger(pool)
    ledger.reserve(request, 10, tokens=40)
    ledger.grow(request, 8)
    pool.holds[request], pool.free = 2, 38
    ledger.refresh()
    assert (ledger.device_free, ledger.available, ledger.footprint(request)) == (38, 30, 10)
    assert ledger.shortfall(make(1), 4 * 31) == 1
    ledger.trim(request)
    assert (ledger.available, request.progress.reserved_tokens) == (38, 0)


@pytest.mark.parametrize("blocks", [0, 1, 5])
def test_settling_takes_over_what_the_engine_holds(blocks: int) -> None:
    pool, request = FakePool(), make(0)
    ledger = CountingLedger(pool)
    ledger.grow(request, 12)
    pool.holds[request], pool.free = blocks, 40 - blocks
    ledger.settle(request)
    ledger.refresh()
    held = ledger.blocks_of(request)
    assert (len(held.device) if held is not None else 0) == blocks
    assert ledger.device_free == ledger.available == 40 - blocks


def test_groups_with_a_window_free_blocks_as_their_request_runs() -> None:
    """Of 40 tokens, a window of 8 needs the last 2 of 10 blocks to compute another token."""
    null = SimpleNamespace(ref_cnt=0)
    blocks = [SimpleNamespace(ref_cnt=1) for _ in range(12)]

    def group(window: int, held: list[SimpleNamespace]) -> SimpleNamespace:
        def skipped(computed: int) -> int:
            return max(0, computed - window + 1)

        return SimpleNamespace(
            block_size=4, req_to_blocks={"r": held}, get_num_skipped_tokens=skipped, kv_cache_spec=None
        )

    groups = [group(1000, blocks[:10]), group(8, [null] * 8 + blocks[10:])]
    groups[1].max_admission_blocks_per_request = 5
    pool = GroupedPool(
        SimpleNamespace(
            block_pool=SimpleNamespace(null_block=null, num_gpu_blocks=14, get_num_free_blocks=lambda: 1),
            coordinator=SimpleNamespace(single_type_managers=groups),
        )
    )
    request = make(0, 40, sampling=SimpleNamespace(request_id="r"))
    request.progress.rewind(40)
    ledger = GroupedLedger(pool)
    ledger.settle(request)
    ledger.refresh()
    assert (ledger.footprint(request), ledger.blocks_of(request).room, ledger.available) == (12, 40, 1)
    assert [ledger.blocks_for(tokens) for tokens in (4, 20, 40)] == [2, 10, 15]
    # Both groups need a block for the next token, and no block has left the window since.
    assert ledger.shortfall(request, 41) == 1
    request.progress.rewind(43)
    assert ledger.shortfall(request, 44) == 0
    assert ledger.blocks_of(request) is ledger.grow(request, 44)
    assert ledger.footprint(request) == 13


class MambaSpec:
    """vLLM's name of groups whose blocks are states."""


def test_recurrent_layers_hold_states_between_null_blocks() -> None:
    """A state follows every 16 tokens, and two of 40 tokens' three are kept."""
    null = SimpleNamespace(ref_cnt=0)
    blocks = [SimpleNamespace(ref_cnt=1) for _ in range(12)]
    full = SimpleNamespace(
        block_size=4, req_to_blocks={"r": blocks[:10]}, get_num_skipped_tokens=lambda computed: 0, kv_cache_spec=None
    )
    states = SimpleNamespace(
        block_size=16,
        req_to_blocks={"r": [blocks[10], null, blocks[11]]},
        get_num_skipped_tokens=lambda computed: computed - 1,
        kv_cache_spec=MambaSpec(),
    )
    pool = GroupedPool(
        SimpleNamespace(
            block_pool=SimpleNamespace(null_block=null, num_gpu_blocks=40, get_num_free_blocks=lambda: 27),
            coordinator=SimpleNamespace(single_type_managers=[full, states]),
        )
    )
    request = make(0, 40, sampling=SimpleNamespace(request_id="r"))
    assert (pool.held(request), pool.slots(request)) == (12, 40)
    assert [pool.blocks_at(tokens, 0) for tokens in (4, 16, 100)] == [2, 5, 27]
    assert pool.blocks_at(49, 48) == 15, "the state of 48 tokens and the next one"
    assert pool.blocks_for(400) == 102
    blocks[10].ref_cnt = 2
    assert pool.shared(request) == 1


def test_drafts_need_slots_beyond_the_tokens_of_a_step() -> None:
    pool, request = FakePool(), make(0)
    ledger = CountingLedger(pool, drafts=3, max_len=18)
    assert len(ledger.grow(request, 6).device) == 3
    assert ledger.blocks_of(request).room == 9
    assert len(ledger.grow(request, 18).device) == 5, "no request exceeds 18 tokens"
    assert ledger.blocks_of(request).room == 20
