"""Two overlapping plans on one device: a request's next step is planned before its token is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.events import Finished
from skipjoin.core.request import FinishReason, Request
from support.load import load, make
from support.policies import EVICTIONS, SOME_SYSTEMS
from support.watch import Stepper, World, run
from support.worlds import worlds

STOP = 0


def stopping(request: Request, position: int) -> int:
    return (request.id * 7 + position * 5) % 9


def stopping_load(seed: int) -> list[Request]:
    return load(seed, 20, stop_tokens=frozenset({STOP}))


def until_stop(request: Request) -> list[int]:
    """Return the tokens that the request must generate, from its definition alone."""
    tokens: list[int] = []
    for position in range(len(request.prompt), request.max_total_tokens):
        tokens.append(stopping(request, position))
        if tokens[-1] == STOP:
            break
    return tokens


@pytest.mark.parametrize(
    "world", worlds(SOME_SYSTEMS, [(1, False, 1), (2, False, 1), (2, True, 1), (4, False, 1)], parts=2)
)
def test_output_does_not_depend_on_depth(world: World) -> None:
    done = run(world, stopping_load(2), sample=stopping)
    assert done.output == {request.id: until_stop(request) for request in done.requests}


@given(seed=st.integers(0, 10**6), blocks=st.integers(26, 80), slots=st.integers(1, 8))
def test_output_does_not_depend_on_depth_for_any_load(seed: int, blocks: int, slots: int) -> None:
    world = World("fastserve", 2, True, EVICTIONS["proactive"], device_blocks=blocks, max_seqs=slots)
    done = run(world, stopping_load(seed), sample=stopping)
    assert done.output == {request.id: until_stop(request) for request in done.requests}


def test_more_than_two_plans_do_not_overlap() -> None:
    """A slice could await a token of an older plan than those whose tokens the executor keeps."""
    with pytest.raises(ValueError, match="depth must be at most 2 with overlap, got 3"):
        World("fcfs", 3, True).core()


def test_a_slice_awaits_a_token_only_if_the_plan_before_it_samples_it() -> None:
    """`WatchedCore` checks this for every plan; here is an example."""
    stepper = Stepper(World("sarathi", 2, True, max_tokens=10).core())
    stepper.add(make(0, 15, 3))
    plans = [stepper.start(), stepper.start()]
    for _ in range(2):
        stepper.finish()
        plans.append(stepper.start())
    pieces = [plan.slices[0] for plan in plans if plan is not None]
    assert [(p.start, p.tokens, p.samples, p.awaits) for p in pieces] == [
        (0, 10, False, False),
        (10, 5, True, False),
        (15, 1, True, True),
        (16, 1, True, True),
    ]
    assert stepper.finish() is not None
    assert stepper.start() is None, "all tokens that it may generate are known or being sampled"
    stepper.drain()


def test_a_token_sampled_after_the_stop_token_is_discarded() -> None:
    stepper = Stepper(World("fcfs", 2, True).core(), sample=lambda request, position: STOP)
    stepper.add(make(0, 4, 9, stop_tokens=frozenset({STOP})))
    first, extra = stepper.start(), stepper.start()
    assert first is not None
    assert extra.slices[0].awaits
    stepper.finish()
    assert stepper.tokens == {0: [STOP]}
    assert stepper.core.kv.device_free < stepper.core.kv.device_total, "the extra slice still writes there"
    assert stepper.start() is None
    stepper.finish()
    stepper.core.assert_all_free()
    assert stepper.tokens == {0: [STOP]}
    assert [e.reason for e in stepper.events if isinstance(e, Finished)] == [FinishReason.STOP]


def test_no_slice_is_planned_beyond_max_tokens() -> None:
    stepper = Stepper(World("fcfs", 2, True).core())
    stepper.add(make(0, 4, 2))
    plans = [stepper.start(), stepper.start(), stepper.start()]
    assert [plan is not None for plan in plans] == [True, True, False]
    stepper.finish()
    assert stepper.start() is None
    stepper.drain()


def test_without_overlap_a_request_in_flight_is_not_planned_again() -> None:
    stepper = Stepper(World("fcfs", 2, False, max_seqs=1).core())
    stepper.add(make(0, 4, 5), make(1, 4, 5))
    assert [plan.slices[0].request.id for plan in (stepper.start(), stepper.start()) if plan] == [0, 1]
    for number in (0, 1, 0, 1):
        stepper.finish()
        plan = stepper.start()
        assert [piece.request.id for piece in plan.slices] == [number]
    stepper.drain()


@pytest.mark.parametrize("recipe", ["fcfs", "fastserve"])
def test_a_request_that_needs_blocks_gets_them_while_all_others_are_in_flight(recipe: str) -> None:
    """A request in every plan can never be evicted, so it is left out of one when its blocks are needed."""
    stepper = Stepper(World(recipe, 2, True, device_blocks=10).core())
    stepper.add(make(0, 20, 19), make(1, 12, 19))
    waits = 0
    while 0 in stepper.core.requests:
        while (plan := stepper.start()) is not None:
            ran = {piece.request.id for piece in plan.slices}
            waits = 0 if 0 in ran or 1 not in ran else waits + 1
            assert recipe != "fcfs" or waits < 1, "the second request runs where the first cannot"
        stepper.finish()
    stepper.drain()
