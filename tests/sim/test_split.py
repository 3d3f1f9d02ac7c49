from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any

import pytest

from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Computed, Event, Finished, Preempted, Preemption, Token
from skipjoin.core.foreign import ForeignScheduler
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.step import StepShape
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.policies.dispatch import make_dispatch
from skipjoin.policies.eviction import KeepKv
from skipjoin.policies.predictors import longest_output
from skipjoin.sim.driver import Arrivals, Replica, simulate_traffic
from skipjoin.sim.hardware import NETWORK_LATENCY_S
from skipjoin.sim.split import Handover, Network, SplitTraffic, SplitWatcher
from support.load import load, make
from support.recipes import RECIPES
from support.watch import World
from support.worlds import each_recipe, exhaustive

order = attrgetter("request.id")
TOKEN_BYTES, BYTES_PER_S = 1000, 1e6
WORLD = World("fcfs", cpu_blocks=400)


@dataclass
class Recorder(SplitWatcher):
    """Records a run."""

    events: list[tuple[int, Event]] = field(default_factory=list)
    handovers: list[Handover] = field(default_factory=list)
    prompt_tokens: Counter[int] = field(default_factory=Counter)
    output: dict[int, list[int]] = field(default_factory=dict)
    ends: list[Finished] = field(default_factory=list)

    def of(self, kind: type[Event]) -> list[tuple[int, Any]]:
        return [(replica, event) for replica, event in self.events if isinstance(event, kind)]

    def completed(self, handover: Handover) -> None:
        self.handovers.append(handover)

    def ended(self, event: Finished) -> None:
        self.ends.append(event)

    def observe(self, replica: int, events: list[Event]) -> None:
        self.events.extend((replica, event) for event in events)
        for event in events:
            if isinstance(event, Token):
                self.output.setdefault(event.request.id, []).append(event.token)
            elif isinstance(event, Computed):
                for piece in event.result.plan.slices:
                    end = min(piece.start + piece.tokens, len(piece.request.prompt))
                    self.prompt_tokens[replica] += max(0, end - piece.start)


def split(
    requests: list[Request],
    *,
    prefill: int = 1,
    decode: int = 1,
    world: World = WORLD,
    decode_world: World | None = None,
    bytes_per_s: float = BYTES_PER_S,
    rule: str = "round-robin",
) -> Recorder:
    """Run to the end and check that blocks are conserved at every event and all freed in the end."""
    recorded = Recorder()

    def core(one: World, policies: Any) -> EngineCore:
        return EngineCore(
            ForeignScheduler(policies, KVLedger(one.device_blocks, one.cpu_blocks, one.block_size), depth=one.depth)
        )

    other = decode_world or world
    cores = [core(world, world.policies()) for _ in range(prefill)]
    cores += [core(other, replace(other.policies(), eviction=KeepKv())) for _ in range(decode)]
    replicas = [Replica(core, SimulatedExecutor(WORLD.cost, stages=world.stages)) for core in cores]
    traffic = SplitTraffic(
        replicas,
        prefill,
        Arrivals(requests),
        prefill=make_dispatch(rule, prefill, WORLD.cost, lambda request: 1),
        decode=make_dispatch(rule, decode, WORLD.cost, longest_output),
        network=Network(bytes_per_s),
        token_bytes=TOKEN_BYTES,
        watcher=recorded,
    )

    def observe(replica: int, events: list[Event]) -> None:
        cores[replica].kv.check()
        recorded.observe(replica, events)

    simulate_traffic(replicas, traffic, on_events=observe)
    for used in cores:
        kv = used.kv
        assert (kv.device_free, kv.tiers.cpu_free) == (kv.device_total, kv.tiers.cpu_total)
        assert not list(kv.holders())
    return recorded


def prompt_tokens_of(requests: list[Request]) -> int:
    return sum(len(request.prompt) for request in requests)


# Every other recipe has two stages. `exhaustive` exchanges them, and has the other half of the recipes.
@pytest.mark.parametrize("turn", [0, exhaustive(1)])
@pytest.mark.parametrize("recipe", each_recipe(parts=2))
def test_only_prefill_replicas_compute_prompts(recipe: str, turn: int) -> None:
    stages = 1 + (sorted(RECIPES).index(recipe) + turn) % 2
    requests = load(1, 24)
    world = replace(WORLD, recipe=recipe, stages=stages, depth=stages)
    recorded = split(requests, prefill=2, decode=2, world=world, decode_world=replace(world, device_blocks=27))
    assert recorded.output == {
        request.id: [len(request.prompt) + number for number in range(request.max_tokens)] for request in requests
    }
    assert sorted(event.request.id for event in recorded.ends) == [request.id for request in requests]
    assert recorded.prompt_tokens[0] + recorded.prompt_tokens[1] == prompt_tokens_of(requests)
    assert recorded.prompt_tokens[2] == recorded.prompt_tokens[3] == 0
    assert all(replica > 1 and event.how is not Preemption.DROP for replica, event in recorded.of(Preempted))


def test_decode_replicas_swap_to_the_cpu_tier() -> None:
    recorded = split(load(1, 40), decode_world=replace(WORLD, device_blocks=27))
    assert any(event.how is Preemption.SWAP for _, event in recorded.of(Preempted))


def test_transfers_take_the_time_of_their_bytes_and_never_share_a_link() -> None:
    requests = load(2, 60)
    recorded = split(requests, prefill=3, decode=2, rule="least-work")
    multi_token = [request for request in requests if request.max_tokens > 1]
    assert sum(handover.size for handover in recorded.handovers) == TOKEN_BYTES * prompt_tokens_of(multi_token)
    spans: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for handover in recorded.handovers:
        assert handover.ready <= handover.pulled <= handover.begun
        ended = handover.begun + handover.size / BYTES_PER_S
        assert handover.completed == pytest.approx(ended + NETWORK_LATENCY_S)
        spans["out", handover.source].append((handover.begun, ended))
        spans["in", handover.target].append((handover.begun, ended))
    assert len(spans) == 5
    for link in spans.values():
        assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(sorted(link)))


def test_decoding_continues_when_the_kv_has_completed() -> None:
    recorded = split([make(0, 40, 3)])
    (handover,) = recorded.handovers
    first, second, _ = (event.now for _, event in recorded.of(Token))
    assert handover.ready == handover.begun == first
    assert handover.completed == pytest.approx(first + 40 * TOKEN_BYTES / BYTES_PER_S + NETWORK_LATENCY_S)
    assert second == pytest.approx(handover.completed + WORLD.cost.step(StepShape(decodes=1, context=41)))


def test_prefill_stalls_when_decode_is_full() -> None:
    # The prefill replica has KV for two prompts, the decode replica for one request at a time.
    requests = [make(number, 20, 20) for number in range(6)]
    narrow, wide = replace(WORLD, device_blocks=11), replace(WORLD, device_blocks=100)
    recorded, free = (split(requests, world=narrow, decode_world=decode) for decode in (narrow, wide))
    completed = [handover.completed for handover in recorded.handovers]
    assert [handover.request.id for handover in recorded.handovers] == list(range(6))
    ready, unstalled = ([handover.ready for handover in sorted(run.handovers, key=order)] for run in (recorded, free))
    assert all(ready[number] > completed[number - 2] for number in range(2, 6))
    assert ready[:2] == unstalled[:2]
    assert ready[5] > 2 * unstalled[5]


def test_requests_of_one_token_free_their_kv_at_once() -> None:
    recorded = split([make(number, 40, 1) for number in range(4)], world=replace(WORLD, device_blocks=11))
    assert len(recorded.ends) == 4
    assert not recorded.handovers
