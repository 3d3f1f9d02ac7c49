from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

import pytest

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.kv.reservations import Account
from skipjoin.core.policy import Ordering
from skipjoin.policies.fairness import Fair
from skipjoin.policies.mlfq import SkipJoinMlfq
from skipjoin.policies.ordering import Fcfs, FixedKey, Prioritized
from skipjoin.policies.proactive_swap import ProactiveSwap
from support.load import make
from support.policies import COST
from support.watch import Stepper, World

DEPTHS = pytest.mark.parametrize(("depth", "overlap"), [(1, False), (2, False), (2, True)])


def test_lower_numbers_run_first_and_equal_numbers_by_arrival() -> None:
    ordering = Prioritized(Fcfs)
    requests = [make(number, arrival=number, priority=p) for number, p in enumerate([5, 0, 5, -(2**63), 0])]
    for request in requests:
        ordering.on_arrived(request, request.arrival)
    assert [request.id for request in ordering.ranked(9.0)] == [3, 1, 4, 0, 2]


def test_a_lower_number_outranks_regardless_of_length() -> None:
    ordering = Prioritized(lambda: SkipJoinMlfq(COST))
    long, short = make(0, 1000, priority=0), make(1, 1, priority=1)
    for request in (short, long):
        ordering.on_arrived(request, 0.0)
    assert ordering.outranks(long, short)
    assert not ordering.outranks(short, long)


def order(ordering: Ordering, now: float) -> list[int]:
    return [request.id for request in ordering.ranked(now)]


def test_a_lifted_request_that_does_not_run_does_not_block_the_next_one() -> None:
    ordering = Prioritized(lambda: FixedKey(lambda request: len(request.prompt)), best_effort_wait_s=10.0)
    long, short, chat = make(0, 50, best_effort=True), make(1, 4, best_effort=True), make(2, 8)
    for request in (long, short, chat):
        ordering.on_arrived(request, 0.0)
    assert order(ordering, 20.0) == [2, 0, 1]
    assert order(ordering, 30.0) == [2, 0, 1]
    assert order(ordering, 30.1) == [1, 2, 0]


@pytest.mark.parametrize("own", [-5, 0, 3, 9])
def test_a_lifted_request_has_the_best_priority_of_real_time_requests_whatever_its_own_is(own: int) -> None:
    ordering = Prioritized(Fcfs, best_effort_wait_s=10.0)
    old = make(0, priority=own, best_effort=True)
    chats = [make(number, arrival=5.0, priority=priority) for number, priority in ((1, 7), (2, 3), (3, -2))]
    ordering.on_arrived(old, 0.0)
    assert order(ordering, 11.0) == [0]  # real-time, without others
    for chat, expected in zip(chats, ([0, 1], [0, 2, 1], [0, 3, 2, 1]), strict=True):
        ordering.on_arrived(chat, 12.0)
        assert order(ordering, 12.0) == expected
        assert old.progress.band == chat.progress.band
    ordering.on_finished(chats[2], 13.0)
    assert order(ordering, 13.0) == [0, 2, 1]
    assert old.progress.band == chats[1].progress.band


def test_without_real_time_requests_the_oldest_precedes_better_priorities() -> None:
    ordering = Prioritized(Fcfs, best_effort_wait_s=10.0)
    old, new = make(0, priority=5, best_effort=True), make(1, arrival=9.0, best_effort=True)
    for request in (old, new):
        ordering.on_arrived(request, request.arrival)
    assert order(ordering, 9.9) == [1, 0]
    assert order(ordering, 10.0) == [0, 1]


class Begun(Fcfs):
    """An ordering that counts the steps it is notified of, and funds an account named by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def on_begin(self, now: float, kv: KVAccounts) -> Iterable[tuple[Account, int]]:
        self.steps += 1
        return [(Account(f"step {self.steps}"), kv.device_total)]


WRAPPERS: dict[str, Callable[[Callable[[], Ordering]], Ordering]] = {
    "bands": Prioritized,
    "fair": lambda make: Fair(make, lead=100, output_weight=2.0),
    "fair bands": lambda make: Prioritized(lambda: Fair(make, lead=100, output_weight=2.0)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_inner_orderings_are_notified_of_every_step(wrap: Callable[[Callable[[], Ordering]], Ordering]) -> None:
    made: list[Begun] = []

    def build() -> Begun:
        made.append(Begun())
        return made[-1]

    ordering = wrap(build)
    for number in range(4):
        ordering.on_arrived(make(number, priority=number % 2, client=f"client {number // 2}"), 0.0)
    for step in (1, 2):
        funded = list(ordering.on_begin(float(step), KVLedger(7, 0, 4)))
        assert [inner.steps for inner in made] == [step] * len(made)
        assert [(account.name, blocks) for account, blocks in funded] == [(f"step {step}", 7)] * len(made)
    assert len(made) > 1


def test_empty_bands_are_removed() -> None:
    made = count()

    def build() -> Fcfs:
        next(made)
        return Fcfs()

    ordering = Prioritized(build)
    for number in range(1000):
        request = make(number, priority=number)
        ordering.on_arrived(request, 0.0)
        ordering.on_finished(request, 0.0)
    assert list(ordering.ranked(0.0)) == []
    assert (ordering._bands, ordering._sizes, ordering._sorted) == ({}, {}, [])
    assert next(made) == 1000


def test_an_emptied_band_can_be_used_again() -> None:
    ordering = Prioritized(Fcfs)
    first, second = make(0, priority=3), make(1, priority=3)
    ordering.on_arrived(first, 0.0)
    ordering.on_finished(first, 0.0)
    ordering.on_arrived(second, 1.0)
    assert list(ordering.ranked(1.0)) == [second]


def test_promotions_in_lower_bands_happen_before_the_order_is_read() -> None:
    """The scheduler compares ranks while it reads, so they may not change halfway."""
    ordering = Prioritized(lambda: SkipJoinMlfq(COST, starvation_s=1.0))
    urgent, fresh, starving = make(0, 1, priority=0), make(1, 1, priority=1), make(2, 2000, priority=1)
    for request in (urgent, starving):
        ordering.on_arrived(request, 0.0)
    ordering.on_arrived(fresh, 0.5)
    iterator = ordering.ranked(1.0)
    assert next(iterator) is urgent
    before = {request: ordering.rank(request) for request in (fresh, starving)}
    assert list(iterator) == [fresh, starving]
    assert {request: ordering.rank(request) for request in (fresh, starving)} == before


def settled(world: World, *low: tuple[int, int]) -> Stepper:
    """Return a stepper with a full pipeline of decodes: requests of (prompt, max_tokens) at priority 1."""
    stepper = Stepper(world.core())
    stepper.add(*(make(number, prompt, most, priority=1) for number, (prompt, most) in enumerate(low)))
    for _ in range(4):
        stepper.fill()
        stepper.finish()
    return stepper


def swaps_ahead(world: World) -> bool:
    return isinstance(world.policies().eviction, ProactiveSwap)


def plans_until(stepper: Stepper, number: int, most: int = 10) -> int:
    for plans in range(1, most + 1):
        while (plan := stepper.start()) is None:
            stepper.finish()
        if any(piece.request.id == number for piece in plan.slices):
            return plans
    raise AssertionError(f"request {number} does not run within {most} plans")


ALL = ("orca", "fcfs", "sarathi", "fastserve", "srpt", "econoserve")
# By resource: the recipes, the world, running requests of (prompt, max_tokens), and the urgent request.
RESOURCES: dict[str, tuple[tuple[str, ...], dict[str, int], tuple[tuple[int, int], ...], tuple[int, int]]] = {
    "slot": (ALL, {"max_seqs": 2}, ((4, 30),) * 3, (20, 5)),
    "token budget": (ALL, {"max_tokens": 3}, ((1, 20),) * 3, (3, 5)),
    "memory": ((*ALL[1:], "econoserve-d"), {"device_blocks": 10}, ((12, 24),) * 2, (30, 5)),
    # The share of blocks that is kept for growth must not exclude a request that may preempt all others.
    "device": (
        ("fcfs", "fastserve", "econoserve"),
        {"device_blocks": 200, "max_tokens": 1000},
        ((12, 24),) * 2,
        (796, 4),
    ),
}


@DEPTHS
@pytest.mark.parametrize(
    ("resource", "recipe"), [(name, recipe) for name, row in RESOURCES.items() for recipe in row[0]]
)
def test_priority_takes_what_lower_ones_hold(resource: str, recipe: str, depth: int, overlap: bool) -> None:
    """At depth 2 the victims may be in flight; they are preempted after their plans finish. A policy that swaps ahead
    moves them out asynchronously and admits the incoming request afterwards."""
    _, settings, low, urgent = RESOURCES[resource]
    world = World(recipe, depth, overlap, **settings)
    stepper = settled(world, *low)
    stepper.add(make(9, *urgent, priority=0))
    is_memory = resource in ("memory", "device")
    assert plans_until(stepper, 9) <= (depth + (3 if swaps_ahead(world) else 0) if is_memory else 1)
    stepper.drain()


@pytest.mark.parametrize("recipe", ALL)
def test_a_lower_priority_waits_while_a_higher_one_fills_the_slots(recipe: str) -> None:
    stepper = Stepper(World(recipe, max_seqs=2).core())
    stepper.add(make(0, 4, 5, priority=1), make(1, 4, 5, priority=0), make(2, 4, 5, priority=0))
    for _ in range(5):
        assert {piece.request.id for piece in stepper.step().slices} == {1, 2}
    assert {piece.request.id for piece in stepper.step().slices} == {0}
    stepper.drain()
