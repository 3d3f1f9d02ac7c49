from __future__ import annotations

from dataclasses import replace
from itertools import count
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event, Finished, Token
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import NO_TARGET, Request, Target
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.policies.cost import LinearCost
from skipjoin.sim.driver import Replica, simulate
from support.load import load, make
from support.recipes import RECIPES
from support.watch import Run, Stepper, World, run
from support.worlds import PIPELINES, Pipeline, each_recipe, exhaustive, halved, is_variant, one_in

# A static batch runs to its end, and round robin serves both classes equally.
BANDED = sorted(set(RECIPES) - {"static", "round-robin"})
PACKING = sorted(name for name in RECIPES if name.startswith("bros"))


def run_with(flood: list[Request], recipe: str) -> Run:
    chat = load(5, 24, rate=5.0, outputs=(1, 10))
    return run(World(recipe, device_blocks=80), sorted([*chat, *flood], key=lambda request: request.arrival))


def flood_of(size: int, *, best_effort: bool = True) -> list[Request]:
    return [make(1000 + number, 30, 30, best_effort=best_effort) for number in range(size)]


def mean_time(done: Run) -> float:
    return fmean(
        event.now - event.request.arrival
        for event in done.events
        if isinstance(event, Finished) and event.request.id < 1000
    )


@pytest.mark.parametrize("recipe", one_in(3, (name for name in BANDED if not is_variant(name) and name not in PACKING)))
def test_a_best_effort_flood_delays_real_time_requests_little(recipe: str) -> None:
    """Steps become longer, and that is all. Without classes, the flood costs far more under FCFS."""
    floods = flood_of(0), flood_of(28), flood_of(28, best_effort=False)
    alone, disturbed, equal = (mean_time(run_with(flood, recipe)) for flood in floods)
    assert alone <= disturbed < 2.5 * alone
    assert disturbed < (0.5 if recipe in ("fcfs", "orca", "sarathi") else 1.05) * equal


def test_best_effort_requests_do_not_wait_for_others_to_finish_before_their_first_token_by_default() -> None:
    def longest_wait(recipe: str) -> float:
        batch = [make(number, 8, 40, arrival=0.05 * number, best_effort=True) for number in range(16)]
        first: dict[Request, float] = {}
        for event in run(World(recipe, device_blocks=400, max_seqs=4), batch).events:
            if isinstance(event, Token):
                first.setdefault(event.request, event.now)
        return max(when - request.arrival for request, when in first.items())

    assert longest_wait("adaptive") < 0.1 * longest_wait("fcfs")


@pytest.mark.parametrize("recipe", halved(PACKING))
def test_packing_keeps_first_tokens_in_time_during_a_flood(recipe: str) -> None:
    done = run_with(flood_of(60), recipe)
    first = {}
    for event in done.events:
        if isinstance(event, Token) and event.request.id < 1000:
            first.setdefault(event.request, event.now)
    late = [request for request, when in first.items() if when > request.arrival + 0.4]
    assert len(late) <= 0.05 * len(first)


def test_more_first_tokens_are_in_time_if_requests_ahead_of_their_schedule_are_evicted() -> None:
    """Real-time requests alone fill the KV pool here, and their tokens come faster than they must."""
    shares = []
    for evicts in ("late", "ahead"):
        params = (("evicts", evicts), ("ttft_s", 0.3), ("tpot_s", 0.15))
        world = World("bros", device_blocks=150, cpu_blocks=300, max_seqs=40, max_tokens=256, params=params)
        requests, first = load(3, 120, rate=20, outputs=(10, 60)), dict[Request, float]()
        for event in run(world, requests).events:
            if isinstance(event, Token):
                first.setdefault(event.request, event.now)
        assert all(len(request.progress.output) == request.max_tokens for request in requests)
        shares.append(fmean(when <= request.arrival + 0.3 for request, when in first.items()))
    assert shares[1] > shares[0] + 0.15


# The latencies of llm-d-batch-gateway#491 without batches: 82 ms to the first token at P99, then 13 ms a token.
BURST = LinearCost(floor=0.011, prefill_token=2e-5, decode=2e-5)
OBJECTIVES = Target(ttft_s=0.15, tpot_s=0.03)


def in_burst(recipe: str, batch: list[Request]) -> tuple[float, Run]:
    """Return the share of first tokens in time, of chat at 15 requests per second during a batch, and the run."""
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
    return fmean(first[request] - request.arrival <= OBJECTIVES.ttft_s for request in chat), done


def batch_of(*, best_effort: bool) -> list[Request]:
    return [make(1000 + number, 512, 40, best_effort=best_effort) for number in range(100)]


@pytest.mark.parametrize("recipe", ["fcfs", *map(exhaustive, ("fastserve", "bros"))])
def test_a_burst_meets_its_objectives_during_a_best_effort_batch(recipe: str) -> None:
    """Run the load of llm-d-batch-gateway#491 for two seconds (users.md 4.4, 9)."""
    alone, _ = in_burst(recipe, [])
    with_batch, done = in_burst(recipe, batch_of(best_effort=True))
    assert with_batch >= alone - 0.02
    last = max(request.arrival for request in done.requests)
    ends = [event.now < last for event in done.events if isinstance(event, Finished) and event.request.is_best_effort]
    assert 0 < sum(ends) < len(ends)


def test_a_burst_misses_its_objectives_during_a_batch_of_the_same_class() -> None:
    assert in_burst("fcfs", batch_of(best_effort=False))[0] < 0.5


@pytest.mark.parametrize("recipe", each_recipe("static", "round-robin", parts=2, begin=1))
def test_best_effort_requests_finish_under_constant_real_time_load(recipe: str) -> None:
    """They finish one after the other, each in about the time that it takes as a real-time request."""
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
        ends += [stepper.now for request in batch if request.progress.finish_reason is not None][len(ends) :]
        assert stepper.now < 60, f"{len(ends)} have finished"


def world_beside_batch(draw: Random, pipeline: Pipeline, slowness: float) -> World:
    """Return a world with `fcfs`, whose only rules are classes and priorities."""
    depth, overlap, stages = pipeline
    floor, prompt, decode = draw.choice((2e-3, 0.01, 0.03)), draw.choice((2e-5, 1e-4, 5e-4)), draw.choice((2e-5, 1e-3))
    link = draw.choice((1e-5, 1e-4, 2e-3))
    seconds = (floor, prompt, 0.0, decode, 1e-7, link, link)
    return World(
        "fcfs",
        depth,
        overlap,
        stages=stages,
        device_blocks=draw.choice((45, 80, 120, 300)),
        cpu_blocks=draw.choice((0, 100, 400)),
        block_size=16,
        max_seqs=draw.choice((4, 8, 16, 32)),
        max_tokens=512,  # a whole prompt: `fcfs` does not cut prompts
        cost=LinearCost(*(slowness * second for second in seconds)),
    )


def chat_and_batch(draw: Random, cost: LinearCost) -> list[Request]:
    """Return chat below the capacity, with and without objectives, and a best-effort batch of any size.

    Chat begins first, because steps without any are as long as they can be.
    """
    short, long = draw.choice(((4, 30), (50, 200), (4, 400))), draw.choice(((4, 30), (200, 450)))
    outputs, load = draw.choice(((1, 6), (2, 12), (10, 60))), draw.choice((0.1, 0.3, 0.6))
    targets = draw.choice(
        ((NO_TARGET,), (Target(ttft_s=0.5, tpot_s=0.05),), (Target(ttft_s=5.0),), (Target(tpot_s=0.3), NO_TARGET))
    )
    sizes = [(draw.randint(*draw.choice((short, short, short, long))), draw.randint(*outputs)) for _ in range(10)]
    each_s = [cost.prefill_token * prompt + (cost.floor / 4 + cost.decode) * output for prompt, output in sizes]
    priorities, now, requests = draw.choice(((0,), (0, 1, 2))), 0.0, []
    for number, (prompt, output) in enumerate(sizes):
        options = {"target": draw.choice(targets), "priority": draw.choice(priorities)}
        requests.append(make(number, prompt, output, arrival=now, **options))
        now += draw.expovariate(load / fmean(each_s))
    lengths = draw.choice(((4, 60), (100, 450))), draw.choice(((1, 5), (5, 20), (20, 60)))
    since = draw.choice((0.0, now / 2))
    for number in range(draw.choice((5, 20, 60))):
        (prompt, output), arrival = (draw.randint(*some) for some in lengths), draw.uniform(0, since)
        options = {"best_effort": True, "priority": draw.choice((0, 7))}
        requests.append(make(1000 + number, prompt, output, arrival=arrival, **options))
    return sorted(requests, key=lambda request: request.arrival)


@settings(max_examples=settings.default.max_examples // 4)
@given(pipeline=st.sampled_from(PIPELINES), slowness=st.sampled_from([1.0, 8.0]), seed=st.integers(0, 10**6))
def test_bros_delays_chat_beside_a_batch_by_at_most_a_seventh(pipeline: Pipeline, slowness: float, seed: int) -> None:
    """The defaults cannot hurt: chat is as fast as with classes and priorities alone, and the batch as well."""
    chat_s, batch_s = [], []
    plain = world_beside_batch(Random(seed), pipeline, slowness)
    for world in (plain, replace(plain, recipe="bros")):
        assert isinstance(world.cost, LinearCost)
        kv = KVLedger(world.device_blocks, world.cpu_blocks, world.block_size)
        core = EngineCore(Scheduler(world.policies(), kv, depth=world.depth, overlap=world.overlap))
        events = list[Event]()
        executor = SimulatedExecutor(world.cost, stages=world.stages)
        simulate(Replica(core, executor), chat_and_batch(Random(seed), world.cost), on_events=events.extend)
        ends = {event.request: event.now for event in events if isinstance(event, Finished)}
        chat_s.append(fmean(end - one.arrival for one, end in ends.items() if not one.is_best_effort))
        batch_s.append(max(end for one, end in ends.items() if one.is_best_effort))
    assert chat_s[1] <= 1.15 * chat_s[0]
    assert batch_s[1] <= 2 * batch_s[0]
