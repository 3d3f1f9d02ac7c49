"""Least work, and prefixes: where requests go as work is done, and as replicas come and go; and what lengths are
expected."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipjoin.core.kv.prefixes import ContentPrefix
from skipjoin.core.request import FinishReason, Request
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.dispatch import MAX_KEYS, OWN_WEIGHT, LeastWork, PrefixAware, least_work
from skipjoin.policies.predictors import LearnedLength, longest_output

COST = LinearCost(floor=0.01, prefill_token=1e-4, decode=2e-4)


def request(number: int, prompt: int = 10, max_tokens: int = 100, output: int = 0) -> Request:
    return Request(number, 0.0, [1] * prompt, max_tokens, output=[2] * output)


def rule_of(*replicas: int, cost: LinearCost = COST) -> LeastWork:
    rule = LeastWork(longest_output)
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


@given(
    st.sampled_from([LeastWork, PrefixAware]),
    st.lists(st.tuples(st.sampled_from(["choose", "token", "end", "join", "leave"]), st.integers(0, 11))),
)
def test_the_chosen_replica_has_the_least_work(kind: type[LeastWork], story: list[tuple[str, int]]) -> None:
    """Whatever happened before, and whichever replicas are there; among equals it is the first. So do requests without
    prefixes."""
    rule, present, live = kind(longest_output), {0}, dict[Request, int]()
    rule.join(0, COST)
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


# -- prefixes ---------------------------------------------------------------------------------------------------

BLOCK = 4


def aware(replicas: int = 2, blocks: int = 1000) -> PrefixAware:
    rule = PrefixAware(longest_output)
    for replica in range(replicas):
        rule.join(replica, COST, blocks, BLOCK)
    return rule


def asking(number: int, prompt: list[int], max_tokens: int = 2, *, salt: bytes = b"") -> Request:
    return Request(number, 0.0, prompt, max_tokens, prefix=ContentPrefix(BLOCK, salt))


def text(first: int, tokens: int) -> list[int]:
    return list(range(first * 1000, first * 1000 + tokens))


def complete(rule: LeastWork, one: Request, *output: int) -> None:
    for token in output:
        one.output.append(token)
        rule.generated(one)
    rule.ended(one, FinishReason.LENGTH)


def test_the_next_turn_goes_where_the_last_one_was_and_others_share_what_is_left() -> None:
    """By prompt, output and salt; the work of a hit is that of the rest."""
    rule = aware(3)
    turns = [asking(number, text(number, 400)) for number in range(3)]
    assert [rule.choose(one) for one in turns] == [0, 1, 2]
    for one in turns:
        complete(rule, one, *range(7000 + one.id, 7008 + one.id))
    second = asking(3, [*turns[2].prompt, *turns[2].output, 5, 6, 7])
    assert rule.choose(second) == 2
    assert rule.work(2) == pytest.approx(COST.prefill_token * 7 + 2 * (COST.floor / 32 + COST.decode))  # 404 are found
    complete(rule, second, 1, 2)
    other_salt, other_start = asking(4, turns[1].prompt, salt=b"x"), asking(5, [1, *turns[1].prompt[1:]])
    assert [rule.choose(one) for one in (other_salt, other_start)] == [0, 1]
    assert rule.work(0) == rule.work(1) > 0.04
    assert rule.choose(request(6)) == 2


def test_what_a_replica_has_lost_is_not_expected_of_it() -> None:
    """When it is started anew, when it has no blocks left for it, and when it says that it has none."""
    rule = aware(blocks=150)
    first = asking(0, text(0, 400))
    rule.choose(first)
    complete(rule, first, 1, 2)
    rule.leave(0)
    rule.join(0, COST, 150, BLOCK)
    lost = asking(1, text(0, 400))
    assert (rule.choose(lost), rule.work(0)) == (0, pytest.approx(0.04 + 2 * (COST.floor / 32 + COST.decode)))
    complete(rule, lost, 1, 2)
    again = asking(2, text(0, 400))
    rule.choose(again)
    cheap = rule.work(0)
    rule.found(again, 0)
    assert rule.work(0) == pytest.approx(cheap + 0.0396)
    complete(rule, again, 1, 2)
    assert rule.work(0) == pytest.approx(0)
    rule.leave(1)
    for number in (3, 4):
        filler = asking(number, text(number, 400))
        rule.choose(filler)
        complete(rule, filler, 1, 2)
    late = asking(5, text(0, 400))
    rule.choose(late)
    assert rule.work(0) > 0.04
    assert len(rule._held._holders) <= 150


@settings(max_examples=30)
@given(st.integers(2, 5), st.integers(1, 60), st.lists(st.integers(1, 40), min_size=20, max_size=60))
def test_a_prefix_that_all_requests_share_goes_to_all_replicas(replicas: int, blocks: int, outputs: list[int]) -> None:
    """Once it is shared, a replica is ahead of the others by no more than what it saves."""
    rule, common = aware(replicas), text(0, BLOCK * blocks)
    places: list[int] = []
    for number, tokens in enumerate(outputs):
        one, before = asking(number, [*common, number], tokens), [rule.work(replica) for replica in range(replicas)]
        places.append(rule.choose(one))
        if places[:-1].count(places[-1]) >= 2:
            assert before[places[-1]] - min(before) <= COST.prefill_token * len(one.prompt) + 1e-9
    longest = COST.prefill_token * (len(common) + 1) + 40 * (COST.floor / 32 + COST.decode)
    if sum(outputs) * COST.decode > (OWN_WEIGHT + 2) * replicas * longest:
        assert set(places) == set(range(replicas))


def test_few_keys_of_a_long_prompt_are_looked_up() -> None:
    rule, prompt = aware(blocks=10**6), text(0, BLOCK * (MAX_KEYS + 500))
    rule.choose(asking(0, prompt))
    assert len(rule._held._holders) == MAX_KEYS
    assert rule.choose(asking(1, prompt)) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["choose", "choose", "token", "end", "leave", "join"]), st.integers(0, 4), st.integers(0, 9)
        )
    )
)
def test_a_prefix_puts_no_more_on_a_replica_than_it_saves(story: list[tuple[str, int, int]]) -> None:
    """The work of the chosen replica is above the least by at most the weighted seconds of the request's own prompt,
    whatever happened before; and a replica is never taken to hold more blocks than it has."""
    rule, present, live = aware(3, blocks=60), {0, 1, 2}, list[Request]()
    for number, (what, which, length) in enumerate(story):
        one = live[which % len(live)] if live else None
        if what == "choose":
            live.append(new := asking(number, text(which, 4 + 40 * length), 1 + 9 * length))
            before = {replica: rule.work(replica) for replica in present}
            saved = before[rule.choose(new)] - min(before.values())
            assert saved <= OWN_WEIGHT * COST.prefill_token * len(new.prompt) + 1e-9
        elif what == "token" and one is not None:
            generate(rule, one)
        elif what == "end" and one is not None:
            live.remove(one)
            rule.ended(one, FinishReason.STOP)
        elif what == "leave" and which in present and len(present) > 1:
            present.remove(which)
            live = [one for one in live if rule._left[one].replica != which]
            rule.leave(which)
        elif what == "join" and which not in present:
            present.add(which)
            rule.join(which, COST, 60, BLOCK)
        assert all(len(held) <= 60 for held in rule._held._held.values())
    for one in live:
        rule.ended(one, FinishReason.STOP)
    assert [rule.work(replica) for replica in present] == pytest.approx([0.0] * len(present), abs=1e-9)
    for replica in present:
        rule.leave(replica)
    assert not rule._held._holders


# -- lengths ----------------------------------------------------------------------------------------------------


def learned(*lengths: int) -> LearnedLength:
    predictor = LearnedLength()
    for length in lengths:
        predictor.learn(request(0, max_tokens=10**6, output=length))
    return predictor


def test_the_mean_of_what_ended_within_what_may_be() -> None:
    predictor = learned(*[50, 150] * 300)
    assert predictor.predict(request(0, max_tokens=10_000)) == pytest.approx(100, rel=0.05)
    assert predictor.predict(request(0, max_tokens=60)) in range(54, 57)  # half of them would be cut
    assert predictor.predict(request(0, max_tokens=1)) == 1


def test_who_goes_on_is_expected_to_go_on() -> None:
    predictor = learned(*[10] * 90, *[1000] * 10)
    expected = [predictor.predict(request(0, max_tokens=5000, output=n)) for n in (0, 9, 20, 500, 999, 2000)]
    assert expected[0] < 130
    assert expected[2:4] == pytest.approx([1000, 1000], rel=0.15)
    assert expected == sorted(expected)
    assert expected[-1] == 4000  # longer than all others: as much again


def test_it_follows_what_ends_of_late() -> None:
    assert learned(*[500] * 500, *[20] * 3000).predict(request(0, max_tokens=10_000)) < 25


@given(st.lists(st.integers(1, 5000), max_size=30), st.integers(0, 3000), st.integers(1, 3000))
def test_a_live_request_has_something_left_and_never_more_than_it_may(
    lengths: list[int], generated: int, left: int
) -> None:
    predicted = learned(*lengths).predict(request(0, max_tokens=generated + left, output=generated))
    assert generated < predicted <= generated + left


def test_before_anything_has_ended_chats_are_expected() -> None:
    assert LearnedLength().predict(request(0, max_tokens=4000)) == 128


def test_only_ends_of_their_own_teach() -> None:
    rule = least_work()
    rule.join(0, COST)
    for number, reason in enumerate([FinishReason.ABORT, FinishReason.DEADLINE] * 20):
        one = request(number, max_tokens=5000)
        rule.choose(one)
        rule.ended(one, reason)
    assert rule._lengths(request(99, max_tokens=5000)) == 128
