"""Prefill and decode on replicas of their own, with a network in between."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any

import pytest

from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Computed, Event, Finished, Preempted, Preemption, Token
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.scheduling.scheduler import Scheduler
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

order = attrgetter("request.id")
TOKEN_BYTES, BYTES_PER_S = 1000, 1e6
WORLD = World("fcfs", host_blocks=400)


@dataclass
class Story(SplitWatcher):
    """What happened in a run. prompt_tokens: of prompts, computed on each replica. output: tokens by request."""

    events: list[tuple[int, Event]] = field(default_factory=list)
    handovers: list[Handover] = field(default_factory=list)
    prompt_tokens: Counter[int] = field(default_factory=Counter)
    output: dict[int, list[int]] = field(default_factory=dict)
    ends: list[Finished] = field(default_factory=list)

    def of(self, kind: type[Event]) -> list[tuple[int, Any]]:
        return [(replica, event) for replica, event in self.events if isinstance(event, kind)]

    def landed(self, handover: Handover) -> None:
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
) -> Story:
    """Run to the end; blocks are conserved at every instant, and all are home then."""
    story = Story()

    def core(one: World, policies: Any) -> EngineCore:
        return EngineCore(
            Scheduler(policies, KVLedger(one.device_blocks, one.host_blocks, one.block_size), depth=one.depth)
        )

    other = decode_world or world
    cores = [core(world, world.policies()) for _ in range(prefill)]
    cores += [core(other, replace(other.policies(), eviction=KeepKv())) for _ in range(decode)]
    replicas = [Replica(one, SimulatedExecutor(WORLD.cost, stages=world.stages)) for one in cores]
    traffic = SplitTraffic(
        replicas,
        prefill,
        Arrivals(requests),
        prefill=make_dispatch(rule, prefill, WORLD.cost, lambda request: 1),
        decode=make_dispatch(rule, decode, WORLD.cost, longest_output),
        network=Network(bytes_per_s),
        token_bytes=TOKEN_BYTES,
        watcher=story,
    )

    def observe(replica: int, events: list[Event]) -> None:
        cores[replica].kv.check()
        story.observe(replica, events)

    simulate_traffic(replicas, traffic, on_events=observe)
    for one in cores:
        kv = one.kv
        assert (kv.device_free, kv.cpu_free) == (kv.device_total, kv.cpu_total)
        assert not list(kv.holders())
    return story


def prompts(requests: list[Request]) -> int:
    return sum(len(one.prompt) for one in requests)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_prefill_replicas_compute_the_prompts_and_decode_replicas_none_of_them(recipe: str, stages: int) -> None:
    requests = load(1, 24)
    world = replace(WORLD, recipe=recipe, stages=stages, depth=stages)
    story = split(requests, prefill=2, decode=2, world=world, decode_world=replace(world, device_blocks=27))
    assert story.output == {one.id: [len(one.prompt) + number for number in range(one.max_tokens)] for one in requests}
    assert sorted(event.request.id for event in story.ends) == [one.id for one in requests]
    assert story.prompt_tokens[0] + story.prompt_tokens[1] == prompts(requests)
    assert story.prompt_tokens[2] == story.prompt_tokens[3] == 0
    assert all(replica > 1 and event.how is not Preemption.DROP for replica, event in story.of(Preempted))


def test_what_decode_replicas_evict_goes_to_the_host() -> None:
    story = split(load(1, 40), decode_world=replace(WORLD, device_blocks=27))
    assert any(event.how is Preemption.SWAP for _, event in story.of(Preempted))


def test_transfers_take_their_bytes_over_the_link_and_have_it_to_themselves() -> None:
    requests = load(2, 60)
    story = split(requests, prefill=3, decode=2, rule="least-work")
    several = [one for one in requests if one.max_tokens > 1]
    assert sum(handover.size for handover in story.handovers) == TOKEN_BYTES * prompts(several)
    spans: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for one in story.handovers:
        assert one.ready <= one.pulled <= one.begun
        ended = one.begun + one.size / BYTES_PER_S
        assert one.landed == pytest.approx(ended + NETWORK_LATENCY_S)
        spans["out", one.source].append((one.begun, ended))
        spans["in", one.target].append((one.begun, ended))
    assert len(spans) == 5
    for link in spans.values():
        assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(sorted(link)))


def test_a_request_goes_on_when_its_kv_has_landed() -> None:
    story = split([make(0, 40, 3)])
    (handover,) = story.handovers
    first, second, _ = (event.now for _, event in story.of(Token))
    assert handover.ready == handover.begun == first
    assert handover.landed == pytest.approx(first + 40 * TOKEN_BYTES / BYTES_PER_S + NETWORK_LATENCY_S)
    assert second == pytest.approx(handover.landed + WORLD.cost.step(StepShape(decodes=1, context=41)))


def test_prefill_stalls_when_decode_is_full() -> None:
    # A prefill replica with KV for two prompts, a decode replica with KV for one request at a time.
    requests = [make(number, 20, 20) for number in range(6)]
    narrow, wide = replace(WORLD, device_blocks=11), replace(WORLD, device_blocks=100)
    story, free = (split(requests, world=narrow, decode_world=decode) for decode in (narrow, wide))
    landed = [one.landed for one in story.handovers]
    assert [one.request.id for one in story.handovers] == list(range(6))
    ready, unhindered = ([one.ready for one in sorted(run.handovers, key=order)] for run in (story, free))
    assert all(ready[number] > landed[number - 2] for number in range(2, 6))
    assert ready[:2] == unhindered[:2]
    assert ready[5] > 2 * unhindered[5]


def test_requests_of_one_token_give_their_space_back_at_once() -> None:
    story = split([make(number, 40, 1) for number in range(4)], world=replace(WORLD, device_blocks=11))
    assert len(story.ends) == 4
    assert not story.handovers


def test_the_same_requests_give_the_same_story() -> None:
    def told(story: Story) -> list[tuple[int, str, float]]:
        return [(replica, type(event).__name__, event.now) for replica, event in story.events]

    one, other = (split(load(5, 40), prefill=2, decode=3, rule="least-work") for _ in range(2))
    assert told(one) == told(other)
