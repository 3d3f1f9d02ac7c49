from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.policy import CostModel
from skipjoin.core.step import Slice, StepShape
from skipjoin.policies.cost import (
    COMMON_RATE,
    MAX_ERROR,
    OWN_RATE,
    REVISION_FACTOR,
    STEP_TERMS,
    LearningCost,
    LinearCost,
)
from support.load import make
from support.policies import COST

TRUTH = LinearCost(
    floor=0.004, prefill_token=5e-4, attention_pair=4e-7, decode=5e-4, context_token=1.5e-6, weights=0.006
)
FLOOR_ONLY = LinearCost(floor=0.01, prefill_token=0.0)
COSTS: dict[str, CostModel] = {
    "every term": COST,
    "floor only": FLOOR_ONLY,
    "weights": TRUTH,
    "learning": LearningCost(COST),
    "learning, floor only": LearningCost(FLOOR_ONLY),
    "learning from a guess": LearningCost(COST, doubt=10.0),
}
every_cost = pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS.keys())
SHAPES = st.builds(StepShape, *[st.integers(0, 10_000)] * 4)

# No coefficient moves by more than this share of itself in one step.
MAX_MOVE = MAX_ERROR * (OWN_RATE + COMMON_RATE)


@every_cost
@given(one=SHAPES, more=SHAPES)
def test_more_work_never_costs_less(cost: CostModel, one: StepShape, more: StepShape) -> None:
    assert cost.step(StepShape(*map(sum, zip(one, more, strict=True)))) >= cost.step(one)


@every_cost
def test_every_step_costs_time(cost: CostModel) -> None:
    assert cost.step(StepShape()) > 0


@every_cost
@given(blocks=st.integers(0, 1000), more=st.integers(0, 1000))
def test_a_larger_transfer_never_costs_less(cost: CostModel, blocks: int, more: int) -> None:
    assert 0 <= cost.transfer(blocks) <= cost.transfer(blocks + more)


@every_cost
@given(shape=SHAPES)
def test_the_same_shape_costs_the_same(cost: CostModel, shape: StepShape) -> None:
    before = cost.revision
    assert cost.step(shape) == cost.step(StepShape(*shape))
    assert cost.revision == before


def test_linear_cost_is_the_sum_of_its_terms() -> None:
    cost = LinearCost(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    assert cost.step(StepShape(prefill=10, attention=100, decodes=1000, context=10_000)) == 54_321
    assert cost.transfer(10) == 67


def test_weights_are_read_as_far_as_tokens_choose_their_experts() -> None:
    cost = LinearCost(1.0, 0.0, weights=8.0, expert_part=0.5, expert_use=0.25)
    assert [cost.step(StepShape(decodes=count)) for count in (0, 1, 2, 1000)] == [5.0, 6.0, 6.75, 9.0]
    with pytest.raises(ValueError, match=r"expert_use must be in \[0, 1\], got 2"):
        LinearCost(1.0, 0.0, expert_use=2.0)


@pytest.mark.parametrize(
    "bad", [{"floor": 0.0}, {"floor": -1.0}, {"prefill_token": -1.0}, {"block": float("nan")}, {"decode": math.inf}]
)
def test_linear_cost_refuses_negative_terms(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="seconds"):
        LinearCost(**{"floor": 1.0, "prefill_token": 1.0, **bad})


# Steps as an engine runs them: decodes, prompts, chunks of prompts, and mixes.
REAL_SHAPES = st.builds(
    lambda decodes, mean, tokens, start: StepShape(
        tokens, tokens * start + tokens * (tokens + 1) // 2, decodes, decodes * mean
    ),
    st.integers(0, 64),
    st.integers(1, 2000),
    st.sampled_from([0, 2, 16, 100, 512]),
    st.sampled_from([0, 100, 900]),
).filter(lambda shape: shape.prefill + shape.decodes > 0)


def real_shape(draw: random.Random) -> StepShape:
    decodes, mean = draw.choice([1, 2, 4, 8, 16, 32]), draw.randint(1, 900)
    tokens, start = draw.choice([16, 64, 128, 256, 512]), draw.choice([0, 0, 0, 256])
    attention = tokens * start + tokens * (tokens + 1) // 2
    kind = draw.random()
    if kind < 0.7:
        return StepShape(0, 0, decodes, decodes * mean)
    if kind < 0.85:
        return StepShape(tokens, attention, 0, 0)
    return StepShape(tokens, attention, decodes, decodes * mean)


def teach(cost: LearningCost, actual: LinearCost, steps: int, *, seed: int = 0, noise: float = 0.1) -> None:
    """Learn from steps of mixed shapes with relative noise; one step in thirty is delayed."""
    draw = random.Random(seed)
    for _ in range(steps):
        shape = real_shape(draw)
        delay = draw.uniform(1.5, 4) if noise and draw.random() < 1 / 30 else 1.0
        cost.learn(shape, actual.step(shape) * math.exp(draw.gauss(0, noise)) * delay)


def errors(cost: CostModel, actual: LinearCost) -> list[float]:
    draw = random.Random(99)
    shapes = [real_shape(draw) for _ in range(200)]
    return sorted(abs(cost.step(shape) / actual.step(shape) - 1) for shape in shapes)


def scaled(cost: LinearCost, factors: list[float]) -> LinearCost:
    return LinearCost(**{name: getattr(cost, name) * factor for name, factor in zip(STEP_TERMS, factors, strict=True)})


FACTORS = st.lists(st.floats(1 / 3, 3), min_size=6, max_size=6)


@given(factors=FACTORS, seed=st.integers(0, 1000))
def test_learning_converges_from_a_poor_guess_under_noise(factors: list[float], seed: int) -> None:
    cost = LearningCost(scaled(TRUTH, factors))
    teach(cost, TRUTH, 1500, seed=seed)
    found = errors(cost, TRUTH)
    assert found[100] < 0.12
    assert found[190] < 0.3


@given(factors=st.lists(st.floats(1 / 30, 30), min_size=6, max_size=6), delay=st.sampled_from([1.0, 5.0]))
def test_a_doubted_guess_is_right_after_a_few_steps_of_each_kind(factors: list[float], delay: float) -> None:
    cost, slow = LearningCost(scaled(TRUTH, factors), doubt=10.0), StepShape(0, 0, 4, 400)
    cost.learn(slow, delay * TRUTH.step(slow))  # a first step compiles, or touches memory first
    teach(cost, TRUTH, 60)
    assert errors(cost, TRUTH)[100] < 0.3


def test_doubt_ends_with_measured_costs() -> None:
    doubted, sure = LearningCost(TRUTH, doubt=10.0), LearningCost(TRUTH)
    doubted.restart(TRUTH)
    for cost in (doubted, sure):
        teach(cost, scaled(TRUTH, [2.0] * 6), 20)
    assert doubted.current == sure.current


@pytest.mark.parametrize("missing", STEP_TERMS[1:-1])
def test_a_term_that_starts_at_zero_is_learned(missing: str) -> None:
    start = LinearCost(**{name: getattr(TRUTH, name) * (name != missing) for name in STEP_TERMS})
    cost = LearningCost(start)
    before = errors(start, TRUTH)
    teach(cost, TRUTH, 5000, noise=0.0)
    after = errors(cost, TRUTH)
    assert after[100] < 0.08
    assert after[190] < min(0.25, 0.75 * before[190])


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_a_change_of_speed_is_learned_within_200_steps(speed: float) -> None:
    cost = LearningCost(TRUTH)
    changed = scaled(TRUTH, [speed] * 6)
    teach(cost, changed, 200)
    assert errors(cost, changed)[100] < 0.1
    assert errors(cost, changed)[190] < 0.2


def test_decodes_alone_also_adjust_the_prefill_cost() -> None:
    """A machine that became slower is slower for prompts too, even if none ran recently."""
    cost, prompt = LearningCost(TRUTH), StepShape(prefill=512, attention=512 * 513 // 2)
    for step in range(200):
        shape = StepShape(decodes=8, context=8 * (100 + step))
        cost.learn(shape, 2 * TRUTH.step(shape))
    assert 1.03 < cost.step(prompt) / TRUTH.step(prompt) < 2


@given(shape=REAL_SHAPES, probe=REAL_SHAPES, times=st.sampled_from([1e-9, 0.01, 100.0, 1e12]), seed=st.integers(0, 9))
def test_one_step_changes_an_estimate_only_a_little(
    shape: StepShape, probe: StepShape, times: float, seed: int
) -> None:
    cost = LearningCost(COST)
    teach(cost, COST, 100, seed=seed)
    before = cost.step(probe)
    cost.learn(shape, times * cost.step(shape))
    # What was learned since the last revision takes effect at the next one.
    limit = (1 + MAX_MOVE) * REVISION_FACTOR
    assert before / limit <= cost.step(probe) <= before * limit
    assert limit < 1.16


@given(
    steps=st.lists(st.tuples(SHAPES, st.one_of(st.floats(), st.floats(1e-6, 1e3))), max_size=60),
    probe=SHAPES,
    doubt=st.sampled_from([0.0, 10.0]),
)
def test_estimates_stay_finite_and_positive_for_any_measurements(
    steps: list[tuple[StepShape, float]], probe: StepShape, doubt: float
) -> None:
    cost = LearningCost(FLOOR_ONLY, doubt=doubt)
    for shape, seconds in steps:
        cost.learn(shape, seconds)
        assert 0 < cost.step(probe) < math.inf
        assert all(getattr(cost.current, name) > 0 for name in STEP_TERMS[:-1])


@given(
    steps=st.lists(st.tuples(REAL_SHAPES, st.floats(1e-3, 1.0)), min_size=1, max_size=60),
    probe=REAL_SHAPES,
    doubt=st.sampled_from([0.0, 10.0]),
)
def test_estimates_change_only_with_the_revision(
    steps: list[tuple[StepShape, float]], probe: StepShape, doubt: float
) -> None:
    cost = LearningCost(COST, doubt=doubt)
    for shape, seconds in steps:
        before, revision = cost.step(probe), cost.revision
        cost.learn(shape, seconds)
        assert (cost.step(probe) == before) == (cost.revision == revision)


def test_the_revision_changes_only_when_estimates_are_off() -> None:
    cost, shape = LearningCost(TRUTH), StepShape(decodes=4, context=400)
    for _ in range(100):
        cost.learn(shape, 1.001 * TRUTH.step(shape))
    assert cost.revision == 0
    cost.learn(shape, 2 * TRUTH.step(shape))
    assert cost.revision == 1
    assert 1 < cost.step(shape) / TRUTH.step(shape) <= REVISION_FACTOR * (1 + MAX_MOVE)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_invalid_times_are_ignored(seconds: float) -> None:
    cost = LearningCost(COST)
    for _ in range(100):
        cost.learn(StepShape(decodes=1, context=1), seconds)
    assert cost.current == COST


def test_steps_do_not_change_the_transfer_cost() -> None:
    cost = LearningCost(COST)
    teach(cost, scaled(TRUTH, [3.0] * 6), 100)
    assert cost.transfer(7) == COST.transfer(7)


def test_a_shape_counts_prefill_attention_pairs_and_decode_context() -> None:
    request = make(0, 10)
    slices = [
        Slice(request, 0, 3, False, False, ()),  # 1 + 2 + 3 pairs
        Slice(request, 4, 2, False, False, ()),  # 5 + 6 pairs
        Slice(request, 9, 1, True, False, ()),
        Slice(request, 0, 1, True, False, ()),
    ]
    assert StepShape.of(slices) == StepShape(prefill=5, attention=17, decodes=2, context=11)


@given(start=st.integers(0, 50), pieces=st.lists(st.integers(2, 20), min_size=1, max_size=5))
def test_chunking_a_prefill_does_not_change_its_work(start: int, pieces: list[int]) -> None:
    request, slices, at = make(0), [], start
    for tokens in pieces:
        slices.append(Slice(request, at, tokens, False, False, ()))
        at += tokens
    assert StepShape.of(slices) == StepShape.of([Slice(request, start, at - start, False, False, ())])
