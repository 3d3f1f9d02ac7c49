from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.forecast import Forecast, length_bin
from skipjoin.core.request import Request
from skipjoin.core.step import Slice, StepShape
from skipjoin.policies.cost import LearningCost, LinearCost
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.predictors import NO_FORECAST_TOKENS, ForecastQuantile, forecast_tokens
from skipjoin.policies.remaining import RemainingTime
from skipjoin.policies.valued import Valued
from skipjoin.policies.wait_times import Backlog, ShortestWithWaits
from support.load import make

COST = LinearCost(floor=0.01, prefill_token=1e-3, decode=1e-3, context_token=1e-5)


def forecasted(tokens: float, number: int = 0, *, arrival: float = 0.0, prompt: int = 10) -> Request:
    request = make(number, prompt, 10_000, arrival=arrival, forecast=Forecast(tokens, "test"))
    request.progress.computed = prompt
    return request


@given(tokens=st.floats(1, 500), generated=st.integers(0, 5000))
def test_an_exceeded_forecast_is_doubled(tokens: float, generated: int) -> None:
    request = forecasted(tokens)
    known = request.progress.computed = 10 + generated
    doubled = tokens * 2 ** max(0, math.ceil(math.log2(max(generated, 1) / tokens)))
    decode = COST.step(StepShape(decodes=1, context=known))
    expected = max(1, doubled - generated) * decode
    assert RemainingTime(ExecutionTime(COST), forecast_tokens).seconds(request, known) == pytest.approx(expected)


def test_an_exceeded_forecast_is_at_most_max_tokens() -> None:
    request = make(0, 10, 100, forecast=Forecast(60, "test"))
    known = request.progress.computed = 10 + 90
    decode = COST.step(StepShape(decodes=1, context=known))
    assert RemainingTime(ExecutionTime(COST), forecast_tokens).seconds(request, known) == pytest.approx(10 * decode)


def test_forecasts_default_to_a_constant_and_are_capped_at_max_tokens() -> None:
    assert forecast_tokens(make(0, max_tokens=100)) == NO_FORECAST_TOKENS
    assert forecast_tokens(make(0, max_tokens=5)) == 5
    assert forecast_tokens(make(0, max_tokens=5, forecast=Forecast(80, "test"))) == 5
    assert forecast_tokens(make(0, max_tokens=5, forecast=Forecast(0, "test"))) == 1


def test_remaining_time_grows_with_context_and_uncomputed_prompts() -> None:
    value = RemainingTime(ExecutionTime(COST), forecast_tokens)
    short, long = forecasted(100, prompt=10), forecasted(100, prompt=5000)
    assert value.seconds(long, long.progress.known) > 4 * value.seconds(short, short.progress.known)
    computed = value.seconds(short, short.progress.known)
    short.progress.computed = 0
    assert value.seconds(short, short.progress.known) == pytest.approx(computed + 10 * ExecutionTime(COST).t0)


def test_execution_time_fits_linear_costs_and_follows_a_learning_cost() -> None:
    time = ExecutionTime(COST)
    assert (time.alpha, time.beta) == pytest.approx((COST.context_token, COST.floor + COST.decode))
    assert COST.prefill_token < time.t0 < 1.1 * COST.prefill_token
    assert time.quality == pytest.approx((1, 1), abs=1e-3)
    learning = LearningCost(COST)
    time = ExecutionTime(learning)
    before, revision = time.decode(100), time.revision
    for _ in range(50):
        learning.learn(StepShape(decodes=1, context=100), 2 * COST.step(StepShape(decodes=1, context=100)))
    assert time.revision > revision
    assert time.decode(100) > 1.5 * before


@given(tokens=st.integers(2, 5000), aging_s=st.floats(0.1, 1000), early=st.floats(0.001, 100))
def test_aging_bounds_overtaking_by_the_ratio_of_remaining_times(tokens: int, aging_s: float, early: float) -> None:
    """Until it exceeds its forecast, a request is not overtaken by one that arrives after the bound."""
    value = RemainingTime(ExecutionTime(COST), forecast_tokens, aging_s=aging_s)
    ordering = Valued(value)
    old, shortest = forecasted(tokens), forecasted(1)
    bound = aging_s * math.log(
        value.seconds(old, old.progress.known) / value.seconds(shortest, shortest.progress.known)
    )
    ordering.on_arrived(old, 0.0)
    for number, arrival in enumerate((bound + 1e-6 * aging_s, bound * 1.5 + early), 1):
        incoming = forecasted(1, number, arrival=arrival)
        ordering.on_arrived(incoming, arrival)
        assert not ordering.outranks(incoming, old)
    ordering.on_scheduled([Slice(old, 9, 1, True, False, ())], bound)
    assert not ordering.outranks(incoming, old)


def test_without_aging_only_the_remaining_time_counts() -> None:
    ordering = Valued(RemainingTime(ExecutionTime(COST), forecast_tokens))
    old, incoming = forecasted(101), forecasted(100, 1, arrival=1e9)
    for request in (old, incoming):
        ordering.on_arrived(request, request.arrival)
    assert ordering.outranks(incoming, old)


def test_the_quantile_of_a_forecast_distribution_is_used_if_present() -> None:
    mass = [0.0] * length_bin(64) + [0.5, 0.0, 0.5]  # half of 64 to 90 tokens, half of 128 to 180
    request = make(0, 10, 1000, forecast=Forecast(110, "test", tuple(mass)))
    points = [ForecastQuantile(level)(request) for level in (0.01, 0.3, 0.5, 0.7, 0.99)]
    assert points == sorted(points)
    assert 64 <= points[0] < 66
    assert points[2] == pytest.approx(91, abs=1)
    assert 178 < points[4] <= 181
    request.progress.forecast = Forecast(110, "test", tuple(mass[:-2]))  # a new forecast: the shorter half alone
    assert ForecastQuantile(0.99)(request) < 91
    request.progress.forecast = Forecast(110, "test")
    assert ForecastQuantile(0.3)(request) == 110
    assert ForecastQuantile(0.3)(make(0, 10, 5, forecast=Forecast(110, "test", tuple(mass)))) == 5


WORK = st.lists(st.tuples(st.floats(-1e5, 1e5), st.floats(0.01, 100)), min_size=1, max_size=600)


@given(work=WORK, kept=st.integers(0, 600))
def test_a_backlog_sums_work_before_a_key_to_within_a_bucket(work: list[tuple[float, float]], kept: int) -> None:
    backlog = Backlog(0.25)
    for key, seconds in work:
        backlog.add(key, seconds)
    for key, seconds in work[kept:]:
        backlog.remove(key, seconds)
    left = work[:kept]
    keys = sorted(key for key, _ in work)
    width = 4 * (keys[-1] - keys[0]) / 256 + 0.5  # upper bound, as the number of sums is limited
    for key, before in zip(keys, backlog.before(keys), strict=True):
        assert before <= sum(seconds for other, seconds in left if other < key) + 1e-6
        assert before >= sum(seconds for other, seconds in left if other < key - width) - 1e-6
    assert len(backlog._sums) <= 256


@pytest.mark.parametrize(("aging_s", "turns"), [(math.inf, [0, 11, 33]), (10.0, [0, 11, 33]), (1.0, [0, 7.6, 8])])
def test_a_turn_is_the_work_ahead_unless_aging_makes_it_sooner(aging_s: float, turns: list[float]) -> None:
    """One request runs at a time. The work is 11, 22 and 33 s; aging outweighs a factor of at least 1000."""
    cost = LinearCost(floor=0.01, prefill_token=1e-3, decode=1e-3)
    ordering = ShortestWithWaits(RemainingTime(ExecutionTime(cost), forecast_tokens, aging_s=aging_s))
    grain_s = 12 * 0.011
    first, second, last = (forecasted(tokens, number) for number, tokens in enumerate((1000, 2000, 3000)))
    for request in (first, second, last):
        ordering.on_arrived(request, 0.0)
    ordering.on_scheduled([Slice(first, 9, 1, True, False, ())], 0.0)
    found = ordering.expected_order([last, first, second], 0.0)
    assert [request for _, request in found] == [first, second, last]
    assert [turn * grain_s for turn, _ in found] == pytest.approx(turns, abs=grain_s)
