"""A part of a request's blocks makes way: what is left, what comes back, and what fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from skipjoin.core.events import Preempted, Preemption
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy import EvictionPolicy, Policies
from skipjoin.core.request import Request
from skipjoin.core.scheduling.scheduler import Scheduler
from skipjoin.core.step import Direction
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.batching import Greedy
from support.load import make
from support.policies import DropTails, OnCall, Ranks, SpillAll
from support.watch import Stepper, WatchedCore

OUT, IN = Direction.OUT, Direction.IN


class OnCallParts(SpillAll, OnCall):
    """Moves parts where blocks are short, and beside a step what the test asks for."""


class Scene:
    """A stepper over 10 blocks of four tokens, with an ordering that the test sets."""

    def __init__(self, numbers: dict[int, int], eviction: EvictionPolicy, *, host: int = 20, depth: int = 1) -> None:
        self.ordering = Ranks(numbers)
        policies = Policies(self.ordering, Greedy(8, 1000, chunked=True), OnDemand(0.0), eviction)
        self.kv = KVLedger(10, host, 4)
        self.stepper = Stepper(WatchedCore(Scheduler(policies, self.kv, depth=depth, overlap=depth > 1)))

    def add(self, number: int, prompt: int, max_tokens: int) -> Request:
        request = make(number, prompt, max_tokens)
        self.stepper.add(request)
        return request

    def ran(self) -> list[int]:
        return [piece.request.id for piece in self.stepper.step().slices]

    def blocks(self, request: Request) -> tuple[int, int]:
        """How many the request has on the device and on the host."""
        held = self.kv.blocks_of(request)
        return (len(held.device), len(held.cpu)) if held else (0, 0)

    def ways(self) -> list[tuple[int, Preemption, int]]:
        """Each preemption: the request's id, how, and the tokens whose KV stayed."""
        return [(event.request.id, event.how, event.kept) for event in self.stepper.events if type(event) is Preempted]


def test_only_what_is_short_leaves_and_it_returns_behind_what_stayed() -> None:
    scene = Scene({0: 5, 1: 1}, SpillAll())
    victim = scene.add(0, 27, 10)
    scene.ran()
    table = scene.kv.blocks_of(victim).table
    scene.add(1, 17, 4)
    plan = scene.stepper.step()
    (move,) = plan.blocking
    assert (move.source, move.tokens) == (table[5:], 7)
    assert (scene.blocks(victim), victim.computed, victim.evictions) == ((5, 2), 27, 1)
    assert scene.kv.blocks_of(victim).table == table[:5]
    while not (plan := scene.stepper.step()).blocking:
        assert [piece.request.id for piece in plan.slices] == [1]
    (back,) = plan.blocking
    assert (back.direction, back.source, back.tokens) == (IN, move.target, 7)
    assert scene.kv.blocks_of(victim).table[:7] == (*table[:5], *back.target)
    assert scene.ways() == [(0, Preemption.SPILL, 20)]
    scene.stepper.drain()
    assert scene.stepper.tokens[0] == list(range(27, 37))


def test_a_victim_gives_up_more_in_the_same_step_with_the_same_move_and_later_with_another() -> None:
    scene = Scene({0: 5, 1: 1, 2: 2, 3: 3}, SpillAll())
    victim = scene.add(0, 38, 2)
    scene.ran()
    table = scene.kv.blocks_of(victim).table
    scene.add(1, 8, 4)
    scene.add(2, 9, 2)
    plan = scene.stepper.step()
    (move,) = plan.blocking
    assert (move.source, move.tokens) == (table[5:], 18)
    assert scene.ways() == [(0, Preemption.SPILL, 32), (0, Preemption.SPILL, 20)]
    scene.add(3, 8, 4)
    plan = scene.stepper.step()
    assert [(move.source, move.tokens) for move in plan.blocking] == [(table[2:5], 12)]  # request 1 grows as well
    assert scene.blocks(victim) == (2, 8)
    scene.stepper.drain()
    assert scene.stepper.tokens[0] == [38, 39]


@pytest.mark.parametrize("fails", [OUT, IN])
def test_a_failed_move_costs_what_it_carried_and_what_follows(fails: Direction) -> None:
    scene = Scene({0: 5, 1: 1}, SpillAll())
    victim = scene.add(0, 27, 10)
    scene.ran()
    table = scene.kv.blocks_of(victim).table
    scene.add(1, 17, 4)
    scene.stepper.fails = lambda move: move.direction is fails
    while victim.computed == 27:
        scene.stepper.step()
    scene.stepper.fails = lambda move: False
    assert (victim.computed, victim.planned, scene.blocks(victim)) == (20, 20, (5, 0))
    assert scene.kv.blocks_of(victim).table == table[:5]
    assert scene.ways() == [(0, Preemption.SPILL, 20), (0, Preemption.DROP, 20)]
    scene.stepper.drain()
    assert scene.stepper.tokens[0] == list(range(27, 37))


def test_a_dropped_tail_is_computed_again_and_takes_along_what_the_host_has() -> None:
    """Where the host has room for one block, the second eviction drops: the block there is of no use then."""
    scene = Scene({0: 5, 1: 1, 2: 1}, SpillAll(), host=1)
    victim = scene.add(0, 32, 3)
    scene.ran()
    scene.add(1, 11, 2)
    scene.ran()
    assert scene.blocks(victim) == (7, 1)
    scene.add(2, 7, 2)
    scene.ran()
    assert (scene.blocks(victim), victim.computed) == ((5, 0), 20)
    assert scene.ways() == [(0, Preemption.SPILL, 28), (0, Preemption.DROP, 20)]
    assert scene.kv.cpu_free == 1
    scene.stepper.drain()
    assert scene.stepper.tokens[0] == [32, 33, 34]


def test_blocks_without_kv_go_first_and_the_victim_pauses() -> None:
    """It claims blocks that it does not hold yet: those are enough."""
    scene = Scene({0: 5, 1: 1}, SpillAll())
    victim = scene.add(0, 18, 10)
    scene.ran()
    scene.kv.reserve(victim, 9)
    scene.add(1, 16, 1)
    assert scene.ran() == [1]
    assert (scene.blocks(victim), scene.kv.footprint(victim)) == ((5, 0), 5)
    assert scene.ways()[0] == (0, Preemption.SPILL, 18)
    assert scene.ran() == [0]
    scene.stepper.drain()


def test_what_is_left_can_move_beside_a_step_and_all_of_it_back() -> None:
    eviction = OnCallParts()
    scene = Scene({0: 5, 1: 1}, eviction)
    victim = scene.add(0, 26, 10)
    scene.ran()
    scene.add(1, 20, 20)
    scene.ran()
    table = scene.kv.blocks_of(victim).table
    assert scene.blocks(victim) == (5, 2)
    eviction.out = [victim]
    (move,) = scene.stepper.step().overlapped
    assert (move.source, move.tokens) == (table, 20)
    assert scene.blocks(victim) == (0, 7)
    scene.stepper.core.abort(1, scene.stepper.now)
    eviction.back = [victim]
    (move,) = scene.stepper.step().overlapped
    assert (len(move.target), move.tokens) == (7, 26)
    scene.stepper.drain()
    assert scene.stepper.tokens[0] == list(range(26, 36))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("eviction", [SpillAll, DropTails])
def test_equals_whose_parts_fill_the_device_do_not_wait_for_each_other(
    eviction: Callable[[], EvictionPolicy], depth: int
) -> None:
    """Three equals that have grown while others had their blocks: none has space for the rest of its KV."""
    scene = Scene(dict.fromkeys(range(3), 5) | {9: 1}, eviction(), depth=depth)
    requests = [scene.add(number, 12, 28) for number in range(3)]
    for _ in range(3):  # each runs while the others' tails make way
        for favorite in requests:
            scene.ordering.numbers.update({0: 5, 1: 5, 2: 5} | {favorite.id: 1})
            for _ in range(6):
                if favorite.finish_reason is None and scene.stepper.start() is not None:
                    scene.stepper.finish()
    scene.ordering.numbers.update({0: 5, 1: 5, 2: 5})
    scene.stepper.drain()
    assert all(scene.stepper.tokens[number] == list(range(12, 40)) for number in range(3))
