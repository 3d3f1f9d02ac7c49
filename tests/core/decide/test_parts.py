"""Eviction of the last blocks of a request: KV that remains, is swapped in again, or is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from skipjoin.core.events import Preempted, Preemption
from skipjoin.core.policy import EvictionPolicy
from skipjoin.core.request import Request
from skipjoin.core.step import Direction
from support.load import make
from support.policies import DropTails, OnCall, SpillAll
from support.watch import Scene

OUT, IN = Direction.OUT, Direction.IN


class OnCallParts(SpillAll, OnCall):
    """Swaps out last blocks where blocks are short, and whole requests on call during a step."""


class Parts(Scene):
    def __init__(self, numbers: dict[int, int], eviction: EvictionPolicy, *, cpu: int = 20, depth: int = 1) -> None:
        super().__init__(numbers, blocks=10, cpu=cpu, eviction=eviction, depth=depth)

    def request(self, number: int, prompt: int, max_tokens: int) -> Request:
        request = make(number, prompt, max_tokens)
        self.add(request)
        return request

    def blocks(self, request: Request) -> tuple[int, int]:
        held = self.kv.blocks_of(request)
        return (len(held.device), len(held.cpu)) if held else (0, 0)

    def preemptions(self) -> list[tuple[int, Preemption, int]]:
        """Return for each preemption the request's id, its kind, and the number of tokens whose KV stayed."""
        return [(event.request.id, event.how, event.kept) for event in self.events if type(event) is Preempted]


def test_only_missing_blocks_are_swapped_out_and_swapped_in_again() -> None:
    scene = Parts({0: 5, 1: 1}, SpillAll())
    victim = scene.request(0, 27, 10)
    scene.ran()
    table = scene.kv.blocks_of(victim).table
    scene.request(1, 17, 4)
    plan = scene.step()
    (move,) = plan.blocking
    assert (move.source, move.tokens) == (table[5:], 7)
    assert (scene.blocks(victim), victim.progress.computed, victim.progress.evictions) == ((5, 2), 27, 1)
    assert scene.kv.blocks_of(victim).table == table[:5]
    while not (plan := scene.step()).blocking:
        assert [piece.request.id for piece in plan.slices] == [1]
    (back,) = plan.blocking
    assert (back.direction, back.source, back.tokens) == (IN, move.target, 7)
    assert scene.kv.blocks_of(victim).table[:7] == (*table[:5], *back.target)
    assert scene.preemptions() == [(0, Preemption.SPILL, 20)]
    scene.drain()
    assert scene.tokens[0] == list(range(27, 37))


def test_further_evictions_extend_the_move_of_the_same_step_or_begin_another() -> None:
    scene = Parts({0: 5, 1: 1, 2: 2, 3: 3}, SpillAll())
    victim = scene.request(0, 38, 2)
    scene.ran()
    table = scene.kv.blocks_of(victim).table
    scene.request(1, 8, 4)
    scene.request(2, 9, 2)
    plan = scene.step()
    (move,) = plan.blocking
    assert (move.source, move.tokens) == (table[5:], 18)
    assert scene.preemptions() == [(0, Preemption.SPILL, 32), (0, Preemption.SPILL, 20)]
    scene.request(3, 8, 4)
    plan = scene.step()
    assert [(move.source, move.tokens) for move in plan.blocking] == [(table[2:5], 12)]  # request 1 grows as well
    assert scene.blocks(victim) == (2, 8)
    scene.drain()
    assert scene.tokens[0] == [38, 39]


@pytest.mark.parametrize("fails", [OUT, IN])
def test_a_failed_move_loses_the_kv_from_its_first_token_on(fails: Direction) -> None:
    scene = Parts({0: 5, 1: 1}, SpillAll())
    victim = scene.request(0, 27, 10)
    scene.ran()
    table = scene.kv.blocks_of(victim).table
    scene.request(1, 17, 4)
    scene.fails = lambda move: move.direction is fails
    while victim.progress.computed == 27:
        scene.step()
    scene.fails = lambda move: False
    assert (victim.progress.computed, victim.progress.planned, scene.blocks(victim)) == (20, 20, (5, 0))
    assert scene.kv.blocks_of(victim).table == table[:5]
    assert scene.preemptions() == [(0, Preemption.SPILL, 20), (0, Preemption.DROP, 20)]
    scene.drain()
    assert scene.tokens[0] == list(range(27, 37))


def test_dropping_device_blocks_also_drops_later_ones_on_the_cpu_tier() -> None:
    """The CPU tier has room for one block, so the second eviction drops KV, which makes that block useless."""
    scene = Parts({0: 5, 1: 1, 2: 1}, SpillAll(), cpu=1)
    victim = scene.request(0, 32, 3)
    scene.ran()
    scene.request(1, 11, 2)
    scene.ran()
    assert scene.blocks(victim) == (7, 1)
    scene.request(2, 7, 2)
    scene.ran()
    assert (scene.blocks(victim), victim.progress.computed) == ((5, 0), 20)
    assert scene.preemptions() == [(0, Preemption.SPILL, 28), (0, Preemption.DROP, 20)]
    assert scene.kv.tiers.cpu_free == 1
    scene.drain()
    assert scene.tokens[0] == [32, 33, 34]


def test_blocks_without_kv_are_evicted_first() -> None:
    """It has reserved blocks that it does not hold yet, and these suffice."""
    scene = Parts({0: 5, 1: 1}, SpillAll())
    victim = scene.request(0, 18, 10)
    scene.ran()
    scene.kv.reserve(victim, 9)
    scene.request(1, 16, 1)
    assert scene.ran() == [1]
    assert (scene.blocks(victim), scene.kv.footprint(victim)) == ((5, 0), 5)
    assert scene.preemptions()[0] == (0, Preemption.SPILL, 18)
    assert scene.ran() == [0]
    scene.drain()


def test_remaining_blocks_can_be_swapped_out_and_all_blocks_in_during_a_step() -> None:
    eviction = OnCallParts()
    scene = Parts({0: 5, 1: 1}, eviction)
    victim = scene.request(0, 26, 10)
    scene.ran()
    scene.request(1, 20, 20)
    scene.ran()
    table = scene.kv.blocks_of(victim).table
    assert scene.blocks(victim) == (5, 2)
    eviction.out = [victim]
    (move,) = scene.step().overlapped
    assert (move.source, move.tokens) == (table, 20)
    assert scene.blocks(victim) == (0, 7)
    scene.core.abort(1, scene.now)
    eviction.back = [victim]
    (move,) = scene.step().overlapped
    assert (len(move.target), move.tokens) == (7, 26)
    scene.drain()
    assert scene.tokens[0] == list(range(26, 36))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("eviction", [SpillAll, DropTails])
def test_requests_of_equal_rank_whose_kv_fills_the_device_all_finish(
    eviction: Callable[[], EvictionPolicy], depth: int
) -> None:
    """Each has grown while the others' blocks were evicted, so none has room for the rest of its KV."""
    scene = Parts(dict.fromkeys(range(3), 5) | {9: 1}, eviction(), depth=depth)
    requests = [scene.request(number, 12, 28) for number in range(3)]
    for _ in range(3):  # each runs while the last blocks of the others are evicted
        for favorite in requests:
            scene.ordering.numbers.update({0: 5, 1: 5, 2: 5} | {favorite.id: 1})
            for _ in range(6):
                if favorite.progress.finish_reason is None and scene.start() is not None:
                    scene.finish()
    scene.ordering.numbers.update({0: 5, 1: 5, 2: 5})
    scene.drain()
    assert all(scene.tokens[number] == list(range(12, 40)) for number in range(3))
