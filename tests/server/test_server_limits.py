"""The queue's limits as a unit: counts return to zero whatever happens, and Retry-After follows the throughput."""

from __future__ import annotations

import contextlib
import random
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.limits import Admission, AdmissionSlot, estimate_tokens
from skipjoin.server.metrics import Metrics


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


METRICS = Metrics()


@given(st.lists(st.tuples(st.integers(0, 50), st.lists(st.sampled_from(["start", "size", "end"]), max_size=4))))
def test_counts_stay_within_limits_and_return_to_zero(requests: list[tuple[int, list[str]]]) -> None:
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
                # A text may have four times as many tokens as it was taken for.
                with contextlib.suppress(ApiError):
                    admission.resize([place], [0 if act in acts[:1] else 4 * tokens])
                assert admission.tokens <= 100
            else:
                place.ended()
    for place in places:
        place.ended()
        place.started()  # it is told late
    assert (admission.requests, admission.tokens, admission.runs) == (0, 0, 0)


def test_prompt_larger_than_its_estimate_is_refused() -> None:
    admission = Admission(5, 100, METRICS, Clock())
    slots = admission.reserve([10, 10])
    with pytest.raises(
        ApiError, match=r"at most 75 tokens, .* for best-effort requests; they have about 80"
    ) as refused:
        admission.resize(slots, [40, 40], is_best_effort=True)
    assert refused.value.status == 400
    admission.resize(slots, [40, 40])
    late = admission.reserve([10])
    with pytest.raises(ApiError, match="the queue is full: 90 of 100 prompt tokens wait") as refused:
        admission.resize(late, [40])
    assert refused.value.status == 429
    admission.resize(late, [20])
    assert admission.tokens == 100


def test_sequences_are_admitted_together_or_not_at_all() -> None:
    admission = Admission(3, 100, METRICS, Clock())
    admission.reserve([1, 1])
    with pytest.raises(ApiError, match="the queue is full"):
        admission.reserve([1, 1])
    assert admission.requests == 2


def test_best_effort_flood_leaves_room_for_other_requests() -> None:
    admission = Admission(8, 100, METRICS, Clock())
    with pytest.raises(ApiError, match="at most 6, the requests this server queues for best-effort requests, got 7"):
        admission.reserve([1] * 7, is_best_effort=True)
    admission.reserve([1] * 6, is_best_effort=True)
    with pytest.raises(ApiError, match="full for best-effort requests: 6 of 6 requests"):
        admission.reserve([1], is_best_effort=True)
    (place,) = admission.reserve([75])
    place.ended()
    admission.reserve([1] * 2)
    assert admission.requests == 8


def retry_after(admission: Admission, *tokens: int) -> int:
    """What a client is told that sends so many prompts."""
    with pytest.raises(ApiError, match="the queue is full") as refused:
        admission.reserve(tokens)
    return int(refused.value.headers["Retry-After"])


@pytest.mark.parametrize("seconds_each", [0.05, 2.6, 30.0])
def test_retry_after_is_the_time_until_enough_requests_finish(seconds_each: float) -> None:
    """Whether the server was just started, was idle for a day since, or has run at its limit for long."""
    clock = Clock()
    admission = Admission(10, 10_000, METRICS, clock)
    for pause in (0.0, 86_400.0):
        clock.now += pause
        slots = deque(admission.reserve([10] * 10))
        for _ in range(60):
            clock.now += seconds_each
            oldest = slots.popleft()
            oldest.started()
            oldest.ended()
            slots += admission.reserve([10])
            for excess in (1, 4):
                assert abs(retry_after(admission, *[10] * excess) - min(max(1, excess * seconds_each), 60)) <= 1
        while slots:
            clock.now += seconds_each
            slots.popleft().ended()


def test_retry_after_follows_requests_that_finish_together() -> None:
    clock = Clock()
    admission = Admission(10, 10_000, METRICS, clock)
    for _ in range(8):
        slots = admission.reserve([10] * 10)
        for slot in slots:
            slot.started()
        clock.now += 4.0
        for slot in slots:
            slot.ended()
    for slot in admission.reserve([10] * 10):
        slot.started()
    assert retry_after(admission, 10) == 6  # 30 % more than 4
    clock.now += 1.5
    assert retry_after(admission, 10) == 4
    clock.now += 8.5  # 6 s later than those before
    assert retry_after(admission, 10) == 8


LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "fixed": lambda draw: 150,
    "uniform": lambda draw: draw.randint(50, 250),
    "exponential": lambda draw: 1 + int(draw.expovariate(1 / 149)),
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("factor", [2, 5, 10])
def test_retry_after_is_accurate_when_load_rises_suddenly(factor: int, lengths: str) -> None:
    """Load rises from a third of the capacity to a multiple of it, and steps take longer the more sequences run."""
    clock, draw = Clock(), random.Random(factor)
    live: list[tuple[int, int, AdmissionSlot]] = []  # last step, number of the request, slot
    made = 0
    admission = Admission(64, 10_000, METRICS, clock, lambda: made)
    told: list[tuple[float, int]] = []
    taken: list[float] = []

    def arrive() -> None:
        try:
            (slot,) = admission.reserve([1])
        except ApiError as refused:
            told.append((clock.now, int(refused.headers["Retry-After"])))
        else:
            taken.append(clock.now)
            slot.started()
            heappush(live, (made + LENGTHS[lengths](draw), len(taken), slot))

    due = 0.0
    while due < 60:
        due += draw.expovariate((1 / 3 if due < 30 else factor) * 64 / (150 * 0.074))
        while clock.now < due:
            clock.now += (0.01 + 0.001 * len(live)) * draw.uniform(0.8, 1.2)
            made += 1
            while live and live[0][0] <= made:
                heappop(live)[2].ended()
        arrive()
    pairs = [(taken[at] - when, said) for when, said in told if (at := bisect_right(taken, when)) < len(taken)]
    assert len(pairs) > 80
    assert sum(true <= said for true, said in pairs) >= 0.95 * len(pairs)
    assert statistics.median(said for _, said in pairs) <= 2 * statistics.median(true for true, _ in pairs) + 1


def test_retry_after_is_the_elapsed_time_before_any_request_finishes() -> None:
    clock = Clock()
    admission = Admission(1, 10_000, METRICS, clock)
    admission.reserve([10])
    told = []
    for clock.now in (0.0, 2.5, 10.0, 500.0):
        told.append(retry_after(admission, 10))
    assert told == [1, 3, 10, 60]


def test_retry_after_follows_prompt_tokens_if_they_fill_the_queue() -> None:
    clock = Clock()
    admission = Admission(100, 1000, METRICS, clock)
    slots = admission.reserve([100] * 10)
    for slot in slots[:4]:
        clock.now += 5.0
        slot.started()
    assert retry_after(admission, 600) == 10  # 200 more tokens than there is room for; 20 start in a second


def test_estimate_needs_no_tokenizer() -> None:
    assert estimate_tokens([1, 2, 3]) == 3
    assert estimate_tokens("four") == 1
    assert estimate_tokens("€€€€") == 3
    assert estimate_tokens("") == 0
