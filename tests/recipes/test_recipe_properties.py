"""What every recipe keeps, under every pressure and pipeline, on the virtual clock.

`WatchedCore` proves after every call that no block leaks or doubles on either tier, and of every plan that it has an
effect, that nobody idles while requests wait, and that victims leave for good reason only.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipjoin.core.policy import Promise
from skipjoin.core.request import FinishReason, Request
from skipjoin.policies.pressure import Recompute, Swap
from skipjoin.recipes import RECIPES, Settings, build
from support.load import load, make
from support.policies import COST, Chaos
from support.watch import Run, Stepper, World, run

PRESSURES = {"recompute": Recompute, "swap": Swap, "chaos": lambda: Chaos(1)}
PIPELINES = [(1, False), (2, False), (2, True)]
WORLDS = [
    pytest.param(World(recipe, depth, overlap, PRESSURES[name]), id=f"{recipe}-{depth}-{overlap}-{name}")
    for recipe, (depth, overlap), name in product(sorted(RECIPES), PIPELINES, sorted(PRESSURES))
]
every_world = pytest.mark.parametrize("world", WORLDS)
every_seed = pytest.mark.parametrize("seed", [0, 1])


@cache
def served(world: World, seed: int) -> Run:
    """The world's run of a load: even seeds have one priority, odd ones three."""
    return run(world, drawn(seed))


def drawn(seed: int) -> list[Request]:
    return load(seed, 20, priorities=(-1, 0, 7) if seed % 2 else (0,))


@every_world
@every_seed
def test_all_requests_finish_with_exactly_max_tokens(world: World, seed: int) -> None:
    for request in served(world, seed).requests:
        assert request.finish_reason is FinishReason.LENGTH
        assert request.output == list(range(len(request.prompt), request.limit))


@every_world
@every_seed
def test_newcomers_evict_nobody_more_often_than_the_limit(world: World, seed: int) -> None:
    evictions = served(world, seed).core.newcomer_evictions
    assert max(evictions.values(), default=0) <= world.eviction_limit


@every_world
@every_seed
def test_moves_alone_are_not_planned_for_ever(world: World, seed: int) -> None:
    """Only proactive moves may stand in a plan of their own, while all that could run is in flight."""
    alone = [not slices for _, (_, slices, _, _) in served(world, seed).trace]
    if world.pressure is not PRESSURES["chaos"] or world.depth == 1:
        assert not any(alone)
    assert not any(all(alone[at : at + 3]) for at in range(len(alone) - 2))


@every_world
def test_the_same_seed_gives_the_same_trace(world: World) -> None:
    one, other = served(world, 1), run(world, drawn(1))
    assert one.trace == other.trace
    assert [type(event) for event in one.events] == [type(event) for event in other.events]
    assert one.end == other.end


@every_world
def test_a_later_arrival_never_changes_the_past(world: World) -> None:
    when = 0.4
    without = served(world, 0).trace
    with_more = run(world, [*drawn(0), make(99, 50, 9, arrival=when, priority=-5)]).trace
    past = [entry for entry in without if entry[0] < when]
    assert len(past) > 5
    assert with_more[: len(past)] == past
    assert with_more != without


@given(
    recipe=st.sampled_from(sorted(RECIPES)),
    pipeline=st.sampled_from([*PIPELINES, (3, False), (3, True)]),
    pressure=st.sampled_from(sorted(PRESSURES)),
    seed=st.integers(0, 10**6),
    device_blocks=st.integers(25, 70),  # the largest request of the load has 100 tokens, 25 blocks
    host_blocks=st.integers(0, 80),
    max_seqs=st.integers(1, 10),
    max_tokens=st.integers(1, 80),
    limit=st.integers(0, 5),
    starvation_s=st.sampled_from([0.05, 0.3, 100.0]),
)
@settings(max_examples=50)
def test_any_world_serves_any_load(
    *,
    recipe: str,
    pipeline: tuple[int, bool],
    pressure: str,
    seed: int,
    device_blocks: int,
    host_blocks: int,
    max_seqs: int,
    max_tokens: int,
    limit: int,
    starvation_s: float,
) -> None:
    world = World(
        recipe,
        *pipeline,
        PRESSURES[pressure],
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        max_seqs=max_seqs,
        max_tokens=max_tokens,
        eviction_limit=limit,
        starvation_s=starvation_s,
    )
    done = run(world, load(seed, 12, priorities=(0, seed % 3)))
    assert all(len(request.output) == request.max_tokens for request in done.requests)
    assert max(done.core.newcomer_evictions.values(), default=0) <= limit


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("seed", range(3))
def test_no_seat_stays_empty_while_somebody_could_take_it(recipe: str, seed: int) -> None:
    """Work conservation, seat by seat: while the step has seats and tokens left, every holder of KV runs unless
    it lacks a block, and the first in the queue is admitted unless it does not fit."""
    world = World(recipe, device_blocks=60)
    policies = world.policies()
    stepper = Stepper(world.core(policies))
    core, kv = stepper.core, stepper.core.kv
    requests = load(seed, 30)
    for _ in range(2000):
        while requests and requests[0].arrival <= stepper.now:
            stepper.add(requests.pop(0))
        evictions = sum(request.evictions for request in core.requests.values())
        plan = stepper.start()
        if plan is None:
            assert not core.requests
            if not requests:
                break
            stepper.now += 0.01
            continue
        tokens = world.max_tokens - sum(piece.tokens for piece in plan.slices)
        evicted = evictions != sum(request.evictions for request in core.requests.values())
        if len(plan.slices) < world.max_seqs and tokens > 0 and not evicted:
            idle = [request for request in core.requests.values() if not request.in_flight]
            short = [r for r in idle if kv.holding(r) and kv.shortfall(r, r.known) > 0]
            assert [r for r in idle if kv.holding(r)] == short
            queue = sorted((r for r in idle if not kv.holding(r)), key=policies.ordering.rank)
            if queue and not short and queue[0].pending <= tokens:
                promise = policies.reservation.admit(queue[0], kv)
                if isinstance(promise, Promise):
                    assert max(promise.now, promise.blocks) + promise.spare > kv.available
        stepper.finish()
    stepper.drain()
    assert not requests


def test_pressure_on_memory_is_real_in_these_worlds() -> None:
    """Otherwise the properties above would hold for want of trying."""
    for recipe in sorted(RECIPES):
        world = World(recipe)
        done = run(world, load(0))
        evictions = sum(request.evictions for request in done.requests)
        assert evictions > 0 if recipe != "orca" else evictions == 0
        swapped = run(World(recipe, pressure=Swap), load(0))
        moves = sum(bool(before) for _, (_, _, before, _) in swapped.trace)
        assert moves > 0 if recipe != "orca" else moves == 0
    chaotic = run(World("fastserve", pressure=PRESSURES["chaos"]), load(0))
    assert sum(bool(beside) for _, (_, _, _, beside) in chaotic.trace) > 5


def test_whole_maximum_never_runs_short() -> None:
    for seed in range(5):
        done = run(World("orca"), load(seed, 30))
        assert all(request.evictions == 0 for request in done.requests)


def test_an_unknown_recipe_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ValueError, match="fastserve, fcfs"):
        build("lifo", Settings(COST))


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_each_build_has_policies_of_its_own(recipe: str) -> None:
    settings_ = Settings(COST)
    assert build(recipe, settings_).ordering is not build(recipe, settings_).ordering
