from __future__ import annotations

import random
import statistics
from collections import Counter
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.config import ConfigError
from skipjoin.workload.arrivals import parse_arrivals

PATTERNS = ("poisson", "constant", "gamma:0.5", "gamma:3", "burst:10,0.1,50")
every_pattern = pytest.mark.parametrize("text", PATTERNS)
TEXTS = st.one_of(
    st.sampled_from(PATTERNS),
    st.floats(0.01, 100).map("gamma:{}".format),
    st.tuples(st.floats(1, 1e6), st.floats(1e-9, 0.99), st.floats(0.1, 1e9)).map(
        lambda numbers: "burst:" + ",".join(map(str, numbers))
    ),
)


def draw(text: str, count: int, seed: int = 0) -> list[float]:
    return list(islice(parse_arrivals(text).times(random.Random(seed)), count))


def gaps(text: str, count: int, seed: int = 0) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *draw(text, count, seed)])]


@every_pattern
def test_the_mean_rate_is_one(text: str) -> None:
    assert statistics.fmean(draw(text, 4000, seed)[-1] / 4000 for seed in range(10)) == pytest.approx(1, rel=0.05)


@every_pattern
def test_the_mean_rate_is_one_from_the_beginning(text: str) -> None:
    """A pattern that always began outside a burst, for example, would be too slow at first."""
    early = [sum(time <= 20 for time in draw(text, 400, seed)) for seed in range(1500)]
    # A renewal process that starts right after an arrival stays ahead by (CV**2 - 1) / 2 arrivals.
    ahead = {"gamma:3": (9 - 1) / 2, "gamma:0.5": (0.25 - 1) / 2}.get(text, 0)
    assert statistics.fmean(early) == pytest.approx(20 + ahead, rel=0.06)


@pytest.mark.parametrize(("text", "cv"), [("poisson", 1), ("gamma:0.5", 0.5), ("gamma:1", 1), ("gamma:3", 3)])
def test_gaps_have_the_requested_coefficient_of_variation(text: str, cv: float) -> None:
    between = gaps(text, 40_000)
    assert statistics.pstdev(between) / statistics.fmean(between) == pytest.approx(cv, rel=0.05)


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert draw("constant", 4) == [1, 2, 3, 4]


def test_bursts_have_the_requested_factor_share_and_length() -> None:
    """Counted per second, a burst of 50 s at ten times the base rate stands out and takes a tenth of the time."""
    counts = Counter(int(time) for time in draw("burst:10,0.1,50", 40_000))
    windows = [sum(counts[start + second] for second in range(10)) for start in range(0, max(counts), 10)]
    # There are 53 arrivals per 10 s inside a burst and 5.3 outside; 25 is many standard deviations from both.
    high = [window for window in windows if window > 25]
    low = [window for window in windows if window <= 25]
    assert len(high) / len(windows) == pytest.approx(0.1, abs=0.02)
    assert statistics.fmean(high) > 8 * statistics.fmean(low)
    runs = sum(later > 25 >= earlier for earlier, later in pairwise(windows))
    assert 10 * len(high) / runs == pytest.approx(50, rel=0.2)


def test_bursts_of_factor_one_are_poisson() -> None:
    between = gaps("burst:1,0.5,10", 40_000)
    assert statistics.pstdev(between) / statistics.fmean(between) == pytest.approx(1, rel=0.03)


@given(text=TEXTS, seed=st.integers(0, 10_000))
def test_times_never_decrease_and_depend_on_the_seed_only(text: str, seed: int) -> None:
    times = draw(text, 200, seed)
    assert all(earlier <= later for earlier, later in pairwise([0.0, *times]))
    assert draw(text, 300, seed)[:200] == times


@every_pattern
def test_the_name_parses_to_the_same_arrivals(text: str) -> None:
    arrivals = parse_arrivals(f" {text} ")
    assert arrivals.name == text
    assert parse_arrivals(arrivals.name) == arrivals


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poison", "no 'poison'; did you mean poisson?"),
        ("uniform-gaps", "choose from burst, constant, gamma, poisson"),
        ("poisson:2", "poisson takes no numbers"),
        ("gamma", "the CV of gamma must be a number, got ''"),
        ("gamma:0", "the CV of gamma must be in (1e-06, 100], got 0.0"),
        ("gamma:nan", "got nan"),
        ("burst:5,0.1", "FACTOR,SHARE,LENGTH"),
        ("burst:0.5,0.1,20", "a FACTOR of at least 1"),
        ("burst:5,1,20", "a SHARE below 1"),
        ("burst:5,1.5,20", "the SHARE of burst must be in (0, 1], got 1.5"),
        ("burst:5,0.1,inf", "the LENGTH of burst must be in (0.01, 1e+09], got inf"),
    ],
)
def test_errors_name_the_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arrivals(text)
    assert message in str(caught.value)
