from __future__ import annotations

import math

import pytest

from skipjoin.core.events import Preempted, Preemption
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import FinishReason, Request
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.eviction import Swap
from skipjoin.policies.mlfq import SkipJoinMlfq
from skipjoin.policies.ordering import Prioritized
from skipjoin.recipes import Settings
from support.load import load, make
from support.recipes import build
from support.watch import World, run
from support.worlds import exhaustive

# A token takes a second to compute; transfers take almost no time.
COST = LinearCost(floor=1e-9, prefill_token=1.0, decode=1.0, block=1e-9)


def holder(kv: KVLedger, number: int, tokens: int, priority: int = 0) -> Request:
    request = make(number, tokens, 10, priority=priority)
    kv.grow(request, tokens)
    request.progress.computed = request.progress.planned = tokens
    request.progress.known += 1
    return request


def methods(eviction: Swap, victim: Request, kv: KVLedger, now: float, incoming: Request | None) -> list[Preemption]:
    return [chosen.how for chosen in eviction.victims(1, [victim], kv, now, incoming)]


def test_after_a_drop_incoming_requests_wait_until_its_share_of_time_is_small() -> None:
    kv = KVLedger(10, 0, 4)
    victim, incoming = holder(kv, 0, 8), make(1, 4, 10)
    eviction = Swap(COST, drop_share=0.1)
    assert methods(eviction, victim, kv, 5.0, incoming) == [Preemption.DROP]
    assert methods(eviction, victim, kv, 5.0, incoming) == [Preemption.DROP]  # the query changes no state
    eviction.on_dropped(8, 5.0)
    assert methods(eviction, victim, kv, 84.9, incoming) == []
    assert methods(eviction, victim, kv, 85.1, incoming) == [Preemption.DROP]
    eviction.on_dropped(8, 85.1)
    eviction.on_dropped(8, 85.1)
    assert methods(eviction, victim, kv, 245.0, incoming) == []
    assert methods(eviction, victim, kv, 245.2, incoming) == [Preemption.DROP]


def test_growth_and_higher_priorities_are_not_paced() -> None:
    kv = KVLedger(10, 0, 4)
    victim = holder(kv, 0, 8)
    eviction = Swap(COST)
    eviction.on_dropped(8, 0.0)
    assert methods(eviction, victim, kv, 1.0, None) == [Preemption.DROP]
    assert methods(eviction, victim, kv, 1.0, make(1, 4, 10, priority=-1)) == [Preemption.DROP]
    assert methods(eviction, victim, kv, 1.0, make(2, 4, 10, priority=1)) == []


def test_first_tokens_are_not_paced_where_their_ordering_limits_them() -> None:
    kv = KVLedger(10, 0, 4)
    victim, begun = holder(kv, 0, 8), make(1, 4, 10)
    begun.progress.output.append(0)
    eviction = Swap(COST, exempts_first=True)
    eviction.on_dropped(8, 0.0)
    assert methods(eviction, victim, kv, 1.0, make(2, 4, 10)) == [Preemption.DROP]
    assert methods(eviction, victim, kv, 1.0, begun) == []
    assert methods(eviction, victim, kv, 1.0, make(3, 4, 10, best_effort=True)) == []


def test_swaps_are_not_paced_while_the_cpu_tier_has_space() -> None:
    kv = KVLedger(10, 3, 4)
    victims, incoming = [holder(kv, 0, 8), holder(kv, 1, 4), holder(kv, 2, 8)], make(3, 4, 10)
    eviction = Swap(COST)
    eviction.on_dropped(8, 0.0)
    first = eviction.victims(3, victims, kv, 1.0, incoming)
    assert [(chosen.request.id, chosen.how) for chosen in first] == [(0, Preemption.SWAP), (1, Preemption.SWAP)]
    assert eviction.victims(4, victims, kv, 1.0, incoming) == ()
    grown = eviction.victims(4, victims, kv, 1.0, None)
    assert [chosen.how for chosen in grown] == [Preemption.SWAP, Preemption.SWAP, Preemption.DROP]


@pytest.mark.parametrize("share", [0.0, -1.0, math.nan])
def test_a_drop_share_that_is_not_positive_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="drop_share must be above 0"):
        Swap(COST, drop_share=share)


@pytest.mark.exhaustive  # a result; other tests have what pacing decides
@pytest.mark.parametrize(("recipe", "depth"), [exhaustive("mlfq", 1), ("fastserve", 2)])
def test_pacing_saves_work_and_time_above_capacity_with_a_full_cpu_tier(recipe: str, depth: int) -> None:
    drops, ends = {}, {}
    for paced in (True, False):
        world = World(recipe, device_blocks=60, cpu_blocks=30, depth=depth)
        policies = build(recipe, Settings(world.cost, world.max_seqs, world.max_tokens), {"paced": paced})
        requests = load(300, 120, rate=200.0, prompts=(4, 40), outputs=(1, 60))
        done = run(world, requests, core=world.core(policies))
        assert all(request.progress.finish_reason is FinishReason.LENGTH for request in requests)
        drops[paced] = sum(event.how is Preemption.DROP for event in done.events if isinstance(event, Preempted))
        ends[paced] = done.trace[-1][0]
    assert drops[True] < 0.5 * drops[False]
    assert ends[True] < 0.95 * ends[False]


@pytest.mark.parametrize("paced", [True, False])
def test_recipe_parameters_set_the_quantum_and_the_pacing(paced: bool) -> None:
    policies = build("fastserve", Settings(COST), {"quantum_s": 0.26, "paced": paced})
    assert isinstance(policies.ordering, Prioritized)
    request = make(0, 1, 10)
    policies.ordering.on_arrived(request, 0.0)
    band = policies.ordering._bands[request.progress.band]
    assert isinstance(band, SkipJoinMlfq)
    assert band.level(request) == 2  # one second is nearly four quanta
    kv = KVLedger(10, 0, 4)
    eviction = policies.eviction
    eviction.on_dropped(8, 0.0)
    assert bool(eviction.victims(1, [holder(kv, 1, 8)], kv, 1.0, request)) is not paced
