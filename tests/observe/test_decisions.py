from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.observe.decisions import DecisionTimes


@given(st.lists(st.floats(1e-7, 10.0), min_size=1, max_size=300))
def test_the_summary_covers_all_schedulers(seconds: list[float]) -> None:
    schedulers = [DecisionTimes() for _ in range(3)]
    for number, one in enumerate(seconds):
        schedulers[number % 3].add(one)
    found = DecisionTimes.summary(schedulers)
    assert found["mean"] == pytest.approx(1000 * fmean(seconds))
    # The longest time after the longest 1 % are left out.
    assert found["p99"] == pytest.approx(1000 * sorted(seconds, reverse=True)[len(seconds) // 100], rel=0.022)


def test_the_summary_without_decisions_is_none() -> None:
    assert DecisionTimes.summary([DecisionTimes()]) == {"mean": None, "p99": None}
