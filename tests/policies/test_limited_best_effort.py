"""Limits on how much best-effort requests lengthen steps."""

from __future__ import annotations

import math
import random

import pytest

from skipjoin.core.context import StepContext
from skipjoin.core.policy_set import is_decode_invariant
from skipjoin.core.refusals import ALL_BEHIND_REAL_TIME, INCOMING_BEHIND_REAL_TIME, QUIET_S
from skipjoin.core.request import Request, Target
from skipjoin.policies.batching import Greedy
from skipjoin.policies.best_effort import LimitedBestEffort, Patience
from skipjoin.policies.cost import LinearCost
from support.load import make

# A step takes 10 ms, plus 1 ms per prompt token or decode.
COST = LinearCost(floor=0.01, prefill_token=1e-3, decode=1e-3)


def limited(*live: Request, now: float = 0.0) -> LimitedBestEffort:
    greedy = Greedy(100, 1000, chunked=False)
    batcher = LimitedBestEffort(greedy, Patience(COST), lambda request: request.is_best_effort)
    for request in live:
        batcher.on_arrived(request, now)
    return batcher


def begun(number: int, pending: int = 1) -> Request:
    request = make(number, 20 + pending, best_effort=True)
    request.progress.planned = request.progress.computed = 20
    return request


def step(batcher: LimitedBestEffort, requests: list[Request], now: float = 0.0) -> list[object]:
    builder = batcher.open(StepContext(now=now))
    found: list[object] = []
    for request in requests:
        verdict = builder.offer(request, request.progress.pending)
        if isinstance(verdict, int):
            builder.take(request, verdict)
        found.append(verdict)
    return found


@pytest.mark.parametrize(
    ("target", "seconds"),
    [
        (Target(), 0.2 * 0.41),  # of a prefill of 400 tokens
        (Target(ttft_s=0.2), 0.05),
        (Target(ttft_s=5.0), 0.2 * 0.41),  # its tokens must not take as long as the first one may
        (Target(ttft_s=0.2, tpot_s=0.03), 0.03),
        (Target(tpot_s=0.1), 0.1),
    ],
)
def test_best_effort_steps_are_short_while_real_time_requests_are_live(target: Target, seconds: float) -> None:
    chat, flood = make(0, 400, target=target), [begun(number) for number in range(1, 101)]
    verdicts = step(limited(chat, *flood), flood)
    n_taken = math.floor((seconds - 0.01) / 1e-3 + 1e-9)
    assert verdicts == [1] * n_taken + [ALL_BEHIND_REAL_TIME] * (100 - n_taken)


def test_best_effort_requests_lengthen_a_real_time_step_by_at_most_a_tenth() -> None:
    chat, flood = make(0, 190), [begun(number) for number in range(1, 101)]
    assert step(limited(chat, *flood), [chat, *flood]) == [190, *[1] * 20, *[ALL_BEHIND_REAL_TIME] * 80]


def test_best_effort_prompts_are_cut_to_the_time_limit() -> None:
    chat, batch, other = make(0, 400), make(1, 900, best_effort=True), make(2, 900, best_effort=True)
    first, second = step(limited(chat, batch, other), [batch, other])
    assert 72 - 16 <= first <= 72
    assert second is INCOMING_BEHIND_REAL_TIME


def test_a_minimal_chunk_runs_if_the_time_limit_allows_none() -> None:
    chat, batch = make(0, 1), make(1, 900, best_effort=True)
    assert step(limited(chat, batch), [batch]) == [16]


def test_after_the_last_real_time_request_prompts_stay_limited_for_some_time() -> None:
    chat, flood = make(0, 400), [begun(number) for number in range(1, 101)]
    prompt = make(101, 900, best_effort=True)
    batcher = limited(chat, *flood, prompt)
    assert step(batcher, flood).count(1) == 72
    batcher.on_finished(chat, 5.0)
    assert step(batcher, [prompt, *flood[1:]], now=5.0 + QUIET_S - 0.1) == [70, *[1] * 99]
    assert step(batcher, [prompt], now=5.0 + QUIET_S) == [900]


def test_the_limit_follows_the_least_patient_live_request() -> None:
    """A long prompt would otherwise let steps take long for the short chats after it."""
    long, short, flood = make(0, 4000), make(1, 400), [begun(number) for number in range(2, 102)]
    batcher = limited(long, *flood)
    long_s = batcher.patience.limit_s
    batcher.on_arrived(short, 1.0)
    short_s = batcher.patience.limit_s
    assert short_s < long_s
    assert step(batcher, flood).count(1) == 72
    batcher.on_finished(short, 2.0)
    assert batcher.patience.limit_s == long_s
    batcher.on_finished(long, 3.0)
    batcher.on_arrived(make(102, 400), 4.0)
    assert batcher.patience.limit_s == short_s


def test_the_limit_is_the_least_patience_of_many_live_requests() -> None:
    draw, patience = random.Random(0), Patience(COST)
    live = {make(1000, 1, target=Target(tpot_s=0.5)): 0.5}  # stays
    for request in live:
        patience.begin(request, 0.0)
    for number in range(3000):
        if draw.random() < 0.5:
            tpot_s = draw.choice([0.3, draw.uniform(0.1, 0.9)])
            request = make(number, 1, target=Target(tpot_s=tpot_s))
            live[request] = tpot_s
            patience.begin(request, 0.0)
        elif len(live) > 1:
            gone = draw.choice(list(live)[1:])
            del live[gone]
            patience.end(gone, 0.0)
        assert patience.limit_s == min(live.values())
    assert len(patience._values) <= 2 * len(live) + 256


def test_the_batcher_rests_without_best_effort_requests() -> None:
    batch = begun(1)
    batcher = limited(make(0), batch)
    assert not is_decode_invariant(batcher)
    batcher.on_finished(batch, 1.0)
    assert is_decode_invariant(batcher)
