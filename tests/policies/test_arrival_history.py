"""The estimate of what is still to arrive: what raises it, and what it forgets."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from itertools import cycle, islice

import pytest

from skipjoin.policies.arrivals import ArrivalHistory
from support.load import make


class Told:
    """A history that was told of arrivals with these prompts in turn, and the time of the last one."""

    def __init__(self, *prompts: int) -> None:
        self.history = ArrivalHistory()
        self.now = 0.0
        self._count = 0
        self._prompts = cycle(prompts)

    def arrive(self, gaps: Iterable[float]) -> Told:
        """One arrival after each gap."""
        for gap in gaps:
            self.now += gap
            self._count += 1
            self.history.note(make(self._count, next(self._prompts)), self.now)
        return self

    def tokens(self, seconds: float = 10.0, silence: float = 0.0) -> float:
        return self.history.tokens_within(seconds, self.now + silence)


def gamma_gaps(seed: int, mean: float, cv: float) -> Iterable[float]:
    """Gaps of a Gamma process, without end."""
    draw = random.Random(seed)
    while True:
        yield draw.gammavariate(1 / cv**2, mean * cv**2)


def typical(cv: float, *prompts: int) -> float:
    """The estimate for ten seconds at an arrival per second, averaged over 4000 arrivals."""
    gaps = gamma_gaps(1, 1.0, cv)
    told = Told(*prompts).arrive(islice(gaps, 200))
    estimates = [told.arrive(islice(gaps, 1)).tokens() for _ in range(4000)]
    return sum(estimates) / len(estimates)


def test_nothing_is_known_before_the_second_arrival() -> None:
    told = Told(100)
    assert told.tokens() == 0.0
    assert told.arrive([1.0]).tokens() == 0.0
    assert told.arrive([1.0]).tokens() > 0.0


def test_even_arrivals_of_even_lengths_are_expected_exactly() -> None:
    told = Told(100).arrive([2.0] * 300)
    assert told.tokens(10.0) == pytest.approx(500.0)
    assert told.tokens(0.0) == 0.0


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_the_estimate_follows_the_rate(cv: float) -> None:
    """The same arrivals, ten times as fast: ten times the mean, and the spread of ten times as many."""
    gaps = list(islice(gamma_gaps(2, 1.0, cv), 500))
    slow = Told(100).arrive(gaps).tokens(10.0)
    fast = Told(100).arrive([gap / 10 for gap in gaps]).tokens(10.0)
    assert 3 * slow < fast <= 10 * slow * (1 + 1e-9)
    assert fast == pytest.approx(Told(100).arrive(gaps).tokens(100.0))


def test_the_estimate_grows_with_burstiness() -> None:
    calm, poisson, bursts = (typical(cv, 100) for cv in (0.1, 1.0, 4.0))
    assert 1.2 * calm < poisson < bursts / 1.5


def test_the_estimate_grows_with_uneven_lengths() -> None:
    even, uneven, wild = (typical(0.1, *prompts) for prompts in ([100], [50, 150], [1, 1, 1, 397]))
    assert 1.1 * even < uneven < wild / 1.2


def test_more_than_the_mean_is_expected_by_two_deviations() -> None:
    """Poisson arrivals of one length: the number in a window has its mean as variance."""
    assert typical(1.0, 100) == pytest.approx(100 * (10 + 2 * math.sqrt(10)), rel=0.1)


def test_what_is_long_past_is_forgotten() -> None:
    calm = Told(100).arrive([2.0] * 500).tokens()
    flood = Told(*[800] * 500, *[100] * 500).arrive([0.01] * 500)
    before = flood.tokens()
    after = flood.arrive([2.0] * 500).tokens()
    assert after == pytest.approx(calm, rel=1e-3)
    assert before > 100 * after


def test_a_silence_lowers_the_estimate() -> None:
    told = Told(100).arrive([1.0] * 100)
    estimates = [told.tokens(silence=silence) for silence in (0.0, 1.0, 2.0, 10.0, 1000.0)]
    assert estimates[0] == estimates[1], "a gap no longer than usual tells nothing"
    assert estimates[1:] == sorted(estimates[1:], reverse=True)
    assert estimates[2] == pytest.approx(estimates[1] / 2)
    assert estimates[-1] < estimates[0] / 500


def test_all_at_once_is_no_error() -> None:
    told = Told(100).arrive([0.0] * 50)
    assert math.isfinite(told.tokens())
    assert told.tokens(silence=1.0) == pytest.approx(1000.0)
