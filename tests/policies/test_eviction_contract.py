from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.decide.lazy import LazySequence
from skipjoin.core.events import Preemption
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy import Eviction, EvictionPolicy
from skipjoin.core.request import Request
from skipjoin.policies.eviction import Defer, Recompute, Share, Spill, Swap, Vacate
from skipjoin.policies.proactive_swap import DisplacingSwap, ProactiveSwap
from support.load import make
from support.policies import COST, EVICTIONS, Ranks

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    **EVICTIONS,
    "vacate": lambda: Vacate(COST),
    "displacing": lambda: DisplacingSwap(COST, slots=4),
}
every_policy = pytest.mark.parametrize("build", POLICIES.values(), ids=POLICIES.keys())


def holders(kv: KVLedger, sizes: list[int], best_effort: Container[int] = ()) -> list[Request]:
    requests = []
    for number, blocks in enumerate(sizes):
        request = make(number, blocks * kv.block_size, best_effort=number in best_effort)
        kv.grow(request, request.progress.known)
        request.progress.computed = request.progress.planned = request.progress.known
        request.progress.known += 1
        requests.append(request)
    return requests


def by_number(requests: list[Request]) -> Ranks:
    ordering = Ranks({request.id: request.id for request in requests})
    for request in requests:
        ordering.on_arrived(request, 0.0)
    return ordering


@every_policy
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), data=st.data())
def test_victims_follow_the_given_order_and_free_just_enough(
    build: Callable[[], EvictionPolicy], sizes: list[int], data: st.DataObject
) -> None:
    kv = KVLedger(100, 100, 4)
    candidates = holders(kv, sizes)
    short = data.draw(st.integers(1, sum(sizes)))
    evictions = build().victims(short, LazySequence(iter(candidates)), kv, 0.0, None)
    assert [eviction.request for eviction in evictions] == candidates[: len(evictions)]
    freed = [kv.footprint(eviction.request) if eviction.blocks is None else eviction.blocks for eviction in evictions]
    assert sum(freed) >= short > sum(freed[:-1])


@every_policy
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    swapped_out=st.integers(0, 2**8),
    device_blocks=st.sampled_from([72, 100]),
    steps=st.lists(st.floats(0, 0.1), max_size=4),
)
def test_a_request_is_moved_ahead_once_and_from_the_tier_that_holds_it(
    build: Callable[[], EvictionPolicy], sizes: list[int], swapped_out: int, device_blocks: int, steps: list[float]
) -> None:
    """Together, the requests that are swapped in fit the device."""
    kv = KVLedger(device_blocks, 40, 4)
    idle = holders(kv, sizes)
    for number, request in enumerate(idle):
        if swapped_out >> number & 1 and kv.tiers.can_move_out(request):
            kv.tiers.complete(kv.tiers.move_out(request, blocking=True))
    eviction, now = build(), 0.0
    for step in [0.0, *steps]:
        now += step
        out, back = eviction.ahead(idle, by_number(idle), kv, now)
        chosen = [*out, *back]
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= set(idle)
        assert all(kv.tiers.cpu_footprint(request) == 0 for request in out)
        assert all(kv.tiers.cpu_footprint(request) > 0 for request in back)
        if isinstance(eviction, ProactiveSwap):
            assert sum(kv.tiers.cpu_footprint(request) for request in back) <= kv.available


@every_policy
def test_a_swap_in_is_possible_when_all_kv_is_in_the_cpu_tier(
    build: Callable[[], EvictionPolicy],
) -> None:
    kv = KVLedger(12, 40, 4)
    idle = holders(kv, [6, 6])
    for request in idle:
        kv.tiers.complete(kv.tiers.move_out(request, blocking=True))
    eviction = build()
    for now in (0.0, 0.1, 0.2):
        _, back = eviction.ahead(idle, by_number(idle), kv, now)
        assert back or not eviction.returns_overlapped(make(0, 4, 4))


@pytest.mark.parametrize("eviction", [Recompute(), Defer()])
def test_policies_without_swapping_drop_and_move_nothing_ahead(eviction: EvictionPolicy) -> None:
    kv = KVLedger(10, 10, 4)
    requests = holders(kv, [1, 2])
    assert eviction.victims(3, requests, kv, 0.0, None) == [Eviction(r, Preemption.DROP) for r in requests]
    assert eviction.ahead(requests, by_number(requests), kv, 0.0) == ((), ())
    assert not eviction.returns_overlapped(make(0, 4, 4))


def test_only_defer_makes_incoming_requests_wait() -> None:
    kv = KVLedger(10, 10, 4)
    requests = holders(kv, [1, 2])
    incoming = make(9, 1, 1)
    evicting = {name: bool(build().victims(1, requests, kv, 0.0, incoming)) for name, build in EVICTIONS.items()}
    assert evicting == dict.fromkeys(EVICTIONS, True) | {"defer": False}


def test_swap_keeps_decodes_and_drops_unfinished_prefills() -> None:
    kv = KVLedger(10, 10, 4)
    decoding, prefilling = holders(kv, [1, 2])
    prefilling.progress.known = prefilling.progress.computed + 2
    assert Swap(COST).victims(3, [decoding, prefilling], kv, 0.0, None) == [
        Eviction(decoding, Preemption.SWAP),
        Eviction(prefilling, Preemption.DROP),
    ]


def test_swap_drops_kv_that_is_faster_to_recompute_than_to_move_twice() -> None:
    """A block of four tokens takes 4 s to compute on top of the fixed cost of a step, and 2 x 2 s to move."""
    kv = KVLedger(10, 10, 4)
    requests = holders(kv, [1])
    for block, how in ((2.0, Preemption.SWAP), (2.001, Preemption.DROP)):
        cost = replace(COST, floor=1000.0, prefill_token=1.0, attention_pair=0.0, block=block, transfer_floor=0.0)
        assert [victim.how for victim in Swap(cost).victims(1, requests, kv, 0.0, None)] == [how]


def test_spill_prefers_best_effort_requests_and_those_that_are_already_split() -> None:
    kv = KVLedger(30, 12, 4)
    last, split, best_effort, first = requests = holders(kv, [4, 4, 4, 4], best_effort=(1, 2))
    kv.tiers.complete(kv.tiers.move_out(split, blocking=True, keep=3))

    def spill(short: int) -> list[Eviction]:
        return list(Spill(COST).victims(short, requests, kv, 0.0, None))

    assert spill(2) == [Eviction(split, Preemption.SPILL, 2)]
    assert spill(4) == [Eviction(split, Preemption.SWAP), Eviction(best_effort, Preemption.SPILL, 1)]
    assert spill(8) == [
        *(Eviction(victim, Preemption.SWAP) for victim in (split, best_effort)),
        Eviction(last, Preemption.SWAP),
    ]
    assert spill(15)[3:] == [Eviction(first, Preemption.DROP)]


def test_spill_compares_costs_of_the_part_and_paces_drops_for_incoming_requests() -> None:
    """Recomputing a block takes 2 s; moving blocks out and in takes 1 s per block and 1 s per transfer."""
    kv = KVLedger(30, 9, 4)
    (victim,) = holders(kv, [4], best_effort=(0,))
    cost = replace(COST, floor=9.0, prefill_token=0.5, attention_pair=0.0, block=0.5, transfer_floor=0.5)
    spill = Spill(cost)
    assert spill.victims(1, [victim], kv, 0.0, None) == [Eviction(victim, Preemption.SPILL, 1)]
    spill = Spill(replace(cost, transfer_floor=0.51))
    assert spill.victims(1, [victim], kv, 0.0, None) == [Eviction(victim, Preemption.DROP, 1)]
    assert spill.victims(2, [victim], kv, 0.0, None) == [Eviction(victim, Preemption.SPILL, 2)]
    spill.on_dropped(4, 0.0)
    assert spill.victims(1, [victim], kv, 0.0, make(9, 1, 1, best_effort=True)) == ()
    kv.reserve(victim, 6)
    assert spill.victims(2, [victim], kv, 0.0, make(9, 1, 1, best_effort=True)) == [
        Eviction(victim, Preemption.SPILL, 2)
    ], "reserved blocks without KV are not paced"


def test_share_prefers_the_emptiest_best_effort_request_then_the_least_urgent() -> None:
    kv = KVLedger(30, 30, 4)
    least_urgent, urgent, full, emptier = requests = holders(kv, [2, 2, 2, 2], best_effort=(2, 3))
    for request in (full, emptier):
        request.progress.fill_down()
    for request in (urgent, emptier):
        request.progress.computed = request.progress.planned = request.progress.computed - 3
    quick, slow = (replace(COST, prefill_token=1e-3, block=block, transfer_floor=0.0) for block in (1e-4, 1.0))
    victims = Share(quick).victims(8, requests, kv, 0.0, None)
    assert [(victim.request, victim.shared) for victim in victims] == [
        (emptier, True), (full, True), (least_urgent, False), (urgent, False),
    ]  # fmt: skip
    assert not any(victim.shared for victim in Share(slow).victims(8, requests, kv, 0.0, None)), "copies take longer"


def test_swap_moves_nothing_ahead() -> None:
    kv = KVLedger(10, 10, 4)
    requests = holders(kv, [5, 5])
    assert Swap(COST).ahead(requests, by_number(requests), kv, 0.0) == ((), ())
    assert not kv.is_moving


def test_vacate_evicts_nested_reservations_before_less_important_requests() -> None:
    kv = KVLedger(20, 20, 4)
    parent, nested, other = requests = holders(kv, [2, 2, 2])
    kv.reserve(parent, 8)
    kv.reserve(nested, 3, parent=parent)
    victims = Vacate(COST).victims(2, [other, nested], kv, 0.0, None)
    assert [victim.request for victim in victims] == [nested]
    victims = Vacate(COST).victims(5, [other, nested], kv, 0.0, None)
    assert [victim.request for victim in victims] == [nested, other]
    assert Vacate(COST).ahead(requests, by_number(requests), kv, 0.0) == ((), ())


def test_lazy_candidates_are_a_sequence() -> None:
    candidates = [make(number) for number in range(5)]
    lazy = LazySequence(iter(candidates))
    assert next(iter(lazy)) is candidates[0]
    assert list(zip(lazy, lazy, strict=True)) == list(zip(candidates, candidates, strict=True))
    assert (len(lazy), lazy[-1], lazy[1:3]) == (5, candidates[4], candidates[1:3])
