"""Both service classes under every recipe: all finish, best effort makes way for real time, and not for ever."""

from __future__ import annotations

from itertools import count
from random import Random
from statistics import fmean

import pytest

from skipjoin.core.events import Finished, Token
from skipjoin.core.request import Request, Target
from skipjoin.policies.cost import LinearCost
from support.load import load, make
from support.recipes import RECIPES
from support.watch import Run, Stepper, World, run

# A static batch runs to its end, and round robin serves both classes alike.
BANDED = sorted(set(RECIPES) - {"static", "round-robin"})
PACKING = sorted(name for name in RECIPES if name.startswith("bros"))


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize(("depth", "overlap"), [(1, False), (2, True)])
def test_requests_of_both_classes_finish_with_all_their_tokens(recipe: str, depth: int, overlap: bool) -> None:
    requests = load(3, 60, best_effort=0.5)
    run(World(recipe, depth=depth, overlap=overlap), requests)
    assert all(len(request.output) == request.max_tokens for request in requests)


def beside(flood: list[Request], recipe: str) -> Run:
    """A run of the same real-time requests, beside a flood."""
    chat = load(5, 40, rate=5.0, outputs=(1, 10))
    return run(World(recipe, device_blocks=80), sorted([*chat, *flood], key=lambda request: request.arrival))


def flood_of(size: int, *, best_effort: bool = True) -> list[Request]:
    return [make(1000 + number, 30, 30, best_effort=best_effort) for number in range(size)]


def mean_time(done: Run) -> float:
    """Mean seconds from arrival to end of the real-time requests."""
    return fmean(
        event.now - event.request.arrival
        for event in done.events
        if isinstance(event, Finished) and event.request.id < 1000
    )


@pytest.mark.parametrize("recipe", sorted(set(BANDED) - set(PACKING)))
def test_real_time_requests_notice_little_of_a_best_effort_flood(recipe: str) -> None:
    """Steps get longer, and that is all. Without classes, first come, first served, the flood costs far more."""
    floods = flood_of(0), flood_of(60), flood_of(60, best_effort=False)
    alone, disturbed, equal = (mean_time(beside(flood, recipe)) for flood in floods)
    assert alone <= disturbed < 2.5 * alone
    assert disturbed < (0.5 if recipe in ("fcfs", "orca", "sarathi") else 1.05) * equal


@pytest.mark.parametrize("recipe", PACKING)
def test_packing_keeps_first_tokens_in_time_beside_a_flood(recipe: str) -> None:
    done = beside(flood_of(60), recipe)
    first = {}
    for event in done.events:
        if isinstance(event, Token) and event.request.id < 1000:
            first.setdefault(event.request, event.now)
    late = [request for request, when in first.items() if when > request.arrival + 0.4]
    assert len(late) <= 0.05 * len(first)


# The times of llm-d-batch-gateway#491: 82 ms to a first token at P99, and 13 ms for each after it, without batches.
BURST = LinearCost(floor=0.011, prefill_token=2e-5, decode=2e-5)
OBJECTIVES = Target(ttft_s=0.15, tpot_s=0.03)


def in_burst(recipe: str, batch: list[Request]) -> tuple[float, Run]:
    """The share of first tokens in time of chat at 15 requests per second beside a batch, and the run until the end."""
    draw, now, chat = Random(5), 0.0, []
    for number in range(24):
        now += draw.expovariate(15)
        chat.append(make(number, 512, 16, arrival=now, target=OBJECTIVES))
    world = World(recipe, device_blocks=1600, block_size=16, max_seqs=32, max_tokens=2048, cost=BURST)
    done = run(world, [*batch, *chat])
    first: dict[Request, float] = {}
    for event in done.events:
        if isinstance(event, Token):
            first.setdefault(event.request, event.now)
    return fmean(first[one] - one.arrival <= OBJECTIVES.ttft_s for one in chat), done


def batch_of(*, best_effort: bool) -> list[Request]:
    return [make(1000 + number, 512, 40, best_effort=best_effort) for number in range(100)]


@pytest.mark.parametrize("recipe", ["fcfs", "fastserve", "bros"])
def test_a_burst_keeps_its_objectives_beside_a_batch_that_goes_on(recipe: str) -> None:
    """The load of llm-d-batch-gateway#491, for two seconds (users.md 4.4, 9)."""
    alone, _ = in_burst(recipe, [])
    beside, done = in_burst(recipe, batch_of(best_effort=True))
    assert beside >= alone - 0.02
    last = max(one.arrival for one in done.requests)
    ends = [one.now < last for one in done.events if isinstance(one, Finished) and one.request.is_best_effort]
    assert 0 < sum(ends) < len(ends)


def test_a_burst_beside_a_batch_of_the_same_class_does_not() -> None:
    assert in_burst("fcfs", batch_of(best_effort=False))[0] < 0.5


@pytest.mark.parametrize("recipe", BANDED)
def test_best_effort_requests_end_while_real_time_ones_never_stop(recipe: str) -> None:
    """One after the other, each in about the time that it takes as a real-time request."""
    stepper = Stepper(World(recipe, device_blocks=80, best_effort_wait_s=1.0).core())
    batch = [make(number, 20, 20, best_effort=True) for number in range(3)]
    stepper.add(*batch)
    numbers = count(len(batch))
    ends = []
    while len(ends) < len(batch):
        while sum(not request.is_best_effort for request in stepper.core.requests.values()) < 8:
            stepper.add(make(next(numbers), 20, 20, arrival=stepper.now))
        if stepper.start() is not None:
            stepper.finish()
        ends += [stepper.now for one in batch if one.finish_reason is not None][len(ends) :]
        assert stepper.now < 60, f"{len(ends)} have ended"
