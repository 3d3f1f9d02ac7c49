from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.config import ConfigError
from skipjoin.report.bound import Bound, Bounds, MaximumRate, field_value, maximum_rate, parse_bound
from skipjoin.report.results import Record

LIMIT = 1.0
AT_MOST = Bound("ttft_s.mean", "<=", LIMIT)
VALUES = st.floats(0.01, 100)
CURVES = st.dictionaries(st.integers(1, 50).map(float), VALUES, min_size=1, max_size=8)


def record(value: float | None) -> Record:
    return {"recipe": "fcfs", "ttft_s": {"mean": value, "p95": None}, "slo": {"all_attained": 1}, "done": True}


def points(curve: dict[float, float]) -> dict[float, list[Record]]:
    return {rate: [record(value)] for rate, value in curve.items()}


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("normalized_latency_s.mean<=0.3", Bound("normalized_latency_s.mean", "<=", 0.3)),
        (" slo.all_attained >= 9e-1 ", Bound("slo.all_attained", ">=", 0.9)),
        ("classes.best-effort.ttft_s.p95<2", Bound("classes.best-effort.ttft_s.p95", "<", 2)),
        ("throughput_rps>-1", Bound("throughput_rps", ">", -1)),
    ],
)
def test_a_bound_round_trips_through_its_text(text: str, bound: Bound) -> None:
    assert parse_bound(text) == bound
    assert parse_bound(str(bound)) == bound


@pytest.mark.parametrize("text", ["", "ttft_s.mean", "ttft_s.mean=1", "<=1", "a<=b<=1", "a b<=1", "a<=", "a==1"])
def test_invalid_bounds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="bound must read FIELD<=NUMBER"):
        parse_bound(text)


@pytest.mark.parametrize("limit", ["x", "nan", "inf", "1s"])
def test_the_limit_must_be_a_finite_number(limit: str) -> None:
    with pytest.raises(ConfigError, match=f"must be a finite number, got '{limit}'"):
        parse_bound(f"ttft_s.mean<={limit}")


@pytest.mark.parametrize(
    ("sign", "below", "at", "above"),
    [("<=", True, True, False), ("<", True, False, False), (">=", False, True, True), (">", False, False, True)],
)
def test_each_operator_compares_correctly(sign: str, below: bool, at: bool, above: bool) -> None:
    bound = Bound("ttft_s.mean", sign, LIMIT)
    assert [bound.allows(bound.value(record(value))) for value in (0.9, 1.0, 1.1)] == [below, at, above]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("ttft_s.maen", r"no field ttft_s\.maen; nearest: ttft_s\.mean"),
        ("ttft_s", r"ttft_s is not a number; nearest: ttft_s\.mean, ttft_s\.p95$"),
        ("ttft_s.mean.x", r"no field ttft_s\.mean\.x"),
        ("ttft_s.p95", r"ttft_s\.p95 is null"),
        ("recipe", "recipe is not a number"),
        ("done", "done is not a number"),
        ("zzz", r"the results have no field zzz; they have .*ttft_s\.mean, ttft_s\.p95$"),
    ],
)
def test_a_field_that_is_not_a_number_is_refused_with_suggestions(field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        field_value(record(1.0), field)


def test_the_maximum_rate_is_interpolated_between_means_over_seeds() -> None:
    measured = points({1.0: 0.2, 2.0: 0.6}) | {3.0: [record(1.0), record(1.8)]}  # the mean is 1.4
    assert maximum_rate(measured, AT_MOST) == MaximumRate(2.5, at_least=False)


def test_lower_bounds_are_interpolated() -> None:
    assert maximum_rate(points({1.0: 3.0, 2.0: -1.0}), Bound("ttft_s.mean", ">=", LIMIT)) == MaximumRate(1.5, False)


def test_bounds_that_always_or_never_hold_have_no_interpolated_rate() -> None:
    found = maximum_rate(points({1.0: 0.2, 4.0: 0.9}), AT_MOST)
    assert found == MaximumRate(4.0, at_least=True)
    assert str(found) == "≥ 4"
    assert maximum_rate(points({1.0: 1.2, 4.0: 0.9}), AT_MOST) is None
    assert maximum_rate({}, AT_MOST) is None


def test_null_values_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"ttft_s\.mean is null"):
        maximum_rate({1.0: [record(0.5), record(None)]}, AT_MOST)


@given(curve=CURVES)
def test_the_curve_meets_the_bound_at_the_maximum_rate(curve: dict[float, float]) -> None:
    found = maximum_rate(points(curve), AT_MOST)
    rates = sorted(curve)
    if found is None:
        assert curve[rates[0]] > LIMIT
        return
    assert all(curve[rate] <= LIMIT for rate in rates if rate < found.rate_rps)
    if found.at_least:
        assert found.rate_rps == rates[-1]
        assert curve[rates[-1]] <= LIMIT
        return
    after = next(rate for rate in rates if curve[rate] > LIMIT)
    before = rates[rates.index(after) - 1]
    assert before <= found.rate_rps <= after
    share = (found.rate_rps - before) / (after - before)
    assert math.isclose(curve[before] + share * (curve[after] - curve[before]), LIMIT, rel_tol=1e-6)


@given(curve=CURVES, looser=st.floats(LIMIT, 50))
def test_a_looser_bound_never_gives_a_smaller_rate(curve: dict[float, float], looser: float) -> None:
    curve[min(curve)] = min(curve[min(curve)], LIMIT)  # which the tight bound allows
    tight = maximum_rate(points(curve), AT_MOST)
    loose = maximum_rate(points(curve), Bound(AT_MOST.field, "<=", looser))
    assert loose.rate_rps >= tight.rate_rps * (1 - 1e-9)


BOTH = Bounds((AT_MOST, Bound("slo.all_attained", ">=", 0.5)))


def test_combined_bounds_hold_up_to_the_lowest_of_their_rates() -> None:
    measured = points({1.0: 0.2, 2.0: 0.6, 4.0: 1.4})
    measured[2.0][0]["slo"] = {"all_attained": 0.0}
    assert maximum_rate(measured, AT_MOST) == MaximumRate(3.0, at_least=False)
    assert BOTH.maximum_rate(measured) == MaximumRate(1.5, at_least=False)
    assert [BOTH.hold(records) for records in measured.values()] == [True, False, False]
    measured[1.0][0]["slo"] = {"all_attained": 0.0}
    assert BOTH.maximum_rate(measured) is None


def test_combined_bounds_need_the_most_of_their_replicas() -> None:
    sizes = {1: [record(3.0)], 2: [record(0.9)], 3: [record(0.5)]}
    assert BOTH.minimum_replicas(sizes) == 2
    sizes[2][0]["slo"] = {"all_attained": 0.0}
    assert BOTH.minimum_replicas(sizes) == 3
    assert BOTH.minimum_replicas({1: [record(3.0)]}) is None


def test_a_null_objective_names_the_options_that_set_it() -> None:
    with pytest.raises(ConfigError, match=r"slo\.all_attained is null, because .* set --slo-ttft"):
        field_value({"slo": {"all_attained": None}}, "slo.all_attained")
