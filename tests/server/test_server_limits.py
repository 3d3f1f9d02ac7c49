"""The queue's limits as a unit: counts return to zero whatever happens, and Retry-After follows the throughput."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.limits import Admission, estimate_tokens
from skipjoin.server.metrics import Metrics


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


METRICS = Metrics()


@given(st.lists(st.tuples(st.integers(0, 50), st.lists(st.sampled_from(["start", "size", "end"]), max_size=4))))
def test_counts_never_pass_the_caps_and_come_home(requests: list[tuple[int, list[str]]]) -> None:
    admission = Admission(5, 100, METRICS, Clock())
    places = []
    for tokens, acts in requests:
        if admission.requests + 1 > 5 or admission.tokens + tokens > 100:
            with pytest.raises(ApiError, match="the queue is full") as refused:
                admission.reserve([tokens])
            assert 1 <= int(refused.value.headers["Retry-After"]) <= 60
            continue
        (place,) = admission.reserve([tokens])
        assert admission.requests <= 5
        assert admission.tokens <= 100
        places.append(place)
        for act in acts:
            if act == "start":
                place.started()
            elif act == "size":
                place.resize(0 if act in acts[:1] else tokens)
            else:
                place.ended()
    for place in places:
        place.ended()
    assert (admission.requests, admission.tokens) == (0, 0)


def test_all_or_none() -> None:
    admission = Admission(3, 100, METRICS, Clock())
    admission.reserve([1, 1])
    with pytest.raises(ApiError, match="the queue is full"):
        admission.reserve([1, 1])
    assert admission.requests == 2


def test_retry_after_follows_the_throughput() -> None:
    clock = Clock()
    admission = Admission(100, 10_000, METRICS, clock)
    first = admission.reserve([10] * 100)
    with pytest.raises(ApiError) as idle:
        admission.reserve([10])
    assert idle.value.headers["Retry-After"] == "60"  # nothing has ended yet: nobody knows
    for number in range(90):
        clock.now += 1.0
        first[number].started()
        first[number].ended()
    places = admission.reserve([10] * 90)
    with pytest.raises(ApiError) as busy:
        admission.reserve([10] * 5)
    assert 4 <= int(busy.value.headers["Retry-After"]) <= 6  # about one request a second ends
    assert len(places) == 90


def test_estimate_costs_no_tokenising() -> None:
    assert estimate_tokens([1, 2, 3]) == 3
    assert estimate_tokens("four") == 1
    assert estimate_tokens("€€€€") == 3
    assert estimate_tokens("") == 0
