"""Least work: where requests go as work is done, and as replicas come and go; and what lengths are expected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.request import FinishReason, Request
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.dispatch import LeastWork, least_work
from skipjoin.policies.predictors import LearntLength, most_tokens

COST = LinearCost(floor=0.01, prefill_token=1e-4, decode=2e-4)


def request(number: int, prompt: int = 10, max_tokens: int = 100, output: int = 0) -> Request:
    return Request(number, 0.0, [1] * prompt, max_tokens, output=[2] * output)


def rule_of(*replicas: int, cost: LinearCost = COST) -> LeastWork:
    rule = LeastWork(most_tokens)
    for replica in replicas:
        rule.join(replica, cost)
    return rule


def generate(rule: LeastWork, one: Request, tokens: int = 1) -> None:
    for _ in range(tokens):
        one.output.append(2)
        rule.generated(one)


def test_among_equals_the_first_and_then_who_has_less() -> None:
    rule = rule_of(5, 3)
    assert [rule.choose(request(number)) for number in range(4)] == [3, 5, 3, 5]


def test_tokens_take_work_away() -> None:
    rule = rule_of(0, 1)
    long, other = request(0, max_tokens=60), request(1, max_tokens=50)
    assert (rule.choose(long), rule.choose(other)) == (0, 1)
    generate(rule, long, 20)
    assert rule.work(0) < rule.work(1)
    assert rule.choose(request(2)) == 0


def test_prompts_count_until_they_are_computed() -> None:
    rule = rule_of(0)
    one = request(0, prompt=1000, max_tokens=10)
    rule.choose(one)
    before = rule.work(0)
    generate(rule, one)
    assert before - rule.work(0) > 0.09
    generate(rule, one)
    assert 0 < rule.work(0) < 0.01


def test_a_replica_that_leaves_gets_nothing_and_one_that_joins_is_idle() -> None:
    rule = rule_of(0, 1)
    requests = [request(number) for number in range(4)]
    for one in requests:
        rule.choose(one)
    rule.leave(0)
    assert [rule.choose(requests[number]) for number in (0, 2)] == [1, 1]
    rule.join(0, COST)
    assert rule.work(0) == 0
    assert rule.choose(request(9)) == 0


def test_tokens_that_come_along_are_computed_and_not_generated_again() -> None:
    fresh, begun = rule_of(0), rule_of(0)
    fresh.choose(request(0, prompt=10, max_tokens=100))
    begun.choose(request(0, prompt=10, max_tokens=100, output=60))
    assert begun.work(0) < fresh.work(0)
    new = rule_of(0)
    new.choose(request(0, prompt=70, max_tokens=40))
    assert begun.work(0) == pytest.approx(new.work(0))


def test_a_slow_replica_gets_less() -> None:
    rule = rule_of(0)
    rule.join(1, LinearCost(floor=0.04, prefill_token=4e-4, decode=8e-4))
    places = [rule.choose(request(number)) for number in range(50)]
    assert 38 <= places.count(0) <= 42


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=40))
def test_work_is_zero_once_all_is_over(requests: list[tuple[int, int]]) -> None:
    """Whatever was expected, and whether it ended before that or after."""
    rule = least_work()
    rule.join(0, COST)
    rule.join(1, COST)
    live = [request(number, max_tokens=300) for number in range(len(requests))]
    for one in live:
        rule.choose(one)
    for one, (tokens, _) in zip(live, requests, strict=True):
        generate(rule, one, tokens)
        assert rule.work(0) > -1e-9
        rule.ended(one, FinishReason.STOP)
    assert [rule.work(0), rule.work(1)] == pytest.approx([0, 0], abs=1e-9)


@given(st.lists(st.tuples(st.sampled_from(["choose", "token", "end", "join", "leave"]), st.integers(0, 11))))
def test_the_chosen_replica_has_the_least_work(story: list[tuple[str, int]]) -> None:
    """Whatever happened before, and whichever replicas are there; among equals it is the first."""
    rule, present, live = rule_of(0), {0}, dict[Request, int]()
    for number, (what, which) in enumerate(story):
        some = list(live)[which % len(live)] if live else None
        if what == "choose":
            one = request(number, prompt=10 + which, max_tokens=1 + 5 * which)
            least = min(present, key=lambda replica: (rule.work(replica), replica))
            live[one] = rule.choose(one)
            assert live[one] == least
        elif what == "token" and some is not None:
            generate(rule, some)
        elif what == "end" and some is not None:
            rule.ended(some, FinishReason.STOP)
            del live[some]
        elif what == "join" and which not in present:
            rule.join(which, COST)
            present.add(which)
        elif what == "leave" and which in present and len(present) > 1:
            rule.leave(which)
            present.remove(which)
            live = {one: replica for one, replica in live.items() if replica != which}


# -- lengths ----------------------------------------------------------------------------------------------------


def learnt(*lengths: int) -> LearntLength:
    predictor = LearntLength()
    for length in lengths:
        predictor.learn(request(0, max_tokens=10**6, output=length))
    return predictor


def test_the_mean_of_what_ended_within_what_may_be() -> None:
    predictor = learnt(*[50, 150] * 300)
    assert predictor.predict(request(0, max_tokens=10_000)) == pytest.approx(100, rel=0.05)
    assert predictor.predict(request(0, max_tokens=60)) in range(54, 57)  # half of them would be cut
    assert predictor.predict(request(0, max_tokens=1)) == 1


def test_who_goes_on_is_expected_to_go_on() -> None:
    predictor = learnt(*[10] * 90, *[1000] * 10)
    expected = [predictor.predict(request(0, max_tokens=5000, output=n)) for n in (0, 9, 20, 500, 999, 2000)]
    assert expected[0] < 130
    assert expected[2:4] == pytest.approx([1000, 1000], rel=0.15)
    assert expected == sorted(expected)
    assert expected[-1] == 4000  # longer than all others: as much again


def test_it_follows_what_ends_of_late() -> None:
    assert learnt(*[500] * 500, *[20] * 3000).predict(request(0, max_tokens=10_000)) < 25


@given(st.lists(st.integers(1, 5000), max_size=30), st.integers(0, 3000), st.integers(1, 3000))
def test_a_live_request_has_something_left_and_never_more_than_it_may(
    lengths: list[int], generated: int, left: int
) -> None:
    predicted = learnt(*lengths).predict(request(0, max_tokens=generated + left, output=generated))
    assert generated < predicted <= generated + left


def test_before_anything_has_ended_chats_are_expected() -> None:
    assert LearntLength().predict(request(0, max_tokens=4000)) == 128


def test_only_ends_of_their_own_teach() -> None:
    rule = least_work()
    rule.join(0, COST)
    for number, reason in enumerate([FinishReason.ABORT, FinishReason.DEADLINE] * 20):
        one = request(number, max_tokens=5000)
        rule.choose(one)
        rule.ended(one, reason)
    assert rule._lengths(request(99, max_tokens=5000)) == 128
