"""Rules that keep preemption from thrashing, each in a minimal example.

`WatchedCore` checks every plan of every test: victims do not run, each is evicted for a higher-ranked request in that
plan, and an incoming request evicts neither its equals nor running requests of its class that have no token yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from skipjoin.core.decide.evict import Choice, Evictor
from skipjoin.core.events import Preemption
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.kv.reservations import Reservations
from skipjoin.core.policy import Allocation, Eviction, EvictionPolicy
from skipjoin.core.request import Request
from skipjoin.policies.batching import Greedy
from skipjoin.policies.eviction import Defer, Recompute
from support.load import load, make
from support.policies import DropTails, SpillAll, SwapAll
from support.watch import Scene, Stepper, World, run
from support.worlds import exhaustive


def scene(numbers: dict[int, int], *, blocks: int, cpu: int = 0, slots: int = 8, chunk: int = 1000) -> Scene:
    """Run `chunk` tokens a step; victims are swapped out if there is a CPU tier."""
    eviction, batcher = SwapAll() if cpu else Recompute(), Greedy(slots, chunk, chunked=True)
    return Scene(numbers, blocks=blocks, cpu=cpu, batcher=batcher, eviction=eviction)


class DisplaceAll(SwapAll):
    def victims(
        self, short: int, candidates: Sequence[Request], kv: KVLedger, now: float, incoming: Request | None
    ) -> Sequence[Eviction]:
        return [victim._replace(displaces=True) for victim in super().victims(short, candidates, kv, now, incoming)]


def ran(stepper: Stepper) -> set[int]:
    return set(stepper.ran())


def test_requests_of_equal_rank_do_not_evict_each_other() -> None:
    stepper = scene({0: 5, 1: 5}, blocks=4)
    stepper.add(make(0, 8, 5))
    ran(stepper)
    stepper.add(make(1, 8, 5))
    for _ in range(4):
        assert ran(stepper) == {0}
    stepper.drain()
    assert not stepper.preempted()


def test_an_eviction_examines_only_the_holders_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = scene({number: number for number in range(50)}, blocks=98, slots=100)
    stepper.add(*(make(number, 6, 5) for number in range(1, 50)))
    ran(stepper)
    reservations, examined = stepper.core.scheduler.kv.reservations, []
    returns_to = reservations.returns_to
    monkeypatch.setattr(reservations, "returns_to", lambda one, to: (examined.append(one.id), returns_to(one, to))[1])
    stepper.add(make(0, 8, 5))
    assert 49 not in ran(stepper)
    assert set(examined) <= {48, 49}
    monkeypatch.undo()
    stepper.drain()


@pytest.mark.parametrize(
    ("tokens_swapped_out", "cpu", "ways"),
    [(9, 3, {0: Preemption.DROP, 1: Preemption.SWAP}), (5, 2, {1: Preemption.DROP})],
    ids=["enough", "too-few"],
)
def test_a_victim_takes_the_cpu_blocks_of_a_lower_ranked_request_if_they_suffice(
    tokens_swapped_out: int, cpu: int, ways: dict[int, Preemption]
) -> None:
    stepper = Scene({0: 9, 1: 5, 2: 1}, blocks=4, cpu=cpu, eviction=DisplaceAll())
    stepper.add(make(0, tokens_swapped_out))
    ran(stepper)
    stepper.add(make(1, 12))
    ran(stepper)
    stepper.events.clear()
    stepper.add(make(2, 12))
    assert ran(stepper) == {2}
    assert dict(stepper.preempted()) == ways
    stepper.drain()


@pytest.mark.parametrize(
    "recipe",
    [
        "adaptive",
        exhaustive("mlfq"),
        "fixed-priority",
        exhaustive("srpt"),
        exhaustive("round-robin"),
    ],
)
def test_skipping_returns_that_must_fail_changes_no_plan(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    examined = Counter[bool]()
    make_room = Evictor.make_room

    def counted(self: Evictor, *args: Any, **options: Any) -> Choice:
        examined[skips] += 1
        return make_room(self, *args, **options)

    monkeypatch.setattr(Evictor, "make_room", counted)
    traces = []
    for skips in (True, False):
        monkeypatch.setattr(Reservations, "is_flat", skips)
        requests = load(7, 36, rate=120, priorities=(0, 1), texts=2)
        traces.append(run(World(recipe, cpu_blocks=400, eviction=SwapAll, max_seqs=12), requests).trace)
    assert traces[0] == traces[1]
    assert examined[True] < examined[False]


def test_no_request_is_evicted_for_an_incoming_request_that_would_still_not_fit() -> None:
    stepper = scene({0: 1, 1: 5, 2: 3}, blocks=8)
    first, low = make(0, 16, 5), make(1, 8, 5)
    stepper.add(first, low)
    ran(stepper)
    stepper.add(make(2, 17, 5))  # it needs 5 blocks; 2 of request 1 and 1 free block are not enough
    assert ran(stepper) == {0, 1}
    assert low.progress.evictions == 0
    stepper.drain()


@pytest.mark.parametrize("cpu", [0, 8])
def test_a_running_request_is_evicted_for_an_incoming_request_only_after_a_token(cpu: int) -> None:
    """This holds again after each eviction, whether its KV is recomputed or swapped in."""
    stepper = scene({0: 5, **dict.fromkeys(range(1, 9), 1)}, blocks=4, chunk=4, cpu=cpu)
    victim = make(0, 9, 5)
    stepper.add(victim)
    assert ran(stepper) == {0}
    for number in range(1, 4):
        # The incoming request waits from the victim's first chunk on, and is admitted when the victim has a token.
        stepper.add(make(number, 13, 1))
        while 0 in ran(stepper):
            assert number not in stepper.tokens
        assert (victim.progress.evictions, len(victim.progress.output)) == (number, number)
        while 0 not in ran(stepper):
            pass
    stepper.drain()


def test_a_paused_request_without_a_token_can_be_evicted() -> None:
    """Otherwise a request paused in its prompt would keep out higher-ranked ones forever."""
    stepper = scene({0: 5, 1: 1, 2: 2}, blocks=8, chunk=4)
    paused = make(0, 12, 3)
    stepper.add(paused)
    assert ran(stepper) == {0}
    stepper.add(make(1, 4, 5))  # it takes all tokens of a step
    assert ran(stepper) == {1}
    assert (paused.progress.computed, paused.progress.output) == (4, [])
    stepper.add(make(2, 16, 3))
    assert ran(stepper) == {1, 2}
    assert paused.progress.evictions == 1
    stepper.drain()


@pytest.mark.parametrize("best_effort", [False, True])
def test_a_prompt_under_way_is_evicted_for_a_request_of_a_better_class_only(best_effort: bool) -> None:
    """Beside chat, a best-effort prompt may have as few tokens in each step as here, and take long."""
    stepper = scene({0: 5, 1: 1}, blocks=8, chunk=4)
    prompt = make(0, 30, 2, best_effort=best_effort)
    stepper.add(prompt)
    assert ran(stepper) == {0}
    while stepper.core.kv.available:
        assert ran(stepper) == {0}
    assert prompt.progress.output == []
    stepper.add(make(1, 4, 2))
    assert ran(stepper) == ({1} if best_effort else {0})
    stepper.drain()
    assert len(prompt.progress.output) == 2


def test_growth_evicts_the_lowest_ranked_request_even_before_its_first_token() -> None:
    """A running request must be able to grow, so fresh requests are protected from incoming requests only."""
    stepper = scene({0: 1, 1: 2}, blocks=5, chunk=6)
    fresh = make(1, 12, 3)
    stepper.add(make(0, 5, 9), fresh)
    assert ran(stepper) == {0, 1}
    while not fresh.progress.evictions:
        stepper.step()
    assert fresh.progress.output == [] or not fresh.progress.is_newly_resident
    stepper.drain()


@pytest.mark.parametrize(("depth", "overlap"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("eviction", [Recompute, SwapAll, SpillAll, DropTails])
def test_two_requests_that_outrank_each_other_in_turn_both_finish(
    eviction: Callable[[], EvictionPolicy], depth: int, overlap: bool
) -> None:
    """The deadlock of FastServe's section 4.2, in which an evicted request is promoted and evicts the other in turn.

    Here the request that does not run outranks the other at once, and only one of them fits.
    """
    batcher = Greedy(8, 5, chunked=True)
    stepper = Scene({}, blocks=6, cpu=6, batcher=batcher, eviction=eviction(), depth=depth, overlap=overlap)
    requests = [make(0, 13, 9), make(1, 13, 9)]
    stepper.add(*requests)
    for _ in range(1000):
        for request in requests:
            runs = request.progress.last_plan >= stepper.core.scheduler.latest_plan
            stepper.ordering.numbers[request.id] = 2 if runs else 1
        stepper.fill()
        if not stepper.core.plans:
            break
        stepper.finish()
    stepper.core.assert_all_free()
    assert min(request.progress.evictions for request in requests) > 2
    for request in requests:
        assert len(request.progress.output) == 9
        # The remaining parts of both may leave room for neither.
        assert request.progress.evictions <= (18 if eviction is DropTails else 9)


def test_with_deferred_eviction_incoming_requests_wait_and_growth_evicts() -> None:
    stepper = Scene({0: 5, 1: 6, 2: 1}, blocks=6, eviction=Defer())
    first, second = make(0, 8, 9), make(1, 8, 9)
    stepper.add(first, second)
    assert ran(stepper) == {0, 1}
    stepper.add(make(2, 12, 2))
    assert ran(stepper) == {0, 1}
    # Both have 3 blocks now; the next one that the first needs is the second's.
    while not second.progress.evictions:
        assert 0 in ran(stepper)
    assert first.progress.evictions == 0
    assert len(first.progress.output) > 4
    stepper.drain()


def test_no_request_ranked_below_an_evicted_one_takes_new_blocks_in_that_step() -> None:
    stepper = scene({0: 1, 1: 5, 2: 6}, blocks=8)
    stepper.add(make(1, 24, 3))
    ran(stepper)
    # Request 0 needs 5 blocks and evicts request 1; request 2 would fit into the remaining 3.
    stepper.add(make(0, 20, 2), make(2, 8, 3))
    assert ran(stepper) == {0}
    stepper.drain()


def test_an_incoming_request_that_does_not_fit_blocks_those_behind_it() -> None:
    stepper = scene({0: 1, 1: 2, 2: 3}, blocks=8)
    stepper.add(make(0, 16, 5))
    ran(stepper)
    stepper.add(make(1, 20, 2), make(2, 4, 2))
    assert ran(stepper) == {0}
    stepper.drain()


def test_a_request_that_cannot_be_swapped_in_yet_blocks_its_equals_behind_it() -> None:
    """Otherwise a succession of small incoming requests would take the blocks that it waits for."""
    stepper = scene({0: 1, **dict.fromkeys(range(1, 40), 5)}, blocks=8, cpu=8)
    stepper.add(make(1, 24, 6))
    ran(stepper)
    stepper.add(make(0, 20, 4))
    assert ran(stepper) == {0}
    assert stepper.preempted() == [(1, Preemption.SWAP)]
    for number in range(2, 40):
        stepper.add(make(number, 4, 4))
        if 1 in ran(stepper):
            break
    assert number < 8, "the swapped request starves"
    stepper.drain()


class NoReservation:
    """An admission policy without reservations: every chunk of a prompt has to find free blocks."""

    def reserve(self, request: Request, target: int, kv: KVLedger) -> Allocation:
        return Allocation(now=0)


def test_a_request_that_cannot_grow_yet_blocks_those_behind_it() -> None:
    batcher = Greedy(8, 13, chunked=True)
    stepper = Scene({0: 1, 1: 5, 2: 6}, blocks=8, batcher=batcher, admission=NoReservation())
    stepper.add(make(0, 13, 6))
    ran(stepper)
    stepper.add(make(1, 24, 2))
    assert ran(stepper) == {0, 1}  # 12 tokens of request 1 take 3 blocks, and 1 is free
    stepper.add(make(2, 2, 3))
    assert ran(stepper) == {0}
    stepper.drain()


def test_swapped_kv_is_swapped_in_before_the_step_and_dropped_kv_is_recomputed() -> None:
    for cpu in (0, 8):
        stepper = scene({0: 5, 1: 1}, blocks=4, cpu=cpu)
        stepper.add(make(0, 12, 4))
        ran(stepper)
        stepper.add(make(1, 12, 1))
        assert ran(stepper) == {1}
        plan = stepper.step()
        assert [(piece.start, piece.tokens) for piece in plan.slices] == [(12, 1) if cpu else (0, 13)]
        assert len(plan.blocking) == bool(cpu)
        stepper.drain()


def test_paused_requests_keep_their_blocks() -> None:
    stepper = scene({0: 5, 1: 1}, blocks=20, slots=1)
    paused = make(0, 8, 5)
    stepper.add(paused)
    ran(stepper)
    table = stepper.core.kv.blocks_of(paused).table
    stepper.add(make(1, 8, 3))
    assert ran(stepper) == {1}
    assert stepper.core.kv.blocks_of(paused).table == table
    assert stepper.preempted() == [(0, Preemption.PAUSE)]
    stepper.ordering.numbers[0] = 0
    assert ran(stepper) == {0}
    stepper.drain()


@pytest.mark.parametrize(("depth", "overlap"), [exhaustive(2, False), (2, True), (3, False)])
def test_an_eviction_is_delayed_by_at_most_the_pipeline_depth(depth: int, overlap: bool) -> None:
    world = World("fcfs", depth, overlap, device_blocks=12)
    stepper = Stepper(world.core())
    stepper.add(*(make(number, 8, 20, priority=1) for number in range(4)))
    for _ in range(6):
        stepper.fill()
        stepper.finish()
    stepper.add(make(9, 40, 3, priority=0))
    plans = 0
    while 9 not in {piece.request.id for plan in stepper.core.plans for piece in plan.slices}:
        if stepper.start() is None:
            stepper.finish()
            plans += 1
        assert plans <= depth
    stepper.drain()
