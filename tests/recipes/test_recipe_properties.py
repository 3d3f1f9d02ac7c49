"""Properties of all recipes, under every eviction policy and pipeline, on the virtual clock.

`WatchedCore` checks after every call that no block leaks or has two owners on either tier. Of every plan it checks
that it has an effect, that a request runs if any waits, that evictions have a reason, and that steps bring tokens.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.decide.place import Blocked, Placer
from skipjoin.core.events import Finished, Moved, MoveFailed, Planned, Preempted, Preemption
from skipjoin.core.forecast import Forecast
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy import AdmissionPolicy, Allocation, Deferral, EvictionPolicy
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import Direction, Move, Slice
from skipjoin.options import ConfigError
from skipjoin.policies.batching import TargetForward
from skipjoin.policies.best_effort import LimitedBestEffort
from skipjoin.policies.eviction import Share
from skipjoin.recipes import Forecasts, Settings, find
from support.load import load, make
from support.policies import COST, EVICTIONS, SYSTEMS, Patchwork
from support.recipes import RECIPES, build
from support.watch import Run, Stepper, World, run
from support.worlds import PIPELINES, checkered, combinations, each_recipe, exhaustive, one_in, world_of, worlds

every_world = pytest.mark.parametrize("world", worlds(SYSTEMS, PIPELINES, parts=4))
# These reserve their maximum or expected need, so that they evict only where a policy looks ahead.
ROOMY = ("static", "orca", "orca-exact", "srtf")
# Plans in flight change the reasons for their few evictions, so that these are counted with one plan in flight.
RARELY_EVICT = ("orca", "orca-exact", "srtf", "synccoupled")
# Eviction policies that `worlds` does not have.
OTHERS: dict[str | None, Callable[[int], EvictionPolicy]] = {"patchwork": Patchwork, "share": lambda seed: Share(COST)}


def drawn() -> list[Request]:
    return load(1, 16, priorities=(-1, 0, 7))


@cache
def served(world: World) -> Run:
    return run(world, drawn())


def assert_served(done: Run) -> None:
    """Assert that each request got all of its tokens, once and in order."""
    for request in done.requests:
        assert request.progress.finish_reason is FinishReason.LENGTH
        assert request.progress.output == list(range(len(request.prompt), request.max_total_tokens))


def assert_tokens_between_evictions(done: Run) -> None:
    """Assert that a running request is not evicted for incoming requests more often than it generated tokens.

    Of two requests that evict each other, the one that ran in between has generated a token.
    """
    evictions = done.core.incoming_evictions
    count: Counter[int] = Counter()
    for eviction in evictions:
        count[eviction.victim] += 1
        assert count[eviction.victim] <= eviction.tokens[eviction.victim]
    for at, later in enumerate(evictions):
        for earlier in evictions[:at]:
            if later.victim in earlier.incoming and earlier.victim in later.incoming:
                assert later.tokens[later.victim] > earlier.tokens[later.victim]


@pytest.mark.parametrize(
    ("recipe", "params"),
    [
        *((name, ()) for name in ("adaptive", "bros", "econoserve", "orca-exact", "synccoupled")),
        ("econoserve", (("admission", "gated"),)),
        ("econoserve", (("parking", False),)),
    ],
)
def test_admission_policies_may_be_asked_about_any_request(
    recipe: str, params: tuple[tuple[str, str | bool], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plan changes, because `AdmissionPolicy.reserve` is pure."""
    world = World(recipe, params=params, device_blocks=30)
    before = run(world, load(3, 16, rate=100)).trace
    core, ask = world.core(), Placer.ask
    answers = Counter[type]()

    def asked_about_all(self: Placer, request: Request, target: int) -> Allocation | Blocked:
        for other in list(core.requests.values()):
            answer = core.scheduler.policies.admission.reserve(other, other.progress.known, core.scheduler.kv)
            answers[type(answer)] += other is not request
        return ask(self, request, target)

    monkeypatch.setattr(Placer, "ask", asked_about_all)
    assert run(world, load(3, 16, rate=100), core=core).trace == before
    assert answers[Allocation] > 20


def test_unmarked_worlds_cover_any_two_values_of_two_axes() -> None:
    axes = [SYSTEMS, PIPELINES, sorted(EVICTIONS)]
    chosen = [values for values, marks in combinations(*axes) if not marks]
    for one, other in itertools.combinations(range(len(axes)), 2):
        assert {(values[one], values[other]) for values in chosen} == set(product(axes[one], axes[other]))
    assert len(chosen) <= len(SYSTEMS) * len(EVICTIONS)


@every_world
def test_all_requests_finish_with_exactly_max_tokens(world: World) -> None:
    assert_served(served(world))


@every_world
def test_a_request_generates_a_token_between_evictions_for_incoming_requests(world: World) -> None:
    assert_tokens_between_evictions(served(world))


@every_world
def test_plans_without_slices_occur_only_during_moves(world: World) -> None:
    """Moves need few such plans on a link as fast as this one, and none if all moves are blocking."""
    done = served(world)
    alone = [not slices for _, (_, slices, _, _) in done.trace]
    if world.eviction is EVICTIONS["proactive"]:
        assert sum(alone) < len(alone) / 10
    elif world.eviction is not EVICTIONS["chaos"]:
        assert not any(alone)
    transit: set[int] = set()
    for event in done.events:
        match event:
            case Planned(plan=plan):
                transit.update(move.request.id for move in (*plan.blocking, *plan.overlapped))
                assert plan.slices or transit
            case Moved(move=move):
                transit.remove(move.request.id)
            case _:
                pass
    assert not transit


class LateRequestRunsError(Exception):
    """The request that arrived last runs, so that later plans may differ."""


@every_world
def test_a_later_arrival_changes_no_earlier_plan(world: World) -> None:
    when, late = 0.4, 99
    core = world.core()

    def stop(piece: Slice) -> bool:
        if piece.request.id == late:
            raise LateRequestRunsError
        return False

    with pytest.raises(LateRequestRunsError):
        run(world, [*drawn(), make(late, 50, 9, arrival=when, priority=-5)], core=core, fails_slice=stop)
    past = [entry for entry in served(world).trace if entry[0] < when]
    assert len(past) > 5
    assert core.trace[: len(past)] == past


@pytest.mark.parametrize(
    "recipe", one_in(4, (name for name, one in RECIPES.items() if one.forecasts is not Forecasts.TRUE))
)
def test_plans_do_not_depend_on_lengths_that_are_not_known_yet(recipe: str) -> None:
    """Requests stop before their `max_tokens`. A longer output of one changes no plan before the shorter one ended."""

    def with_output(tokens: int) -> Run:
        chance, requests = random.Random(4), []
        for number in range(20):
            prompt, output = chance.randint(1, 40), chance.randint(4, 30)
            ends = prompt + (tokens if number == 7 else output) - 1  # the token at this position
            arrival = 0.05 * number
            forecast = Forecast(20, "test", (0.1,) * 10)
            requests.append(make(number, prompt, 40, arrival=arrival, stop_tokens=frozenset([ends]), forecast=forecast))
        return run(World(recipe), requests)

    short, long = with_output(9), with_output(33)
    (ended,) = (event.now for event in short.events if isinstance(event, Finished) and event.request.id == 7)
    before = [entry for entry in short.trace if entry[0] < ended]
    assert len(before) > 10
    assert long.trace[: len(before)] == before
    assert long.trace != short.trace


def failing(seed: int, share: float) -> Callable[[Move], bool]:
    draw = random.Random(seed)
    return lambda move: draw.random() < share


@given(
    recipe=st.sampled_from(sorted(RECIPES)),
    pipeline=st.sampled_from([*PIPELINES, (3, False, 1), (4, False, 4)]),
    eviction=st.sampled_from([None, *OTHERS, *sorted(EVICTIONS)]),
    seed=st.integers(0, 10**6),
    best_effort=st.sampled_from([0.0, 0.5]),
    device_blocks=st.integers(25, 70),  # the largest request of the load has 100 tokens, 25 blocks
    cpu_blocks=st.integers(0, 80),
    max_seqs=st.integers(1, 10),
    max_tokens=st.integers(1, 80),
    starvation_s=st.sampled_from([0.05, 0.3, 100.0]),
    block_s=st.sampled_from([0.0, 1e-4, 2e-3, 0.02]),  # of the link; a step takes 0.02 s and more
    fails=st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
)
def test_all_requests_finish_in_any_world(
    *,
    recipe: str,
    pipeline: tuple[int, bool, int],
    eviction: str | None,
    seed: int,
    best_effort: float,
    device_blocks: int,
    cpu_blocks: int,
    max_seqs: int,
    max_tokens: int,
    starvation_s: float,
    block_s: float,
    fails: float,
) -> None:
    """The policies assume a fast link, so they use the link whatever it is like."""
    world = world_of(
        recipe,
        pipeline,
        None if eviction in OTHERS else eviction,
        device_blocks=device_blocks,
        cpu_blocks=cpu_blocks,
        max_seqs=max_seqs,
        # These stop a third of all holders at every step, so prompts in chunks of one token would rarely finish.
        max_tokens=max(8, max_tokens) if eviction in ("chaos", "patchwork") else max_tokens,
        starvation_s=starvation_s,
        machine=replace(COST, block=block_s, transfer_floor=block_s),
    )
    if eviction in OTHERS:
        world = replace(world, eviction=partial(OTHERS[eviction], seed))
    requests = load(seed, 12, priorities=(0, seed % 3), texts=seed % 4, best_effort=best_effort)
    done = run(world, requests, fails=failing(seed, fails))
    assert_served(done)
    assert_tokens_between_evictions(done)


@given(
    recipe=st.sampled_from([name for name, one in sorted(RECIPES.items()) if one.forecasts is not Forecasts.NONE]),
    pipeline=st.sampled_from([*PIPELINES, (3, False, 1)]),
    eviction=st.sampled_from([None, *sorted(EVICTIONS)]),
    seed=st.integers(0, 10**6),
    share=st.sampled_from([0.05, 0.5, 1.0]),
)
def test_forecasts_may_change_at_any_time(
    *, recipe: str, pipeline: tuple[int, bool, int], eviction: str | None, seed: int, share: float
) -> None:
    """Forecasts change to any value between a plan and its result, for running and for waiting requests."""
    draw = random.Random(seed)
    world = world_of(recipe, pipeline, eviction)
    core = world.core()

    def reforecast(piece: Slice) -> bool:
        if draw.random() < share:
            changed = draw.choice([*core.requests.values()])
            core.reforecast(changed.id, Forecast(draw.choice([1, 10, 10, 1e6]), "test"), core.trace[-1][0])
        return False

    done = run(world, load(seed, 16, priorities=(0, seed % 2)), core=core, fails_slice=reforecast)
    assert_served(done)
    assert_tokens_between_evictions(done)


@pytest.mark.parametrize("eviction", ["proactive", exhaustive("chaos")])
def test_other_requests_run_during_slow_moves(eviction: str) -> None:
    """Every move takes a hundred steps, and half of them fail."""
    slow = replace(COST, block=0.5, transfer_floor=0.0)
    world = World(eviction=EVICTIONS[eviction], device_blocks=20, starvation_s=1e6, machine=slow)
    done = run(world, [make(number, 16, 8) for number in range(6)], fails=failing(0, 0.5))
    assert_served(done)
    moving = meanwhile = 0
    for event in done.events:
        match event:
            case Planned(plan=plan):
                meanwhile += moving > 0 and len(plan.slices)
                moving += len(plan.blocking) + len(plan.overlapped)
            case Moved() | MoveFailed():
                moving -= 1
            case _:
                pass
    assert meanwhile > 5


@pytest.mark.parametrize(("eviction", "cpu_blocks"), checkered(["swap", "spill", "proactive", "chaos"], range(6)))
def test_kv_is_recomputed_when_the_cpu_tier_is_full(eviction: str, cpu_blocks: int) -> None:
    world = World(eviction=EVICTIONS[eviction], device_blocks=12, cpu_blocks=cpu_blocks)
    done = run(world, load(3, 20, prompts=(1, 20), outputs=(1, 20)))
    assert_served(done)
    ways = Counter(event.how for event in done.events if isinstance(event, Preempted))
    assert ways[Preemption.DROP] > 0
    moved = ways[Preemption.SWAP] + ways[Preemption.SPILL]
    assert cpu_blocks == 1 or (moved > 0) == (cpu_blocks > 0)  # one block may be too small for all


# With these objectives, no step ends early for the next token of a real-time request.
NO_HURRY = (("ttft_s", 1e6), ("tpot_s", 1e6))


def is_refused(admission: AdmissionPolicy, request: Request, kv: KVLedger) -> bool:
    return request.progress.known > request.progress.reserved_tokens and isinstance(
        admission.reserve(request, request.progress.known, kv), Deferral
    )


@pytest.mark.parametrize(
    ("recipe", "seed"),
    [
        pytest.param(*param.values, seed, marks=param.marks)
        for seed in range(2)
        for param in each_recipe("static", parts=2, begin=seed)
    ],
)
def test_no_slot_stays_empty_while_a_request_could_use_it(recipe: str, seed: int) -> None:
    """While a step has slots and tokens left, every holder of KV on the device runs unless it lacks a block.

    The first request in the queue is admitted unless it does not fit alongside higher-ranked requests on the CPU tier.
    """
    world = World(recipe, device_blocks=60, params=NO_HURRY)
    policies = world.policies()
    stepper = Stepper(world.core(policies))
    core, kv = stepper.core, stepper.core.kv
    requests = load(seed, 30)
    for _ in range(2000):
        while requests and requests[0].arrival <= stepper.now:
            stepper.add(requests.pop(0))
        evictions = sum(request.progress.evictions for request in core.requests.values())
        plan = stepper.start()
        if plan is None:
            assert not core.requests
            if not requests:
                break
            stepper.now += 0.01
            continue
        batcher = policies.batcher.batcher if isinstance(policies.batcher, LimitedBestEffort) else policies.batcher
        max_tokens = batcher.target if isinstance(batcher, TargetForward) else world.max_tokens
        tokens = max_tokens - sum(piece.tokens for piece in plan.slices)
        evicted = evictions != sum(request.progress.evictions for request in core.requests.values())
        # They take their places in the batch without slices.
        returning = sum(
            move.direction is Direction.IN and policies.eviction.returns_alongside(move.request)
            for move in plan.overlapped
        )
        if len(plan.slices) + returning < world.max_seqs and tokens > 0 and not evicted:
            idle = [request for request in core.requests.values() if not request.progress.in_flight]
            swapped_out = [r for r in idle if (held := kv.blocks_of(r)) and (held.cpu or held.moving)]
            lacking = [
                r
                for r in idle
                if kv.blocks_of(r)
                and r not in swapped_out
                and (kv.shortfall(r, r.progress.known) > 0 or is_refused(policies.admission, r, kv))
            ]
            assert [r for r in idle if kv.blocks_of(r) and r not in swapped_out] == lacking
            queue = sorted((r for r in idle if not kv.blocks_of(r)), key=policies.ordering.rank)
            if queue and not lacking and queue[0].progress.pending <= tokens:
                promise = policies.admission.reserve(queue[0], queue[0].progress.known, kv)
                rank = policies.ordering.rank
                owed = sum(
                    kv.tiers.cpu_footprint(r)
                    for r in swapped_out
                    if kv.blocks_of(r).is_settled and rank(r) < rank(queue[0])
                )
                if isinstance(promise, Allocation):
                    assert max(promise.now, promise.blocks) + promise.spare > kv.available - owed
        stepper.finish()
    stepper.drain()
    assert not requests


@pytest.mark.parametrize(
    ("recipe", "pipeline"),
    checkered(["adaptive", "alise", "fastserve", "sarathi", "srpt"], [(1, False, 1), (2, True, 1)]),
)
def test_plans_equal_those_of_fcfs_while_nothing_is_short(recipe: str, pipeline: tuple[int, bool, int]) -> None:
    """With free slots, tokens and KV the order does not matter, so no recipe delays a request that `fcfs` runs."""

    def plans(name: str) -> list[tuple[float, set[tuple[int, int, int]]]]:
        roomy = {"device_blocks": 4000, "max_seqs": 64, "max_tokens": 1 << 16}
        done = run(world_of(name, pipeline, None, **roomy), load(2, 30, rate=20.0))
        return [
            (event.now, {(piece.request.id, piece.start, piece.tokens) for piece in event.plan.slices})
            for event in done.events
            if isinstance(event, Planned)
        ]

    assert plans(recipe) == plans("fcfs")


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in ROOMY and name in RARELY_EVICT else ())
        for name in SYSTEMS
    ],
)
def test_these_worlds_cause_evictions(recipe: str) -> None:
    """Otherwise the properties above would hold without evictions to test them."""
    for (system, pipeline, eviction), marks in combinations(SYSTEMS, PIPELINES, sorted(EVICTIONS), parts=2):
        if system != recipe or marks:
            continue
        done = served(world_of(recipe, PIPELINES[0] if recipe in RARELY_EVICT else pipeline, eviction))
        preemptions = [event.how for event in done.events if isinstance(event, Preempted)]
        before = sum(bool(plan[2]) for _, plan in done.trace)
        overlapped = sum(bool(plan[3]) for _, plan in done.trace)
        if eviction == "chaos":
            assert overlapped > 5
        elif recipe in ROOMY:  # blocks that are reserved count as missing for policies that look ahead
            assert before == 0
            assert (len(preemptions) > 0) == (eviction == "proactive")
        elif recipe.startswith("econoserve") and eviction != "proactive":
            assert preemptions.count(Preemption.PAUSE) > 4  # a request pauses when it exceeds its reservation
        elif recipe == "synccoupled":  # the same, but few requests exceed their reservation
            assert preemptions
        else:
            # With deferred eviction only growth evicts, and that is rare in order of arrival, too.
            assert len(preemptions) - preemptions.count(Preemption.PAUSE) > (eviction != "defer")
            assert before > 0 or eviction not in ("swap", "spill")
            assert before == 0 or eviction not in ("recompute", "defer")
            assert (preemptions.count(Preemption.SPILL) > 0) == (eviction == "spill")
            assert (overlapped > 0) == (eviction == "proactive")


def test_requests_with_a_reservation_of_their_maximum_are_never_evicted() -> None:
    for recipe, seed in product(("static", "orca"), range(3)):
        done = run(World(recipe), load(seed, 30))
        assert all(request.progress.evictions == 0 for request in done.requests)


def test_an_unknown_recipe_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ValueError, match="fastserve, fcfs"):
        find("lifo")


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_each_build_has_its_own_policies(recipe: str) -> None:
    settings_ = Settings(COST, has_true_forecasts=True)
    assert build(recipe, settings_).ordering is not build(recipe, settings_).ordering


@pytest.mark.parametrize("recipe", [name for name, one in RECIPES.items() if one.forecasts is Forecasts.TRUE])
def test_an_oracle_is_refused_without_true_lengths(recipe: str) -> None:
    with pytest.raises(ConfigError, match=f"recipe {recipe} needs true output lengths"):
        build(recipe, Settings(COST))
    assert build(recipe, Settings(COST), {"oracle": "max-tokens"})
