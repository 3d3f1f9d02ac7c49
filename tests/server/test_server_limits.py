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
from support.waiting import Clock

METRICS = Metrics()


@given(st.lists(st.tuples(st.integers(0, 50), st.lists(st.sampled_from(["start", "size", "end"]), max_size=4))))
def test_counts_stay_within_limits_and_return_to_zero(requests: list[tuple[int, list[str]]]) -> None:
    admission = Admission(5, 100, METRICS, Clock())
    slots = []
    for tokens, events in requests:
        if admission.requests + 1 > 5 or admission.tokens + tokens > 100:
            with pytest.raises(ApiError, match="the queue is full") as refused:
                admission.reserve([tokens])
            assert 1 <= int(refused.value.headers["Retry-After"]) <= 60
            continue
        (slot,) = admission.reserve([tokens])
        assert admission.requests <= 5
        assert admission.tokens <= 100
        slots.append(slot)
        for event in events:
            if event == "start":
                slot.started()
            elif event == "size":
                # A text may have four times the estimated number of tokens.
                with contextlib.suppress(ApiError):
                    admission.resize([slot], [0 if event in events[:1] else 4 * tokens])
                assert admission.tokens <= 100
            else:
                slot.ended()
    for slot in slots:
        slot.ended()
        slot.started()  # The notification may arrive late.
    assert (admission.requests, admission.tokens, len(admission._runs)) == (0, 0, 0)


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
    (slot,) = admission.reserve([75])
    slot.ended()
    admission.reserve([1] * 2)
    assert admission.requests == 8


def retry_after(admission: Admission, *tokens: int) -> int:
    with pytest.raises(ApiError, match="the queue is full") as refused:
        admission.reserve(tokens)
    return int(refused.value.headers["Retry-After"])


@pytest.mark.parametrize("seconds_each", [0.05, 2.6, 30.0])
def test_retry_after_is_the_time_until_enough_requests_finish(seconds_each: float) -> None:
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
    assert retry_after(admission, 10) == 6  # 4 s and a margin of 30 %
    clock.now += 1.5
    assert retry_after(admission, 10) == 4
    clock.now += 8.5  # 6 s later than the previous requests
    assert retry_after(admission, 10) == 8


LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "fixed": lambda draw: 150,
    "uniform": lambda draw: draw.randint(50, 250),
    "exponential": lambda draw: 1 + int(draw.expovariate(1 / 149)),
}


@pytest.mark.parametrize(("slots", "lengths"), [(32, "fixed"), *((64, lengths) for lengths in LENGTHS)])
@pytest.mark.parametrize("factor", [2, 5, 10])
def test_retry_after_is_accurate_when_load_rises_suddenly(factor: int, slots: int, lengths: str) -> None:
    """Load rises from a third of the capacity to `factor` times the capacity."""
    clock, draw = Clock(), random.Random(factor)
    live: list[tuple[int, int, AdmissionSlot]] = []  # last step, request number, slot
    made = 0
    admission = Admission(slots, 10_000, METRICS, clock, lambda: made)
    refusals: list[tuple[float, int]] = []
    admissions: list[float] = []

    def arrive() -> None:
        try:
            (slot,) = admission.reserve([1])
        except ApiError as refused:
            refusals.append((clock.now, int(refused.headers["Retry-After"])))
        else:
            admissions.append(clock.now)
            slot.started()
            heappush(live, (made + LENGTHS[lengths](draw), len(admissions), slot))

    due = 0.0
    while due < 75:
        due += draw.expovariate((1 / 3 if due < 30 else factor) * slots / (150 * (0.01 + 0.001 * slots)))
        while clock.now < due:
            clock.now += (0.01 + 0.001 * len(live)) * draw.uniform(0.8, 1.2)
            made += 1
            while live and live[0][0] <= made:
                heappop(live)[2].ended()
        arrive()
    pairs = [
        (admissions[at] - when, retry_after_s)
        for when, retry_after_s in refusals
        if (at := bisect_right(admissions, when)) < len(admissions)
    ]
    assert len(pairs) > 100
    assert sum(true <= predicted for true, predicted in pairs) >= 0.95 * len(pairs)
    true_median, median = (statistics.median(column) for column in zip(*pairs, strict=True))
    assert median <= 2 * true_median + 1


def test_retry_after_is_the_elapsed_time_before_any_request_finishes() -> None:
    clock = Clock()
    admission = Admission(1, 10_000, METRICS, clock)
    admission.reserve([10])
    found = []
    for clock.now in (0.0, 2.5, 10.0, 500.0):
        found.append(retry_after(admission, 10))
    assert found == [1, 3, 10, 60]


def test_retry_after_follows_prompt_tokens_if_they_fill_the_queue() -> None:
    clock = Clock()
    admission = Admission(100, 1000, METRICS, clock)
    slots = admission.reserve([100] * 10)
    for slot in slots[:4]:
        clock.now += 5.0
        slot.started()
    assert retry_after(admission, 600) == 10  # The queue lacks room for 200 tokens, and 20 start per second.


def test_estimate_needs_no_tokenizer() -> None:
    assert estimate_tokens([1, 2, 3]) == 3
    assert estimate_tokens("four") == 1
    assert estimate_tokens("€€€€") == 3
    assert estimate_tokens("") == 0
