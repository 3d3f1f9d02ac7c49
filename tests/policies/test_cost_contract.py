"""What policies and the simulated executor rely on in every cost model and length predictor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.policy import CostModel, LengthPredictor
from skipjoin.core.step import Slice, StepShape
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.predictors import MaxTokens
from support.load import make
from support.policies import COST

COSTS: dict[str, CostModel] = {"every term": COST, "floor only": LinearCost(floor=0.01, prefill_token=0.0)}
every_cost = pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS.keys())
PREDICTORS: dict[str, LengthPredictor] = {"max_tokens": MaxTokens()}
every_predictor = pytest.mark.parametrize("predictor", PREDICTORS.values(), ids=PREDICTORS.keys())
SHAPES = st.builds(StepShape, *[st.integers(0, 10_000)] * 4)


@every_cost
@given(one=SHAPES, more=SHAPES)
def test_more_work_never_costs_less(cost: CostModel, one: StepShape, more: StepShape) -> None:
    assert cost.step(StepShape(*map(sum, zip(one, more, strict=True)))) >= cost.step(one)


@every_cost
def test_no_step_is_free(cost: CostModel) -> None:
    assert cost.step(StepShape()) > 0


@every_cost
@given(blocks=st.integers(0, 1000), more=st.integers(0, 1000))
def test_a_longer_transfer_never_costs_less(cost: CostModel, blocks: int, more: int) -> None:
    assert 0 <= cost.transfer(blocks) <= cost.transfer(blocks + more)


@every_cost
@given(shape=SHAPES)
def test_the_same_shape_costs_the_same(cost: CostModel, shape: StepShape) -> None:
    assert cost.step(shape) == cost.step(StepShape(*shape))


def test_linear_cost_is_the_sum_of_its_terms() -> None:
    cost = LinearCost(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    assert cost.step(StepShape(prefill=10, attention=100, decodes=1000, context=10_000)) == 54_321
    assert cost.transfer(10) == 67


@pytest.mark.parametrize("bad", [{"floor": 0.0}, {"floor": -1.0}, {"prefill_token": -1.0}, {"block": float("nan")}])
def test_linear_cost_refuses_negative_terms(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="seconds"):
        LinearCost(**{"floor": 1.0, "prefill_token": 1.0, **bad})


def test_a_shape_counts_query_key_pairs_of_prefills_and_context_of_decodes() -> None:
    request = make(0, 10)
    slices = [
        Slice(request, 0, 3, False, False, ()),  # 1 + 2 + 3 pairs
        Slice(request, 4, 2, False, False, ()),  # 5 + 6 pairs
        Slice(request, 9, 1, True, False, ()),
        Slice(request, 0, 1, True, False, ()),
    ]
    assert StepShape.of(slices) == StepShape(prefill=5, attention=17, decodes=2, context=11)


@given(start=st.integers(0, 50), pieces=st.lists(st.integers(2, 20), min_size=1, max_size=5))
def test_cutting_a_prefill_changes_none_of_its_work(start: int, pieces: list[int]) -> None:
    request, slices, at = make(0), [], start
    for tokens in pieces:
        slices.append(Slice(request, at, tokens, False, False, ()))
        at += tokens
    assert StepShape.of(slices) == StepShape.of([Slice(request, start, at - start, False, False, ())])


@every_predictor
@given(prompt=st.integers(1, 100), most=st.integers(1, 100), generated=st.integers(0, 100))
def test_a_prediction_is_at_least_one_token(predictor: LengthPredictor, prompt: int, most: int, generated: int) -> None:
    request = make(0, prompt, most)
    request.known += min(generated, most)
    assert predictor.predict(request) >= 1
