"""Swapping ahead of need (FastServe section 4.2): who leaves, who comes back, and what stays free.

A step takes a second here and a block 0.1 s on the link, so 20 blocks go either way in the two steps that moves are
begun ahead. Requests hold four blocks of four tokens if nothing else is said, and have turns as `Ranks` numbers them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.eviction import ProactiveSwap
from support.load import make
from support.policies import Ranks

OUT, IN = Direction.OUT, Direction.IN
COST = LinearCost(floor=0.5, prefill_token=1.0, block=0.1)


@dataclass(frozen=True)
class Place:
    """A request that holds KV. pending: tokens that it has to compute before the next sample."""

    turn: int
    blocks: int = 4
    is_on_host: bool = False
    pending: int = 1


def away(turn: int, blocks: int = 4) -> Place:
    return Place(turn, blocks, is_on_host=True)


class Scene:
    """Requests that hold KV, numbered in the order of `places`, a pressure that has seen steps of a second, and the
    moves that it asks for, begun."""

    def __init__(self, *places: Place, device: int = 20, host: int = 40, cost: LinearCost = COST) -> None:
        self.kv = KVLedger(device, host, 4)
        self.eviction = ProactiveSwap(cost)
        self.ordering = Ranks({})
        self.now = 0.0
        self.requests: list[Request] = []
        self.moves: list[Move] = []  # of the last step
        self._transit: list[Move] = []
        for place in sorted(places, key=lambda place: not place.is_on_host):
            self._place(place)
        still = KVLedger(2 * device, 0, 4)  # with room for all, nothing moves
        request = make(99)
        still.grow(request, 4)
        for now in (-2.0, -1.0):
            self.eviction.ahead([request], Ranks({99: 0}), still, now)

    def _place(self, place: Place) -> None:
        request = make(len(self.requests), place.blocks * 4)
        self.kv.grow(request, request.known)
        request.computed = request.planned = request.known
        request.known += place.pending
        if place.is_on_host:
            self.kv.land(self.kv.move_out(request, blocking=True))
        self.ordering.numbers[request.id] = place.turn
        self.requests.append(request)

    def expect(self, prompt: int) -> None:
        """A request arrives."""
        self.eviction.on_arrived(make(1000, prompt), self.now)

    def step(self) -> tuple[list[int], list[int]]:
        """The turns of those who begin to leave and to come back beside the next step, in order."""
        still = [request for request in self.requests if self.kv.blocks_of(request).is_settled]
        out, back = self.eviction.ahead(still, self.ordering, self.kv, self.now)
        self.moves = [self.kv.move_out(request, blocking=False) for request in out]
        self.moves += [self.kv.move_in(request) for request in back]
        self._transit += self.moves
        self.now += 1.0
        turns = self.ordering.numbers
        return [turns[request.id] for request in out], [turns[request.id] for request in back]

    def land(self) -> None:
        """All that is in transit."""
        for move in self._transit:
            self.kv.land(move)
        self._transit = []


def test_nothing_moves_while_nothing_is_short() -> None:
    assert Scene(Place(1), Place(2), Place(3), Place(4)).step() == ([], [])


def test_whose_turn_is_last_leaves_first_and_no_more_than_needed() -> None:
    """One block in a hundred stays free for growth, at least one: nobody has to wait for a move to get it."""
    scene = Scene(Place(3), Place(1), Place(5), Place(2), Place(4))
    assert scene.step() == ([5], [])
    assert scene.step() == ([], []), "what is on its way out counts as free"
    scene.land()
    assert scene.step() == ([], [])


def test_who_has_arrived_finds_its_blocks_free() -> None:
    scene = Scene(*(Place(turn) for turn in (1, 2, 3, 4, 5)))
    scene.expect(prompt=25)  # 7 blocks
    assert scene.step() == ([5, 4], [])


def test_blocks_are_kept_for_who_may_arrive() -> None:
    """As many as the history of arrivals suggests, and a tenth of the device at most."""
    scene = Scene(*(Place(turn, 10) for turn in range(10)), Place(10, 9), device=110)
    assert scene.step() == ([], []), "a block for growth is free, and nothing known of arrivals"
    for _ in range(50):
        scene.now += 1.0
        scene.expect(prompt=12)
        scene.eviction.ahead([], scene.ordering, scene.kv, scene.now)
    out, back = scene.step()
    # Twelve tokens, three blocks, a second: six for two seconds, and the one for growth.
    assert (out, back) == ([10], [])
    spare = scene.kv.available + sum(len(move.source) for move in scene.moves)
    assert spare >= 7
    for _ in range(50):
        scene.now += 0.1
        scene.expect(prompt=400)
    scene.eviction.ahead([], scene.ordering, scene.kv, scene.now)
    assert scene.eviction._spare(scene.kv, scene.now) == 1 + 11


def test_whose_turn_is_soonest_comes_back_first_into_what_is_free() -> None:
    scene = Scene(Place(1), away(7), away(5), away(6), away(8))
    # 16 blocks are free, and one of them stays so.
    assert scene.step() == ([], [5, 6, 7])
    assert scene.step() == ([], [])


def test_who_comes_back_before_who_does_not_fit() -> None:
    """Nobody overtakes: small ones would take the blocks that a large one waits for."""
    scene = Scene(Place(1), away(5, 4), away(6, 18), away(7, 2))
    assert scene.step() == ([], [5])


def test_whose_turn_is_sooner_takes_the_place_of_who_runs_later() -> None:
    scene = Scene(away(2), Place(1), Place(3), Place(4), Place(5), Place(6, 3))
    # One block is free, for growth; four are needed, so the two last ones leave.
    assert scene.step() == ([6, 5], [])
    scene.land()
    assert scene.step() == ([], [2])


def test_equals_take_no_place_of_each_other() -> None:
    scene = Scene(away(2), Place(1), Place(2), Place(2), Place(2, 7))
    assert scene.step() == ([], [])


@given(
    places=st.lists(st.builds(Place, st.integers(0, 5), st.integers(1, 6), st.booleans()), max_size=8),
    spare=st.integers(0, 8),
    device=st.integers(12, 60),
)
def test_an_exchange_is_by_turn(places: list[Place], spare: int, device: int) -> None:
    """Who leaves does so for blocks that are to stay free, or for somebody whose turn is strictly sooner; of those who
    stay none has a later turn; and among those on the host, those with the soonest turns come back."""
    if sum(place.blocks for place in places) > device:
        return
    scene = Scene(*places, device=device, host=100)
    scene.expect(prompt=max(1, 4 * spare))
    turns = scene.ordering.numbers
    on_device = {r.id for r in scene.requests if not scene.kv.cpu_footprint(r)}
    on_host = {r.id for r in scene.requests} - on_device
    short = 1 + max(1, spare) - scene.kv.available
    out, back = scene.step()
    left = sorted(on_device - {move.request.id for move in scene.moves}, key=turns.__getitem__)
    waiting = sorted(on_host - {move.request.id for move in scene.moves}, key=turns.__getitem__)
    assert out == sorted(out, reverse=True)
    assert back == sorted(back)
    if out and left:
        assert turns[left[-1]] <= out[-1]
    if back and waiting:
        assert back[-1] <= turns[waiting[0]]
    leaving = [move for move in scene.moves if move.direction is OUT]
    for turn, move in zip(out, leaving, strict=True):
        is_for_spare = short > 0
        short -= len(move.source)
        assert is_for_spare or any(turns[number] < turn for number in on_host)
    assert not on_device or left, "whoever runs next stays"


# -- the link ---------------------------------------------------------------------------------------------------------


def test_no_more_begins_to_move_than_the_link_moves_in_two_steps() -> None:
    """Ten blocks here: the third request begins when two of the first ten are left."""
    slow = replace(COST, block=0.2)
    scene = Scene(*(Place(turn) for turn in range(10)), device=40, cost=slow)
    scene.expect(prompt=120)
    assert scene.step() == ([9, 8, 7], [])
    scene.expect(prompt=120)
    assert scene.step() == ([], []), "the link has work for more than two steps"
    scene.land()
    scene.expect(prompt=120)
    assert scene.step() == ([6, 5, 4], [])
    back = Scene(Place(0), *(away(turn) for turn in range(1, 9)), device=40, cost=slow)
    assert back.step() == ([], [1, 2, 3])


def test_one_request_at_a_time_where_the_link_is_slower_than_steps() -> None:
    slow = replace(COST, block=1.9, prefill_token=10.0)
    scene = Scene(*(Place(turn) for turn in range(5)), cost=slow)
    scene.expect(prompt=60)
    assert scene.step() == ([4], [])
    scene.expect(prompt=60)
    assert scene.step() == ([], [])


def test_what_takes_next_to_no_time_moves_before_the_step_that_needs_it() -> None:
    free = Scene(*(Place(turn) for turn in range(5)), cost=replace(COST, block=0.0))
    assert free.step() == ([], [])
    assert not free.eviction.returns_overlapped(make(0, 4, 4))
    dear = Scene(*(Place(turn) for turn in range(5)))
    assert dear.step() == ([4], [])
    dear.now += 1e6
    dear.step()
    assert dear.eviction.returns_overlapped(make(0, 4, 4)), (
        "steps that are long because KV moved before them make no move cheap"
    )


# -- what does not move -----------------------------------------------------------------------------------------------


def test_an_unfinished_prompt_stays() -> None:
    scene = Scene(Place(1), Place(2), Place(3), Place(4), Place(5, pending=2))
    assert scene.step() == ([4], [])


def test_what_is_cheaper_to_compute_again_stays() -> None:
    """It is dropped, once it has to go."""
    cheap = replace(COST, prefill_token=0.04)  # 16 tokens: 0.64 s against 0.8 s
    scene = Scene(*(Place(turn) for turn in range(5)), cost=cheap)
    assert scene.step() == ([], [])


def test_the_last_one_stays_however_short_blocks_are() -> None:
    """Alone it would be moved out for room and in for want of others, for ever."""
    assert Scene(Place(1, 20)).step() == ([], [])
    scene = Scene(Place(1, 10), Place(2, 10))
    scene.expect(prompt=70)
    assert scene.step() == ([2], [])


# -- standing still ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [4, 19, 20])
def test_a_device_without_kv_brings_in_whose_turn_is_soonest(blocks: int) -> None:
    """Even into the blocks that are to stay free."""
    scene = Scene(away(7, 6), away(5, blocks), away(6, 6))
    out, back = scene.step()
    assert (out, back[0]) == ([], 5)
    assert (len(back) == 1) == (blocks > 4)


def test_while_somebody_is_on_its_way_nobody_else_is_squeezed_in() -> None:
    scene = Scene(away(5, 10), away(6, 10))
    assert scene.step() == ([], [5])
    assert scene.step() == ([], [])
    scene.land()
    assert scene.step() == ([], [])


@pytest.mark.parametrize("host", [0, 3])
def test_a_full_host_is_asked_for_no_more_than_it_can_take(host: int) -> None:
    """The pressure may ask for more: the scheduler moves what can move, and the rest stays where it is."""
    scene = Scene(*(Place(turn) for turn in range(5)), host=host)
    still = list(scene.requests)
    out, back = scene.eviction.ahead(still, scene.ordering, scene.kv, 0.0)
    assert back == []
    assert not [request for request in out if scene.kv.can_move_out(request)]
