"""Proactive swapping (FastServe section 4.2): swap-outs, swap-ins, and the blocks kept free.

A step takes a second here and a block 0.1 s on the link, so 20 blocks can move in either direction during the two
steps for which moves are started ahead. Requests hold four blocks of four tokens by default and have the turns that
`Ranks` gives them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.events import Preemption
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.proactive_swap import DisplacingSwap, ProactiveSwap
from support.load import make
from support.policies import Ranks

OUT, IN = Direction.OUT, Direction.IN
COST = LinearCost(floor=0.5, prefill_token=1.0, block=0.1)


@dataclass(frozen=True)
class Holder:
    """A request that holds KV, with `pending` tokens to compute before the next sample."""

    turn: int
    blocks: int = 4
    is_swapped_out: bool = False
    pending: int = 1


def swapped_out(turn: int, blocks: int = 4) -> Holder:
    return Holder(turn, blocks, is_swapped_out=True)


class Setup:
    """Requests that hold KV, numbered in the order of `holders`, with an eviction policy that saw steps of 1 s.

    The moves that the policy requests are started.
    """

    def __init__(
        self,
        *holders: Holder,
        device: int = 20,
        host: int = 40,
        cost: LinearCost = COST,
        eviction: ProactiveSwap | None = None,
    ) -> None:
        self.kv = KVLedger(device, host, 4)
        self.eviction = eviction or ProactiveSwap(cost)
        self.ordering = Ranks({})
        self.now = 0.0
        self.requests: list[Request] = []
        self.moves: list[Move] = []  # of the last step
        self._transit: list[Move] = []
        for holder in sorted(holders, key=lambda holder: not holder.is_swapped_out):
            self._add(holder)
        idle = KVLedger(2 * device, 0, 4)  # with space for all, nothing moves
        request = make(99)
        idle.grow(request, 4)
        for now in (-2.0, -1.0):
            self.eviction.ahead([request], Ranks({99: 0}), idle, now)

    def _add(self, holder: Holder) -> None:
        request = make(len(self.requests), holder.blocks * 4)
        self.kv.grow(request, request.progress.known)
        request.progress.computed = request.progress.planned = request.progress.known
        request.progress.known += holder.pending
        if holder.is_swapped_out:
            self.kv.tiers.complete(self.kv.tiers.move_out(request, blocking=True))
        self.ordering.numbers[request.id] = holder.turn
        self.ordering.on_arrived(request, 0.0)
        self.requests.append(request)

    def arrive(self, prompt: int, turn: int = -1) -> None:
        self.ordering.numbers[1000] = turn
        self.eviction.on_arrived(make(1000, prompt), self.now)

    def step(self) -> tuple[list[int], list[int]]:
        """Start the moves of the next step and return the turns of those swapped out and in, in order."""
        idle = [request for request in self.requests if self.kv.blocks_of(request).is_settled]
        out, back = self.eviction.ahead(idle, self.ordering, self.kv, self.now)
        self.moves = [self.kv.tiers.move_out(request, blocking=False) for request in out]
        self.moves += [self.kv.tiers.move_in(request) for request in back]
        self._transit += self.moves
        self.now += 1.0
        turns = self.ordering.numbers
        return [turns[request.id] for request in out], [turns[request.id] for request in back]

    def complete(self) -> None:
        for move in self._transit:
            self.kv.tiers.complete(move)
        self._transit = []


@pytest.mark.parametrize(
    ("holders", "arrives", "moves"),
    [
        ([Holder(1), Holder(2), Holder(3), Holder(4)], 0, ([], [])),  # blocks are free
        ([Holder(turn) for turn in (1, 2, 3, 4, 5)], 25, ([5, 4], [])),  # the arrival needs 7 blocks
        # 16 blocks are free, and one of them is kept free. The soonest turns come first.
        ([Holder(1), swapped_out(7), swapped_out(5), swapped_out(6), swapped_out(8)], 0, ([], [5, 6, 7])),
        # Small requests do not take the blocks that a large one waits for.
        ([Holder(1), swapped_out(5, 4), swapped_out(6, 18), swapped_out(7, 2)], 0, ([], [5])),
        ([swapped_out(2), Holder(1), Holder(2), Holder(2), Holder(2, 7)], 0, ([], [])),  # equal turns
        ([Holder(1), Holder(2), Holder(3), Holder(4), Holder(5, pending=2)], 0, ([4], [])),  # 5 is in its prompt
        # The last request stays on the device: it would be swapped out for space and in for lack of others.
        ([Holder(1, 20)], 0, ([], [])),
        ([Holder(1, 10), Holder(2, 10)], 70, ([2], [])),
    ],
)
def test_moves_of_one_step(holders: list[Holder], arrives: int, moves: tuple[list[int], list[int]]) -> None:
    setup = Setup(*holders)
    if arrives:
        setup.arrive(prompt=arrives)
    assert setup.step() == moves


def test_the_latest_turn_is_swapped_out_first_and_no_more_than_needed() -> None:
    """One block in a hundred, at least one, stays free so that growth does not wait for a move."""
    setup = Setup(Holder(3), Holder(1), Holder(5), Holder(2), Holder(4))
    assert setup.step() == ([5], [])
    assert setup.step() == ([], []), "blocks that are being swapped out count as free"
    setup.complete()
    assert setup.step() == ([], [])


@pytest.mark.parametrize(("turn", "out"), [(0, [10]), (5, [])])
def test_blocks_stay_free_for_waiting_requests_that_precede_all_others(turn: int, out: list[int]) -> None:
    """However long ago they arrived, and up to a tenth of the device."""
    setup = Setup(*(Holder(number, 10) for number in range(1, 10)), Holder(10, 9), device=100)
    setup.ordering.numbers[1000] = turn
    setup.ordering.on_arrived(make(1000, 12), 0.0)
    assert setup.step() == (out, [])


@pytest.mark.parametrize(("turn", "out"), [(0, [5, 4]), (5, []), (9, [])])
def test_no_request_leaves_for_an_arrival_that_does_not_precede_it(turn: int, out: list[int]) -> None:
    """Nor for those that are expected after it."""
    setup = Setup(*(Holder(number) for number in (1, 2, 3, 4, 5)), device=21)
    setup.arrive(prompt=25, turn=turn)
    assert setup.step() == (out, [])
    setup.arrive(prompt=25, turn=turn)
    assert bool(setup.step()[0]) == bool(out)


@pytest.mark.parametrize(("turn", "back"), [(2, []), (4, [3])])
def test_blocks_are_not_taken_by_a_request_that_would_lose_them_before_it_runs(turn: int, back: list[int]) -> None:
    """One without KV that precedes it would evict it. With the block for growth, 16 are free for 12 and 4."""
    setup = Setup(Holder(1), swapped_out(3))
    setup.ordering.numbers[1000] = turn
    setup.ordering.on_arrived(make(1000, 48), 0.0)
    assert setup.step() == ([], back)


@pytest.mark.parametrize(("short", "victims"), [(4, [1]), (8, [1, 0])])
def test_kv_that_was_just_swapped_in_is_evicted_last(short: int, victims: list[int]) -> None:
    setup = Setup(Holder(1), Holder(2))
    newest, other = setup.requests[1], setup.requests[0]
    newest.progress.place()
    found = setup.eviction.victims(short, [newest, other], setup.kv, setup.now, make(1000, 16))
    assert [eviction.request.id for eviction in found] == [1 - victim for victim in victims]


def test_blocks_are_kept_free_for_expected_arrivals() -> None:
    """Their number follows the history of arrivals and is at most a tenth of the device."""
    setup = Setup(*(Holder(turn, 10) for turn in range(10)), Holder(10, 9), device=110)
    assert setup.step() == ([], []), "one block is free for growth, and there is no history of arrivals"
    for _ in range(50):
        setup.now += 1.0
        setup.arrive(prompt=12)
        setup.eviction.ahead([], setup.ordering, setup.kv, setup.now)
    out, back = setup.step()
    # Twelve tokens or three blocks a second are six blocks in two seconds; one more is for growth.
    assert (out, back) == ([10], [])
    spare = setup.kv.available + sum(len(move.source) for move in setup.moves)
    assert spare >= 7
    for _ in range(50):
        setup.now += 0.1
        setup.arrive(prompt=400)
    setup.eviction.ahead([], setup.ordering, setup.kv, setup.now)
    assert setup.eviction._spare(setup.kv, setup.now) == 1 + 11


@pytest.mark.parametrize(
    ("kind", "block_s", "kept"), [(ProactiveSwap, 0.1, 3), (DisplacingSwap, 0.1, 2), (DisplacingSwap, 8.1, 0)]
)
def test_few_blocks_are_kept_for_arrivals_where_some_may_not_evict_and_none_over_slow_links(
    kind: type[ProactiveSwap], block_s: float, kept: int
) -> None:
    holders = [*(Holder(number, 10) for number in range(1, 10)), Holder(10, 9)]
    setup = Setup(*holders, device=100, eviction=kind(replace(COST, block=block_s)))
    for now in (-3.0, -2.0, -1.0):  # a prompt of three blocks each second
        setup.eviction._arrivals.note(make(1000, 12), now)
    setup.step()
    assert setup.eviction._spare(setup.kv, setup.now) == 1 + kept


@pytest.mark.parametrize(("block_s", "out"), [(0.1, [6]), (8.1, [])])
def test_kv_that_is_sooner_computed_again_is_not_moved_ahead(block_s: float, out: list[int]) -> None:
    """Computing the 64 tokens takes 64.5 s, and moving their 16 blocks out and in 3.2 or 259 s."""
    cost = replace(COST, block=block_s)
    setup = Setup(Holder(1, 384), Holder(6, 16), device=400, eviction=DisplacingSwap(cost))
    assert setup.step() == (out, [])


def test_a_request_with_a_large_part_of_the_device_does_not_leave_for_growth() -> None:
    """It would free 25 blocks more than the one that is kept free, while 20 of 400 may idle, unless one is awaited."""
    setup = Setup(Holder(1, 374), Holder(6, 26), device=400, eviction=DisplacingSwap(COST))
    assert setup.step() == ([], [])
    setup.arrive(prompt=12, turn=2)
    assert setup.step() == ([6], [])


def test_nothing_leaves_for_a_first_request_that_may_not_evict() -> None:
    setup = Setup(Holder(1, 374), Holder(6, 26), device=400, eviction=DisplacingSwap(COST))
    setup.ordering.numbers[1000] = 0
    setup.ordering.outranks = lambda one, other: False  # type: ignore[method-assign]
    setup.ordering.on_arrived(make(1000, 48), 0.0)
    assert setup.step() == ([], [])


def test_a_sooner_turn_replaces_later_turns_on_the_device() -> None:
    setup = Setup(swapped_out(2), Holder(1), Holder(3), Holder(4), Holder(5), Holder(6, 3))
    # One block is free, for growth. Four are needed, so the two last ones are swapped out.
    assert setup.step() == ([6, 5], [])
    setup.complete()
    assert setup.step() == ([], [2])


@given(
    holders=st.lists(st.builds(Holder, st.integers(0, 5), st.integers(1, 6), st.booleans()), max_size=8),
    spare=st.integers(0, 8),
    device=st.integers(12, 60),
)
def test_swaps_follow_the_order_of_turns(holders: list[Holder], spare: int, device: int) -> None:
    """A swap-out is for blocks to keep free or for a strictly sooner turn, and takes the latest turns. Swap-ins take
    the soonest turns of the CPU tier, and pass those only that fit when the swap-outs end."""
    if sum(holder.blocks for holder in holders) > device:
        return
    setup = Setup(*holders, device=device, host=100)
    setup.arrive(prompt=max(1, 4 * spare))
    turns = setup.ordering.numbers
    on_device = {r.id for r in setup.requests if not setup.kv.tiers.cpu_footprint(r)}
    in_cpu_tier = {r.id for r in setup.requests} - on_device
    short = 1 + max(1, spare) - setup.kv.available
    out, back = setup.step()
    left = sorted(on_device - {move.request.id for move in setup.moves}, key=turns.__getitem__)
    waiting = sorted(in_cpu_tier - {move.request.id for move in setup.moves}, key=turns.__getitem__)
    assert out == sorted(out, reverse=True)
    assert back == sorted(back)
    if out and left:
        assert turns[left[-1]] <= out[-1]
    leaving = [move for move in setup.moves if move.direction is OUT]
    if back and waiting and not out:
        assert back[-1] <= turns[waiting[0]]
    passed = [setup.requests[number] for number in waiting if back and turns[number] < back[-1]]
    soon = setup.kv.available + sum(len(move.source) for move in leaving)
    assert sum(map(setup.kv.tiers.cpu_footprint, passed)) <= soon
    for turn, move in zip(out, leaving, strict=True):
        is_for_spare = short > 0
        short -= len(move.source)
        assert is_for_spare or any(turns[number] < turn for number in in_cpu_tier)
    if on_device and all(turns[number] > min(map(turns.__getitem__, on_device)) for number in in_cpu_tier):
        assert left, "the request that runs next must stay"


@given(
    holders=st.lists(st.builds(Holder, st.integers(0, 30), st.integers(1, 4), st.booleans()), max_size=9),
    slots=st.integers(1, 6),
)
def test_only_requests_that_can_run_soon_are_swapped_in(holders: list[Holder], slots: int) -> None:
    """Others would have to leave again before they run. Of the others, as many are swapped in as before."""
    (out, back), (all_out, all_back) = (
        Setup(*holders, eviction=eviction).step() for eviction in (DisplacingSwap(COST, slots=slots), None)
    )
    soon = sorted(holder.turn for holder in holders)[: slots + slots // 4 + 1]
    assert back == [turn for turn in all_back if turn in soon][: len(back)]
    assert len(back) <= len(soon)
    assert out == all_out[: len(out)]


def test_moves_are_limited_to_two_steps_of_the_link() -> None:
    """That is ten blocks here: the third move starts while two of the ten remain."""
    slow = replace(COST, block=0.2)
    setup = Setup(*(Holder(turn) for turn in range(10)), device=40, cost=slow)
    setup.arrive(prompt=120)
    assert setup.step() == ([9, 8, 7], [])
    setup.arrive(prompt=120)
    assert setup.step() == ([], []), "the link is busy for more than two steps"
    setup.complete()
    setup.arrive(prompt=120)
    assert setup.step() == ([6, 5, 4], [])
    back = Setup(Holder(0), *(swapped_out(turn) for turn in range(1, 9)), device=40, cost=slow)
    assert back.step() == ([], [1, 2, 3])


def test_one_request_moves_at_a_time_if_the_link_is_slower_than_steps() -> None:
    slow = replace(COST, block=1.9, prefill_token=10.0)
    setup = Setup(*(Holder(turn) for turn in range(5)), cost=slow)
    setup.arrive(prompt=60)
    assert setup.step() == ([4], [])
    setup.arrive(prompt=60)
    assert setup.step() == ([], [])


def test_cheap_transfers_are_left_to_the_step_that_needs_them() -> None:
    free = Setup(*(Holder(turn) for turn in range(5)), cost=replace(COST, block=0.0))
    assert free.step() == ([], [])
    assert not free.eviction.returns_overlapped(make(0, 4, 4))
    costly = Setup(*(Holder(turn) for turn in range(5)))
    assert costly.step() == ([4], [])
    costly.now += 1e6
    costly.step()
    assert costly.eviction.returns_overlapped(make(0, 4, 4)), (
        "steps that are long because of blocking moves do not make transfers cheap"
    )


def test_kv_that_is_cheaper_to_recompute_is_moved_only_with_overlapped_moves() -> None:
    """A blocking move would take longer than recomputation, so there it is dropped."""
    cheap = replace(COST, prefill_token=0.04)  # 16 tokens: 0.64 s against 0.8 s
    setup = Setup(*(Holder(turn) for turn in range(5)), cost=cheap)
    assert setup.step() == ([4], [])
    victims = setup.eviction.victims(4, setup.requests[3:4], setup.kv, setup.now, None)
    assert [victim.how for victim in victims] == [Preemption.DROP]


@pytest.mark.parametrize("blocks", [4, 19, 20])
def test_an_empty_device_swaps_in_the_soonest_turn(blocks: int) -> None:
    """It may use the blocks that are otherwise kept free."""
    setup = Setup(swapped_out(7, 6), swapped_out(5, blocks), swapped_out(6, 6))
    out, back = setup.step()
    assert (out, back[0]) == ([], 5)
    assert (len(back) == 1) == (blocks > 4)


def test_kept_blocks_are_not_used_while_a_swap_in_is_in_transit() -> None:
    setup = Setup(swapped_out(5, 10), swapped_out(6, 10))
    assert setup.step() == ([], [5])
    assert setup.step() == ([], [])
    setup.complete()
    assert setup.step() == ([], [])


@pytest.mark.parametrize("host", [0, 3])
def test_swap_outs_to_a_full_cpu_tier_are_infeasible(host: int) -> None:
    """The policy may ask for more: the scheduler moves what fits, and the rest stays on the device."""
    setup = Setup(*(Holder(turn) for turn in range(5)), host=host)
    idle = list(setup.requests)
    out, back = setup.eviction.ahead(idle, setup.ordering, setup.kv, 0.0)
    assert back == []
    assert not [request for request in out if setup.kv.tiers.can_move_out(request)]
