"""Documented bounds on waiting, in random worlds that share prefixes, swap, pipeline, and mix classes and priorities.

`test_waiting_bound.py` has `starvation_bound_s`. `support/bounds.py` has the bounds as invariants of a run.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from skipjoin.core.request import Request, ServiceClass, Target
from skipjoin.policies.cost import LinearCost
from support.bounds import (
    BoundedRun,
    EqualService,
    Invariant,
    Overtaking,
    SharedSteps,
    ShortPrefixWaits,
)
from support.watch import World
from support.worlds import PIPELINES

REAL_TIME, BEST_EFFORT = ServiceClass.REAL_TIME, ServiceClass.BEST_EFFORT
# The recipes of the package; variants and baselines are in `benchmarks/papers`.
BUILT_IN = ("adaptive", "alise", "bros", "econoserve", "fastserve", "fcfs", "sarathi")
WEIGHT = 2.0
SIZE = 16
# Prompts and outputs: of all lengths, long, short, and with long outputs.
SHAPES = ((1, 128, 1, 120), (100, 120, 1, 8), (1, 20, 1, 60), (60, 120, 10, 60))


def world_of(recipe: str, pipeline: tuple[int, bool, int], draw: Random, **more: Any) -> World:
    """Return a world that holds two to four of the longest requests on the device."""
    depth, overlap, stages = pipeline
    link_s = draw.choice((1e-5, 1e-4, 2e-3))
    cost = LinearCost(0.01, draw.choice((1e-4, 5e-4)), 0.0, draw.choice((1e-4, 1e-3)), 0.0, link_s, link_s)
    given: dict[str, Any] = {
        "device_blocks": draw.randint(18, 32),
        "cpu_blocks": draw.choice((0, 0, 10, 60)),
        "max_seqs": draw.choice((2, 4, 8)),
        "max_tokens": draw.choice((64, 256)),
    }
    return World(recipe, depth, overlap, stages=stages, block_size=SIZE, cost=cost, **(given | more))


recipes = st.sampled_from(BUILT_IN)


def one_in(parts: int) -> settings:
    """Return settings with this share of the usual number of examples, which are long runs here."""
    return settings(max_examples=settings.default.max_examples // parts)


worlds = st.tuples(st.sampled_from(PIPELINES), st.integers(0, 10**6))


@one_in(4)
@given(world=worlds, overtaking_s=st.sampled_from([1.0, 3.0]), shares=st.sampled_from([0, 60]))
def test_no_later_request_keeps_kv_or_slots_from_an_earlier_one_beyond_overtaking_s(
    world: tuple[Any, int], overtaking_s: float, shares: int
) -> None:
    """Under overload, each drop for a first token delays the next one of an old request, unless that is promised."""
    pipeline, seed = world
    draw = Random(seed)
    shape = draw.choice(SHAPES[:2])
    sent = [0.0]

    def send(run: BoundedRun) -> None:
        if run.now > 1 and run.count < 1000 and not any(len(request.prompt) > 150 for request in run.live):
            run.add(195, 46)
        while not run.live or (sent[0] <= run.now and len(run.live) < 40):
            sent[0] = max(sent[0], run.now - 1) + draw.expovariate(8)
            low, high, few, many = shape
            run.add(draw.randint(low, high), draw.randint(few, many), priority=draw.choice((0, 0, 1)))

    params = (("overtaking_s", overtaking_s),)
    invariants: list[Invariant] = [Overtaking(overtaking_s, slack_s=1.0), ShortPrefixWaits()]
    run = BoundedRun(world_of("adaptive", pipeline, draw, params=params), send, invariants, shares)
    run.run(lambda: run.now > 2 * overtaking_s + 4)


@one_in(2)
@given(recipe=recipes, world=worlds, has_real_time=st.booleans(), shares=st.sampled_from([0, 60]), fair=st.booleans())
def test_every_best_effort_request_is_served_once_it_is_old(
    recipe: str, world: tuple[Any, int], has_real_time: bool, shares: int, fair: bool
) -> None:
    """A flood of a better class, or of better priorities, never ends. Each old request finishes in its turn."""
    pipeline, seed = world
    draw = Random(seed)
    wait_s, old = 1.0, list[Request]()
    service = REAL_TIME if has_real_time else BEST_EFFORT
    priorities = draw.choice(((0,), (0, 1, 2), (-2, 0), (3,)))

    def send(run: BoundedRun) -> None:
        while len(old) < 5:
            old.append(run.add(20, 20, service=BEST_EFFORT, priority=draw.choice((0, 4, 9)), client="x"))
        while len(run.live) < 5 + 10:
            options = {"service": service, "priority": draw.choice(priorities), "client": draw.choice("xy")}
            run.add(draw.randint(20, 60), draw.choice((5, 20, 40)), **options)

    # Late real-time requests of bros are served after this time, whatever their class was.
    params = (("overdue_s", 0.5),)
    more = {"best_effort_wait_s": wait_s, "fair_output_weight": WEIGHT if fair else None, "params": params}
    run = BoundedRun(world_of(recipe, pipeline, draw, **more), send, shares=shares)
    # One after another is served, by bros no sooner than its tokens are due: in more than two seconds each.
    run.run(lambda: bool(old) and (all(request.progress.finish_reason for request in old) or run.now > 20 * wait_s))
    assert [request.progress.finish_reason is not None for request in old] == [True] * 5, (
        f"{seed}: after {run.now:.1f} s"
    )


@given(
    recipe=recipes,
    world=worlds,
    shares=st.sampled_from([0, 0, 12]),
    service=st.sampled_from([REAL_TIME, BEST_EFFORT]),
    others=st.sampled_from([0, 0, 1, 9]),
)
def test_counts_of_waiting_clients_differ_by_a_pool_and_a_step(
    recipe: str, world: tuple[Any, int], shares: int, service: ServiceClass, others: int
) -> None:
    """A third client has few requests, which need not wait. Generated tokens, which may fill the pool, count twice."""
    pipeline, seed = world
    draw = Random(seed)
    shapes, live = {client: draw.choice(SHAPES) for client in "abc"}, {"a": 30, "b": 14, "c": others}

    def send(run: BoundedRun) -> None:
        now = Counter(request.options.client for request in run.live)
        for client, wanted in live.items():
            for _ in range(wanted - now[client]):
                low, high, few, many = shapes[client]
                run.add(draw.randint(low, high), draw.randint(few, many), client=client, service=service)

    params = (("ttft_s", 1000.0), ("tpot_s", 1000.0))
    world_ = world_of(recipe, pipeline, draw, fair_output_weight=WEIGHT, params=params)
    step = world_.depth * (world_.max_tokens + WEIGHT * world_.max_seqs)
    most = WEIGHT * world_.device_blocks * SIZE + step
    run = BoundedRun(world_, send, [EqualService(most, WEIGHT), SharedSteps()], shares)
    run.run(lambda: run.now > 3)


@one_in(4)
@given(world=worlds, fair=st.booleans(), shares=st.sampled_from([0, 60]))
def test_an_overdue_request_is_served_while_others_with_objectives_fit_better(
    world: tuple[Any, int], fair: bool, shares: int
) -> None:
    pipeline, seed = world
    draw, old = Random(seed), list[Request]()

    def send(run: BoundedRun) -> None:
        while len(run.live) < 60:
            run.add(draw.randint(1, 12), draw.randint(20, 60), client=draw.choice("xy"), target=Target(jct_s=30.0))
        if run.now > 1 and len(old) < 2:
            old.append(run.add(draw.randint(100, 128), draw.randint(60, 120), client=draw.choice("xy")))

    more = {"max_seqs": 32, "fair_output_weight": WEIGHT if fair else None, "params": (("overdue_s", 0.5),)}
    run = BoundedRun(world_of("econoserve", pipeline, draw, **more), send, [ShortPrefixWaits()], shares)
    run.run(lambda: len(old) == 2 and (all(request.progress.finish_reason for request in old) or run.now > 60))
    assert [request.progress.finish_reason is not None for request in old] == [True] * 2
