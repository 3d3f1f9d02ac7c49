from __future__ import annotations

import random
from itertools import count, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.kv.interface import MISS, Hit
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import Slice
from skipjoin.policies.adaptive import Adaptive
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.gittins import NOT_BEGUN, GittinsIndex, kind_of, prefill_bin
from support.load import make
from support.policies import COST, told_by

BLOCK = 4
TIME = ExecutionTime(COST)


def ordering_of(patience: float, *, first_share: float = 0.5) -> Adaptive:
    return Adaptive(GittinsIndex(COST, 4), overtaking_s=1e6, first_share=first_share, prompt_patience=patience)


class Steps:
    """Steps of up to 64 tokens and four requests in the order of the policy, with an empty ledger."""

    def __init__(self, ordering: Adaptive) -> None:
        self.ordering = ordering
        self.kv = KVLedger(1000, 0, BLOCK)
        self.live: list[Request] = []
        self.first_tokens: list[Request] = []

    def add(self, request: Request) -> None:
        self.live.append(request)
        self.ordering.on_arrived(request, request.arrival)

    def run(self, now: float) -> None:
        left, slices = 64, []
        self.ordering.on_begin(now, self.kv)
        for request in self.ordering.ranked(now):
            progress = request.progress
            tokens = min(left, progress.known - progress.computed)
            if not tokens or len(slices) == 4:
                break
            left -= tokens
            slices.append(
                Slice(request, progress.computed, tokens, progress.computed + tokens == progress.known, False, ())
            )
            progress.computed = progress.planned = progress.computed + tokens
        self.ordering.on_scheduled(slices, now)
        for slice_ in slices:
            if slice_.samples:
                self._sample(slice_.request, now)

    def _sample(self, request: Request, now: float) -> None:
        if not request.progress.output:
            self.first_tokens.append(request)
        request.progress.append(0)
        if request.progress.known >= request.max_total_tokens:
            request.progress.finish(FinishReason.STOP)
            self.live.remove(request)
            self.ordering.on_finished(request, now)


@given(seed=st.integers(0, 10**6), patience=st.floats(0, 40), first_share=st.sampled_from([0.05, 0.5, 1.0]))
def test_no_prompt_is_overtaken_for_longer_than_a_multiple_of_its_prefill(
    seed: int, patience: float, first_share: float
) -> None:
    """It holds whether or not first tokens precede other work, and the order is that of the ranks."""
    chance, now = random.Random(seed), 0.0
    steps = Steps(ordering_of(patience, first_share=first_share))
    ordering = steps.ordering
    for number in range(50):
        now += chance.expovariate(8.0)
        steps.add(make(number, chance.choice([2, 20, 150, 400]), 6, arrival=now))
        steps.run(now)
        ranked = list(ordering.ranked(now))
        assert ranked == sorted(steps.live, key=ordering.rank)
        waiting = [request for request in ranked if not request.progress.output]
        for place, later in enumerate(waiting):
            for earlier in waiting[place + 1 :]:
                allowed_s = patience * TIME.prompt(len(earlier.prompt))
                assert later.arrival <= earlier.arrival + allowed_s + 1e-6


def test_a_long_prompt_does_not_starve_behind_a_stream_of_short_ones() -> None:
    steps, now, numbers = Steps(ordering_of(30.0)), 0.0, count(1)
    steps.ordering._claims.ahead.share = 100.0  # all get claims to early first tokens
    steps.add(long := make(0, 300, 4))
    while not long.progress.output:
        now += 0.02
        for number in islice(numbers, 2):  # more than a step takes
            steps.add(make(number, 60, 2, arrival=now))
        steps.run(now)
        assert now < 60.0
    latest = max(request.arrival for request in steps.first_tokens if request is not long)
    assert 1.0 < latest <= 30.0 * TIME.prompt(300), "short ones overtook it, and none that arrived later"


def test_short_prompts_precede_chunks_of_long_ones() -> None:
    steps = Steps(ordering_of(30.0))
    steps.add(long := make(0, 200, 4))
    steps.run(0.0)
    assert 0 < long.progress.computed < 200
    steps.add(short := make(1, 8, 4, arrival=0.1))
    assert list(steps.ordering.ranked(0.1)) == [short, long]
    for step in range(3):
        steps.run(0.1 + step)
    assert steps.first_tokens[0] is short


def test_an_index_charges_the_uncached_part_of_a_prompt() -> None:
    index = GittinsIndex(COST, 4)
    long = make(0, 4000, 100)
    whole, cached = (kind_of(long, None, index.time, uncached) for uncached in (4000, 200))
    short = kind_of(make(1, 200, 100), None, index.time, 200)
    indices = [index.log_index(kind, NOT_BEGUN) for kind in (short, cached, whole)]
    assert indices == sorted(indices, reverse=True)
    assert index.prompt_s(whole) > 10 * index.prompt_s(cached) > 0


def with_prefix(number: int, prompt: list[int]) -> Request:
    return Request(number, float(number), prompt, 4, prefix=ContentPrefix(BLOCK))


def test_a_prefix_that_is_cached_while_a_request_waits_moves_it_forward() -> None:
    kv, ordering = KVLedger(200, 0, BLOCK), ordering_of(30.0)
    common = list(range(200))
    leader, follower = with_prefix(0, common), with_prefix(1, [*common, 1])
    other = make(2, 40, 4, arrival=2.0)
    for request in (leader, follower):
        kv.cache.await_prefix(request)
    for request in (leader, follower, other):
        ordering.on_arrived(request, 2.0)
    assert told_by(ordering, follower)["prefill ahead"] > 0
    before = told_by(ordering, follower)["own prefill"]
    kv.grow(leader, 200)
    leader.progress.computed = leader.progress.planned = 200
    kv.cache.offer(leader)
    for _ in range(4):
        ordering.on_begin(2.0, kv)
    assert list(ordering.ranked(2.0)).index(follower) < list(ordering.ranked(2.0)).index(other)
    assert told_by(ordering, follower)["own prefill"] < 0.1 * before


def test_every_cached_prefix_is_looked_up_within_64_steps() -> None:
    ordering, asked = ordering_of(30.0), set()

    def hit(request: Request) -> Hit:
        asked.add(request)
        return MISS

    kv = KVLedger(100, 0, BLOCK)
    kv.hit = hit
    requests = [with_prefix(number, [number] * 20) for number in range(300)]
    for request in requests:
        ordering.on_arrived(request, 300.0)
    for _ in range(64):
        asked_before = len(asked)
        ordering.on_begin(300.0, kv)
        assert len(asked) - asked_before <= 5
    assert asked == set(requests)


def test_prefill_ahead_counts_the_prompts_that_rank_before() -> None:
    ordering = ordering_of(30.0)
    requests = [make(number, prompt, 4, arrival=0.1 * number) for number, prompt in enumerate((300, 10, 70, 300))]
    for request in requests:
        ordering.on_arrived(request, 0.5)
    ranked = list(ordering.ranked(0.5))
    for place, request in enumerate(ranked):
        expected = sum(told_by(ordering, before)["own prefill"] for before in ranked[:place])
        assert abs(told_by(ordering, request)["prefill ahead"] - expected) < 1e-9


@pytest.mark.parametrize("is_displaced", [False, True])
def test_first_tokens_spend_time_only_where_they_displace_others(is_displaced: bool) -> None:
    ordering = ordering_of(0.0)
    old, new, later = make(0, 8, 90), make(1, 20_000, 90, arrival=1.0), make(2, 8, 90, arrival=2.0)
    ordering.on_arrived(old, 0.0)
    ordering.on_scheduled([Slice(old, 0, 8, True, False, ())], 0.5)
    for request in (new, later):
        ordering.on_arrived(request, 2.0)
    decode = [] if is_displaced else [Slice(old, 8, 1, True, False, ())]
    ordering.on_scheduled([Slice(new, 0, 10_000, False, False, ()), *decode], 3.0)
    list(ordering.ranked(3.1))
    assert ordering.outranks(later, old) is not is_displaced


def test_bins_of_prompts_rise_and_never_exceed_them() -> None:
    bins = [prefill_bin(tokens) for tokens in range(1, 5000)]
    assert bins == sorted(bins)
    index = GittinsIndex(COST, 4)
    for tokens in (2, 17, 1023, 1024, 1500, 100_000):
        kind = kind_of(make(0, tokens), None, index.time, tokens)
        assert 0.7 * TIME.prompt(tokens) < index.prompt_s(kind) <= TIME.prompt(tokens)
