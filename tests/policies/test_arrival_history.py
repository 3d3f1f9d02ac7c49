from __future__ import annotations

import math
import random
from collections.abc import Iterable
from itertools import cycle, islice

import pytest

from skipjoin.policies.arrivals import ArrivalHistory
from support.load import make


class Arrivals:
    """An arrival history that was notified of requests whose prompt lengths cycle through `prompts`."""

    def __init__(self, *prompts: int) -> None:
        self.history = ArrivalHistory()
        self.now = 0.0
        self._count = 0
        self._prompts = cycle(prompts)

    def arrive(self, gaps: Iterable[float]) -> Arrivals:
        for gap in gaps:
            self.now += gap
            self._count += 1
            self.history.note(make(self._count, next(self._prompts)), self.now)
        return self

    def tokens(self, seconds: float = 10.0, silence: float = 0.0) -> float:
        return self.history.tokens_within(seconds, self.now + silence)


def gamma_gaps(seed: int, mean: float, cv: float) -> Iterable[float]:
    draw = random.Random(seed)
    while True:
        yield draw.gammavariate(1 / cv**2, mean * cv**2)


def mean_estimate(cv: float, *prompts: int) -> float:
    """Return the estimate for 10 s at one arrival per second, averaged over 4000 arrivals."""
    gaps = gamma_gaps(1, 1.0, cv)
    arrivals = Arrivals(*prompts).arrive(islice(gaps, 200))
    estimates = [arrivals.arrive(islice(gaps, 1)).tokens() for _ in range(4000)]
    return sum(estimates) / len(estimates)


def test_the_estimate_is_zero_before_the_second_arrival() -> None:
    arrivals = Arrivals(100)
    assert arrivals.tokens() == 0.0
    assert arrivals.arrive([1.0]).tokens() == 0.0
    assert arrivals.arrive([1.0]).tokens() > 0.0


def test_regular_arrivals_of_one_length_are_estimated_exactly() -> None:
    arrivals = Arrivals(100).arrive([2.0] * 300)
    assert arrivals.tokens(10.0) == pytest.approx(500.0)
    assert arrivals.tokens(0.0) == 0.0


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_the_estimate_grows_with_the_arrival_rate(cv: float) -> None:
    """Ten times as fast means ten times the mean, but not ten times the standard deviation."""
    gaps = list(islice(gamma_gaps(2, 1.0, cv), 500))
    slow = Arrivals(100).arrive(gaps).tokens(10.0)
    fast = Arrivals(100).arrive([gap / 10 for gap in gaps]).tokens(10.0)
    assert 3 * slow < fast <= 10 * slow * (1 + 1e-9)
    assert fast == pytest.approx(Arrivals(100).arrive(gaps).tokens(100.0))


def test_the_estimate_grows_with_burstiness() -> None:
    calm, poisson, bursts = (mean_estimate(cv, 100) for cv in (0.1, 1.0, 4.0))
    assert 1.2 * calm < poisson < bursts / 1.5


def test_the_estimate_grows_with_the_variance_of_lengths() -> None:
    even, uneven, wild = (mean_estimate(0.1, *prompts) for prompts in ([100], [50, 150], [1, 1, 1, 397]))
    assert 1.1 * even < uneven < wild / 1.2


def test_the_estimate_is_the_mean_plus_two_standard_deviations() -> None:
    """With Poisson arrivals of one length, the variance of the count equals its mean."""
    assert mean_estimate(1.0, 100) == pytest.approx(100 * (10 + 2 * math.sqrt(10)), rel=0.1)


def test_old_arrivals_are_forgotten() -> None:
    calm = Arrivals(100).arrive([2.0] * 500).tokens()
    flood = Arrivals(*[800] * 500, *[100] * 500).arrive([0.01] * 500)
    before = flood.tokens()
    after = flood.arrive([2.0] * 500).tokens()
    assert after == pytest.approx(calm, rel=1e-3)
    assert before > 100 * after


def test_a_pause_in_arrivals_lowers_the_estimate() -> None:
    arrivals = Arrivals(100).arrive([1.0] * 100)
    estimates = [arrivals.tokens(silence=silence) for silence in (0.0, 1.0, 2.0, 10.0, 1000.0)]
    assert estimates[0] == estimates[1], "a gap of the usual length carries no information"
    assert estimates[1:] == sorted(estimates[1:], reverse=True)
    assert estimates[2] == pytest.approx(estimates[1] / 2)
    assert estimates[-1] < estimates[0] / 500


def test_simultaneous_arrivals_give_a_finite_estimate() -> None:
    arrivals = Arrivals(100).arrive([0.0] * 50)
    assert math.isfinite(arrivals.tokens())
    assert arrivals.tokens(silence=1.0) == pytest.approx(1000.0)
