"""The rules that keep preemption from thrashing, each in the smallest scene that shows it.

`WatchedCore` checks on every plan of every test: victims do not run; they leave only for somebody who matters more
and runs in that very plan; a newcomer evicts neither its equals nor anybody at the eviction limit.
"""

from __future__ import annotations

import pytest

from skipjoin.core.events import Preempted, Preemption
from skipjoin.core.kv import KVLedger
from skipjoin.core.policy import Policies, Promise
from skipjoin.core.request import Request
from skipjoin.core.scheduler import Scheduler
from skipjoin.policies.batching import Greedy
from skipjoin.policies.pressure import Recompute, Swap
from skipjoin.policies.reservation import OnDemand
from support.load import make
from support.policies import Ranks
from support.watch import Stepper, WatchedCore, World


def scene(
    numbers: dict[int, int], *, blocks: int, host: int = 0, limit: int = 4, seats: int = 8
) -> tuple[Stepper, Ranks]:
    ordering = Ranks(numbers)
    pressure = Swap() if host else Recompute()
    policies = Policies(ordering, Greedy(seats, 1000, chunked=True), OnDemand(0.0), pressure)
    core = WatchedCore(Scheduler(policies, KVLedger(blocks, host, 4), eviction_limit=limit))
    return Stepper(core), ordering


def ran(stepper: Stepper) -> set[int]:
    return {piece.request.id for piece in stepper.step().slices}


def test_equals_do_not_evict_each_other() -> None:
    stepper, _ = scene({0: 5, 1: 5}, blocks=4)
    stepper.add(make(0, 8, 5))
    ran(stepper)
    stepper.add(make(1, 8, 5))
    for _ in range(4):
        assert ran(stepper) == {0}
    stepper.drain()
    assert not any(isinstance(event, Preempted) for event in stepper.events)


def test_strictly_higher_evicts() -> None:
    stepper, _ = scene({0: 5, 1: 4}, blocks=4)
    stepper.add(make(0, 8, 5))
    ran(stepper)
    stepper.add(make(1, 8, 5))
    assert ran(stepper) == {1}
    stepper.drain()


def test_nobody_leaves_for_a_newcomer_that_would_still_not_fit() -> None:
    stepper, _ = scene({0: 1, 1: 5, 2: 3}, blocks=8)
    first, low = make(0, 16, 5), make(1, 8, 5)
    stepper.add(first, low)
    ran(stepper)
    stepper.add(make(2, 17, 5))  # 5 blocks: 2 of request 1 and 1 free are not enough
    assert ran(stepper) == {0, 1}
    assert low.evictions == 0
    stepper.drain()


def test_a_newcomer_does_not_evict_who_was_evicted_too_often() -> None:
    stepper, _ = scene({0: 5, 1: 1, 2: 1, 3: 1}, blocks=4, limit=2)
    victim = make(0, 12, 4)
    stepper.add(victim)
    assert ran(stepper) == {0}
    for number in (1, 2):
        stepper.add(make(number, 12, 1))
        assert ran(stepper) == {number}
        assert ran(stepper) == {0}
    stepper.add(make(3, 12, 1))
    assert ran(stepper) == {0}
    assert victim.evictions == 2
    stepper.drain()


def test_growth_evicts_the_tail_even_of_those_evicted_too_often() -> None:
    """Somebody who runs must be able to grow: the limit protects from newcomers only."""
    stepper, _ = scene({0: 1, 1: 2, 2: 3}, blocks=6, limit=0)
    stepper.add(make(0, 8, 9), make(1, 8, 3), make(2, 8, 3))
    assert ran(stepper) == {0, 1, 2}
    # All three need a third block. Request 2 makes way with two: one each for the others.
    assert ran(stepper) == {0, 1}
    stepper.drain()
    assert [event.request.id for event in stepper.events if isinstance(event, Preempted)] == [2]


def test_growth_spares_who_was_evicted_too_often_while_others_will_do() -> None:
    stepper, _ = scene({0: 1, 1: 2, 2: 3}, blocks=6, limit=1)
    spared = make(2, 8, 3)
    spared.evictions = 1
    stepper.add(make(0, 8, 9), make(1, 8, 3), spared)
    assert ran(stepper) == {0, 1, 2}
    assert 0 in ran(stepper)
    first = next(event for event in stepper.events if isinstance(event, Preempted))
    assert first.request.id == 1
    stepper.drain()


def test_nobody_below_an_evicted_request_takes_new_space_in_that_step() -> None:
    stepper, _ = scene({0: 1, 1: 5, 2: 6}, blocks=8)
    stepper.add(make(1, 24, 3))
    ran(stepper)
    # Request 0 needs 5 blocks and evicts request 1; the 3 blocks left would do for request 2.
    stepper.add(make(0, 20, 2), make(2, 8, 3))
    assert ran(stepper) == {0}
    stepper.drain()


def test_a_newcomer_that_does_not_fit_keeps_out_those_behind_it() -> None:
    stepper, _ = scene({0: 1, 1: 2, 2: 3}, blocks=8)
    stepper.add(make(0, 16, 5))
    ran(stepper)
    stepper.add(make(1, 20, 2), make(2, 4, 2))
    assert ran(stepper) == {0}
    stepper.drain()


def test_a_request_that_cannot_come_back_yet_keeps_out_its_equals_behind_it() -> None:
    """Or small newcomers would take the space that it waits for, one after the other, for ever."""
    stepper, _ = scene({0: 1, **dict.fromkeys(range(1, 40), 5)}, blocks=8, host=8)
    stepper.add(make(1, 24, 6))
    ran(stepper)
    stepper.add(make(0, 20, 4))
    assert ran(stepper) == {0}
    assert [event.how for event in stepper.events if isinstance(event, Preempted)] == [Preemption.SWAP]
    for number in range(2, 40):
        stepper.add(make(number, 4, 4))
        if 1 in ran(stepper):
            break
    assert number < 8, "the swapped request starves"
    stepper.drain()


class NoPromise:
    """A reservation that promises nothing: every chunk of a prompt has to find space of its own."""

    def admit(self, request: Request, kv: KVLedger) -> Promise:
        return Promise(now=0)


def test_a_request_that_cannot_grow_yet_keeps_out_those_behind_it() -> None:
    policies = Policies(Ranks({0: 1, 1: 5, 2: 6}), Greedy(8, 13, chunked=True), NoPromise(), Recompute())
    stepper = Stepper(WatchedCore(Scheduler(policies, KVLedger(8, 0, 4))))
    stepper.add(make(0, 13, 6))
    ran(stepper)
    stepper.add(make(1, 24, 2))
    assert ran(stepper) == {0, 1}  # 12 tokens of request 1: 3 blocks, and 1 is left
    stepper.add(make(2, 2, 3))
    assert ran(stepper) == {0}
    stepper.drain()


def test_swap_falls_back_to_dropping_when_the_host_is_full() -> None:
    stepper, _ = scene({0: 5, 1: 1}, blocks=4, host=1)
    stepper.add(make(0, 12, 4))
    ran(stepper)
    stepper.add(make(1, 12, 2))
    assert ran(stepper) == {1}
    assert [event.how for event in stepper.events if isinstance(event, Preempted)] == [Preemption.DROP]
    stepper.drain()


def test_swapped_blocks_come_back_before_the_step_and_dropped_ones_are_computed_again() -> None:
    for host in (0, 8):
        stepper, _ = scene({0: 5, 1: 1}, blocks=4, host=host)
        stepper.add(make(0, 12, 4))
        ran(stepper)
        stepper.add(make(1, 12, 1))
        assert ran(stepper) == {1}
        plan = stepper.step()
        assert [(piece.start, piece.tokens) for piece in plan.slices] == [(12, 1) if host else (0, 13)]
        assert len(plan.before) == bool(host)
        stepper.drain()


def test_paused_requests_keep_their_blocks() -> None:
    stepper, ordering = scene({0: 5, 1: 1}, blocks=20, seats=1)
    paused = make(0, 8, 5)
    stepper.add(paused)
    ran(stepper)
    table = stepper.core.kv.slots(paused)
    stepper.add(make(1, 8, 3))
    assert ran(stepper) == {1}
    assert stepper.core.kv.slots(paused) == table
    assert [event.how for event in stepper.events if isinstance(event, Preempted)] == [Preemption.PAUSE]
    ordering.numbers[0] = 0
    assert ran(stepper) == {0}
    stepper.drain()


@pytest.mark.parametrize(("depth", "overlap"), [(2, False), (2, True), (3, True), (3, False)])
def test_a_deeper_pipeline_delays_an_eviction_by_no_more_than_its_depth(depth: int, overlap: bool) -> None:
    world = World("fcfs", depth, overlap, device_blocks=12)
    stepper = Stepper(world.core())
    stepper.add(*(make(number, 8, 20, priority=1) for number in range(4)))
    for _ in range(6):
        while stepper.start() is not None:
            pass
        stepper.finish()
    stepper.add(make(9, 40, 3, priority=0))
    plans = 0
    while 9 not in {piece.request.id for plan in stepper.core.plans for piece in plan.slices}:
        if stepper.start() is None:
            stepper.finish()
            plans += 1
        assert plans <= depth
    stepper.drain()
