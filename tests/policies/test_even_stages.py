from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipjoin.core.context import StepContext
from skipjoin.core.policy import CostModel
from skipjoin.core.refusals import ALL_HELD
from skipjoin.core.request import Request
from skipjoin.core.step import Slice, StepPlan, StepShape
from skipjoin.policies.batching import Greedy
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.stages import EvenStages
from support.load import load, make
from support.policies import COST, SYSTEMS, SwapAll
from support.recipes import RECIPES
from support.watch import Stepper, World
from support.worlds import checkered, halved

ROOMY = World(device_blocks=1000, cpu_blocks=0, block_size=16, max_seqs=200, max_tokens=4096)
# These recipes compute whole prompts or reserve KV, so the load alone does not determine what runs.
COUPLED = {"multires", "synccoupled"}
CLAIMING = COUPLED | {recipe for recipe in RECIPES if recipe.startswith("econoserve")}
CUTTING = sorted(set(RECIPES) - {"static", "orca", "orca-exact", "fcfs", "fcfs-swap", "round-robin"} - COUPLED)
# Decodes cost something on top of prompts, and are hidden behind the weights when alone, as on real machines.
HIDING = replace(COST, weights=0.03, decode=4e-4)


def staged(recipe: str, stages: int, **settings: object) -> Stepper:
    return Stepper(replace(ROOMY, recipe=recipe, depth=stages, stages=stages, **settings).core())  # type: ignore[arg-type]


def fill(stepper: Stepper) -> list[StepPlan]:
    stepper.fill()
    return list(stepper.core.plans)


def added(cost: CostModel, plan: StepPlan) -> float:
    """Return the seconds that the plan's slices add to a step in which the weights hide nothing."""
    overlapped, shape = StepShape(prefill=1 << 16), StepShape.of(plan.slices)
    together = StepShape(*(one + other for one, other in zip(overlapped, shape, strict=True)))
    return cost.step(together) - cost.step(overlapped)


def largest(cost: CostModel, plans: list[StepPlan]) -> float:
    return max(added(cost, StepPlan(0, (piece,))) for plan in plans for piece in plan.slices)


@pytest.mark.parametrize("recipe", halved(SYSTEMS, 1))  # without memory pressure, as the others differ in eviction only
@given(stages=st.integers(2, 5), more=st.integers(0, 20), seed=st.integers(0, 10**6))
@settings(max_examples=3, deadline=None)
def test_running_requests_spread_over_all_stages(recipe: str, stages: int, more: int, seed: int) -> None:
    """From the second round on, no plan is empty and no request is in two plans. The longest plan exceeds the mean by
    at most one slice, however the prompts were distributed."""
    stepper = staged(recipe, stages, cost=HIDING)
    stepper.add(*load(seed, stages + more, rate=1e9, prompts=(1, 60), outputs=(40, 40)))
    while any(not request.progress.output for request in stepper.core.requests.values()):
        fill(stepper)
        stepper.finish()
    for number in range(6 * stages):
        plans = fill(stepper)
        if number >= 3 * stages:
            assert len(plans) == stages
            ran = Counter(piece.request.id for plan in plans for piece in plan.slices)
            assert set(ran.values()) == {1}
            assert len(ran) == stages + more, "a request is idle"
            loads = [added(HIDING, plan) for plan in plans]
            slice_s = largest(HIDING, plans)
            assert max(loads) <= sum(loads) / stages + slice_s + 1e-6
            costs = [HIDING.step(StepShape.of(plan.slices)) for plan in plans]
            assert max(costs) - min(costs) <= stages * slice_s + 1e-6
        stepper.finish()


def test_slices_without_cost_are_balanced_by_number() -> None:
    stepper = staged("fcfs", 3, cost=LinearCost(floor=0.02, prefill_token=0.0))
    stepper.add(*(make(number, 8, 9) for number in range(9)))
    assert [len(plan.slices) for plan in fill(stepper)] == [3, 3, 3]


@pytest.mark.parametrize(("recipe", "stages"), checkered([*CUTTING], [2, 3, 4], colors=3))
def test_a_lone_long_prompt_is_cut_into_successive_chunks(recipe: str, stages: int) -> None:
    """The next chunk begins when the previous one has left the first stage, not the last."""
    stepper = staged(recipe, stages)
    stepper.add(make(0, 500, 3))
    plans = fill(stepper)
    pieces = [piece for plan in plans for piece in plan.slices]
    assert len(plans) == len(pieces) == stages
    assert all(one.start + one.tokens == other.start for one, other in pairwise(pieces))
    assert [piece.samples for piece in pieces] == [False] * (stages - 1) + [True]
    costs = [COST.step(StepShape.of(plan.slices)) for plan in plans]
    assert max(costs) - min(costs) <= 4 * stages * COST.prefill_token
    assert pieces[0].tokens > pieces[-1].tokens, "later chunks read more context"
    stepper.drain()
    assert stepper.tokens == {0: [500, 501, 502]}


def test_prompts_are_not_cut_into_chunks_that_cost_more_than_they_gain() -> None:
    """Below 40 tokens the fixed cost of a step dominates on this machine."""
    for tokens, chunks in ((79, [79]), (80, [40, 40]), (130, [44, 44, 42])):
        stepper = staged("sarathi", 3)
        stepper.add(make(0, tokens, 1))
        assert [plan.slices[0].tokens for plan in fill(stepper)] == chunks


def test_a_prompt_is_cut_to_balance_decodes() -> None:
    """The cut makes the plan that the prompt joins as long as the other one."""
    stepper = staged("sarathi", 2, cost=HIDING)
    stepper.add(*(make(number, 8, 40) for number in range(40)))
    while not all(request.progress.output for request in stepper.core.requests.values()):
        fill(stepper)
        stepper.finish()
    stepper.add(make(99, 400, 9))
    fill(stepper)
    stepper.finish()
    plans = fill(stepper)
    loads = [added(HIDING, plan) for plan in plans]
    assert all(any(piece.request.id == 99 for piece in plan.slices) for plan in plans)
    assert max(loads) - min(loads) < 0.15 * max(loads)


def test_every_request_gets_a_plan_when_prompts_are_not_cut() -> None:
    for recipe in ("fcfs", "orca"):
        stepper = staged(recipe, 3)
        stepper.add(make(0, 2, 9), make(1, 2, 9), make(2, 2, 9), make(3, 2000, 9))
        assert [[piece.request.id for piece in plan.slices] for plan in fill(stepper)] == [[0, 1], [2], [3]]


def test_prompts_are_not_held_back_while_a_static_batch_forms() -> None:
    stepper = staged("static", 2, max_seqs=6)
    stepper.add(*(make(number, 30, 6) for number in range(6)))
    assert [len(plan.slices) for plan in fill(stepper)] == [6]
    stepper.finish()
    assert [len(plan.slices) for plan in fill(stepper)] == [3, 3]
    stepper.drain()


# Recipes that pack are left out: they delay requests whose next token is not due yet.
@pytest.mark.parametrize(
    "recipe", halved(sorted(name for name in SYSTEMS if name != "static" and not name.startswith("bros")))
)
@given(
    stages=st.integers(2, 4),
    seed=st.integers(0, 10**6),
    context=st.sampled_from([0.0, 1e-7, 1e-3]),
    slots=st.booleans(),
)
@settings(max_examples=2, deadline=None)
def test_no_request_is_skipped_for_long(recipe: str, stages: int, seed: int, context: float, slots: bool) -> None:
    """While slots and tokens remain, a runnable request with KV is skipped in at most `stages` - 1 consecutive plans,
    however fast the cost of context grows. No stage is without a plan while a request can run."""
    stepper = staged(
        recipe, stages, cost=replace(COST, context_token=context), starvation_s=1e6, max_seqs=7 if slots else 200
    )
    core, max_seqs = stepper.core, (7 if slots else 200)
    waits: Counter[Request] = Counter()
    arriving = load(seed, 16, rate=40.0)
    while arriving or core.requests:
        while arriving and arriving[0].arrival <= stepper.now:
            stepper.add(arriving.pop(0))
        while True:
            idle = [
                r
                for r in core.requests.values()
                if r.progress.planned and not r.progress.pending_samples and not r.is_satisfied
            ]
            plan = stepper.start()
            if plan is None:
                assert not idle or len(core.plans) == stages
                break
            ran = {piece.request for piece in plan.slices}
            # The slots of all stages are shared by the requests in flight, those with KV and the new ones.
            competing = sum(len(plan.slices) for plan in core.plans) - len(ran) + len(ran.union(idle))
            full = len(ran) == max_seqs or competing > stages * max_seqs
            full = full or sum(piece.tokens for piece in plan.slices) >= 512
            waits = Counter({r: waits[r] + 1 for r in idle if r not in ran and not full})
            assert max(waits.values(), default=0) < stages
        if core.plans:
            stepper.finish()
        else:
            stepper.now += 0.01
    core.assert_all_free()


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("recipe", ["fastserve-reactive", "fastserve-recompute", "fcfs"])
def test_a_preempted_request_resumes_alongside_full_plans(recipe: str, stages: int) -> None:
    """The least important request resumes by swap-in or recomputation as soon as there is space."""
    world = World(recipe, stages, stages=stages, device_blocks=60, eviction=SwapAll if recipe == "fcfs" else None)
    stepper = Stepper(replace(world, starvation_s=1e6, max_seqs=20).core())
    last = make(0, 60, 30, priority=1)
    stepper.add(last, *(make(number, 4, 60) for number in range(1, 7)))
    while not last.progress.output:
        fill(stepper)
        stepper.finish()
    stepper.add(make(9, 160, 2))
    while 9 in stepper.core.requests:
        fill(stepper)
        stepper.finish()
    assert last.progress.evictions == 1
    for _ in range(4 * stages):
        fill(stepper)
        stepper.finish()
    assert last.progress.last_plan > 0, "the preempted request did not resume"
    assert len(stepper.core.requests) == 7
    stepper.drain()


@given(
    seed=st.integers(0, 10**6),
    stages=st.integers(2, 4),
    recipe=st.sampled_from(sorted(set(RECIPES) - {"static"} - CLAIMING)),
)
@settings(max_examples=8, deadline=None)
def test_a_plan_has_its_share_of_the_work_or_all_of_it(seed: int, stages: int, recipe: str) -> None:
    """Without memory pressure, a plan has at least the mean of the plans in flight, itself and the remaining requests,
    or all that can run, or enough that every free stage gets a request. It has at most the mean and one slice."""
    # The targets are so long that no step ends early for the sake of a deadline.
    stepper = staged(recipe, stages, params=(("ttft_s", 1e6), ("tpot_s", 1e6)))
    core, arriving = stepper.core, load(seed, 30, rate=100.0, prompts=(1, 300), outputs=(1, 60))
    while arriving or core.requests:
        while arriving and arriving[0].arrival <= stepper.now:
            stepper.add(arriving.pop(0))
        while (plan := stepper.start()) is not None:
            left = [
                r
                for r in core.requests.values()
                if not r.progress.pending_samples and r.progress.pending and not r.is_satisfied
            ]
            free = stages - len(core.plans)
            own = added(COST, plan)
            others = sum(added(COST, other) for other in core.plans if other is not plan)
            rest = sum(added(COST, StepPlan(0, (make_slice(r),))) for r in left)
            share = min((others + own + rest) / stages, (own + rest) / (free + 1))
            assert own <= share + largest(COST, [plan]) + 1e-6
            if sum(piece.tokens for piece in plan.slices) < 512:
                assert not left or own >= share - 1e-6 or len(left) <= free
        if core.plans:
            stepper.finish()
        else:
            stepper.now += 0.01


def make_slice(request: Request) -> Slice:
    return Slice(request, request.progress.planned, request.progress.pending, True, False, ())


def test_a_request_outside_the_candidates_is_held_only_after_a_candidate_was() -> None:
    """It runs only if others are preempted for it, so it may not be offered again soon."""
    batcher = EvenStages(Greedy(9, 64, chunked=True), COST, 2, max_seqs=18, max_tokens=128, cuts=True)
    seen, other = [make(number, 1, 9) for number in range(4)], make(9, 1, 9)
    flying = StepPlan(0, ())
    packing = batcher.open(StepContext(in_flight=(flying,), candidates=[(request, 1) for request in seen]))
    for request in seen[:2]:
        assert packing.offer(request, 1) == 1
        packing.take(request, 1)
    assert packing.offer(other, 1) == 1, "the share is full, but no candidate was held"
    assert packing.offer(seen[2], 1) == ALL_HELD
    assert packing.offer(other, 1) == ALL_HELD


def test_lookahead_does_not_read_the_whole_queue() -> None:
    read = 0

    def idle():
        nonlocal read
        for number in range(100_000):
            read += 1
            yield make(number, 8, 1), 8

    batcher = EvenStages(Greedy(4, 64, chunked=True), COST, 2, max_seqs=8, max_tokens=128, cuts=True)
    batcher.open(StepContext(candidates=idle()))
    assert read <= 9


def test_loads_are_updated_with_the_cost_model() -> None:
    """A new revision of the profile takes effect at the next step."""

    class Revised:
        revision = 0
        cost = LinearCost(floor=0.02, prefill_token=1e-3, decode=1e-3)

        def step(self, shape: StepShape) -> float:
            return self.cost.step(shape)

        def transfer(self, blocks: int) -> float:
            return 0.0

    cost = Revised()
    batcher = EvenStages(Greedy(99, 999, chunked=True), cost, 2, max_seqs=99, max_tokens=999, cuts=True)
    request = make(0, 100, 1)
    assert batcher.open(StepContext(candidates=[(request, 100)])).offer(request, 100) in (50, 51)
    cost.cost, cost.revision = LinearCost(floor=math.nextafter(1.0, 0), prefill_token=1e-3), 1
    assert batcher.open(StepContext(candidates=[(request, 100)])).offer(request, 100) == 100
