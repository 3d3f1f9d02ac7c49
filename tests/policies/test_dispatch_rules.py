from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import FinishReason, Request
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.dispatch import MAX_KEYS, OWN_WEIGHT, LeastWork, PrefixAware
from skipjoin.policies.predictors import LearnedLength, longest_output

COST = LinearCost(floor=0.01, prefill_token=1e-4, decode=2e-4)


def request(number: int, prompt: int = 10, max_tokens: int = 100, output: int = 0) -> Request:
    return Request(number, 0.0, [1] * prompt, max_tokens, resumed=[2] * output)


def rule_of(*replicas: int, cost: LinearCost = COST) -> LeastWork:
    rule = LeastWork(longest_output)
    for replica in replicas:
        rule.join(replica, cost)
    return rule


def generate(rule: LeastWork, req: Request, tokens: int = 1) -> None:
    for _ in range(tokens):
        req.progress.output.append(2)
        rule.generated(req)


def test_ties_go_to_the_first_replica_and_otherwise_to_the_least_loaded() -> None:
    rule = rule_of(5, 3)
    assert [rule.choose(request(number)) for number in range(4)] == [3, 5, 3, 5]


def test_generated_tokens_reduce_a_replicas_work() -> None:
    rule = rule_of(0, 1)
    long, other = request(0, max_tokens=60), request(1, max_tokens=50)
    assert (rule.choose(long), rule.choose(other)) == (0, 1)
    generate(rule, long, 20)
    assert rule.work(0) < rule.work(1)
    assert rule.choose(request(2)) == 0


def test_a_prompt_counts_as_work_until_it_is_computed() -> None:
    rule = rule_of(0)
    req = request(0, prompt=1000, max_tokens=10)
    rule.choose(req)
    before = rule.work(0)
    generate(rule, req)
    assert before - rule.work(0) > 0.09
    generate(rule, req)
    assert 0 < rule.work(0) < 0.01


def test_a_replica_that_left_gets_no_requests_and_a_new_one_is_idle() -> None:
    rule = rule_of(0, 1)
    requests = [request(number) for number in range(4)]
    for req in requests:
        rule.choose(req)
    rule.leave(0)
    assert [rule.choose(requests[number]) for number in (0, 2)] == [1, 1]
    rule.join(0, COST)
    assert rule.work(0) == 0
    assert rule.choose(request(9)) == 0


def test_existing_output_counts_as_prompt() -> None:
    fresh, begun = rule_of(0), rule_of(0)
    fresh.choose(request(0, prompt=10, max_tokens=100))
    begun.choose(request(0, prompt=10, max_tokens=100, output=60))
    assert begun.work(0) < fresh.work(0)
    new = rule_of(0)
    new.choose(request(0, prompt=70, max_tokens=40))
    assert begun.work(0) == pytest.approx(new.work(0))


def test_a_slow_replica_gets_fewer_requests() -> None:
    rule = rule_of(0)
    rule.join(1, LinearCost(floor=0.04, prefill_token=4e-4, decode=8e-4))
    chosen = [rule.choose(request(number)) for number in range(50)]
    assert 38 <= chosen.count(0) <= 42


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=40))
def test_work_is_zero_after_all_requests_finish(requests: list[tuple[int, int]]) -> None:
    """The forecast may be too short or too long."""
    rule = LeastWork.learning()
    rule.join(0, COST)
    rule.join(1, COST)
    live = [request(number, max_tokens=300) for number in range(len(requests))]
    for req in live:
        rule.choose(req)
    for req, (tokens, _) in zip(live, requests, strict=True):
        generate(rule, req, tokens)
        assert rule.work(0) > -1e-9
        rule.ended(req, FinishReason.STOP)
    assert [rule.work(0), rule.work(1)] == pytest.approx([0, 0], abs=1e-9)


@given(
    st.sampled_from([LeastWork, PrefixAware]),
    st.lists(st.tuples(st.sampled_from(["choose", "token", "end", "join", "leave"]), st.integers(0, 11))),
)
def test_the_chosen_replica_has_the_least_work(kind: type[LeastWork], actions: list[tuple[str, int]]) -> None:
    """Ties go to the first replica. `PrefixAware` does the same for requests without prefixes."""
    rule, present, live = kind(longest_output), {0}, dict[Request, int]()
    rule.join(0, COST)
    for number, (action, which) in enumerate(actions):
        picked = list(live)[which % len(live)] if live else None
        if action == "choose":
            req = request(number, prompt=10 + which, max_tokens=1 + 5 * which)
            expected = min(present, key=lambda replica: (rule.work(replica), replica))
            live[req] = rule.choose(req)
            assert live[req] == expected
        elif action == "token" and picked is not None:
            generate(rule, picked)
        elif action == "end" and picked is not None:
            rule.ended(picked, FinishReason.STOP)
            del live[picked]
        elif action == "join" and which not in present:
            rule.join(which, COST)
            present.add(which)
        elif action == "leave" and which in present and len(present) > 1:
            rule.leave(which)
            present.remove(which)
            live = {req: replica for req, replica in live.items() if replica != which}


BLOCK = 4


def aware(replicas: int = 2, blocks: int = 1000) -> PrefixAware:
    rule = PrefixAware(longest_output)
    for replica in range(replicas):
        rule.join(replica, COST, blocks, BLOCK)
    return rule


def prefixed_request(number: int, prompt: list[int], max_tokens: int = 2, *, salt: bytes = b"") -> Request:
    return Request(number, 0.0, prompt, max_tokens, prefix=ContentPrefix(BLOCK, salt))


def text(first: int, tokens: int) -> list[int]:
    return list(range(first * 1000, first * 1000 + tokens))


def complete(rule: LeastWork, req: Request, *output: int) -> None:
    for token in output:
        req.progress.output.append(token)
        rule.generated(req)
    rule.ended(req, FinishReason.LENGTH)


def test_prefix_hits_go_to_their_replica_and_misses_are_balanced() -> None:
    """Prefixes match by prompt, output and salt; a hit reduces the work to the rest."""
    rule = aware(3)
    turns = [prefixed_request(number, text(number, 400)) for number in range(3)]
    assert [rule.choose(req) for req in turns] == [0, 1, 2]
    for req in turns:
        complete(rule, req, *range(7000 + req.id, 7008 + req.id))
    second = prefixed_request(3, [*turns[2].prompt, *turns[2].progress.output, 5, 6, 7])
    assert rule.choose(second) == 2
    assert rule.work(2) == pytest.approx(COST.prefill_token * 7 + 2 * (COST.floor / 32 + COST.decode))  # 404 are hits
    complete(rule, second, 1, 2)
    other_salt, other_start = (
        prefixed_request(4, turns[1].prompt, salt=b"x"),
        prefixed_request(5, [1, *turns[1].prompt[1:]]),
    )
    assert [rule.choose(req) for req in (other_salt, other_start)] == [0, 1]
    assert rule.work(0) == rule.work(1) > 0.04
    assert rule.choose(request(6)) == 2


def test_prefixes_that_a_replica_lost_are_not_expected_there() -> None:
    """A replica loses them by a restart, by eviction, and by reporting a miss."""
    rule = aware(blocks=150)
    first = prefixed_request(0, text(0, 400))
    rule.choose(first)
    complete(rule, first, 1, 2)
    rule.leave(0)
    rule.join(0, COST, 150, BLOCK)
    lost = prefixed_request(1, text(0, 400))
    assert (rule.choose(lost), rule.work(0)) == (0, pytest.approx(0.04 + 2 * (COST.floor / 32 + COST.decode)))
    complete(rule, lost, 1, 2)
    again = prefixed_request(2, text(0, 400))
    rule.choose(again)
    cheap = rule.work(0)
    rule.found(again, 0)
    assert rule.work(0) == pytest.approx(cheap + 0.0396)
    complete(rule, again, 1, 2)
    assert rule.work(0) == pytest.approx(0)
    rule.leave(1)
    for number in (3, 4):
        filler = prefixed_request(number, text(number, 400))
        rule.choose(filler)
        complete(rule, filler, 1, 2)
    late = prefixed_request(5, text(0, 400))
    rule.choose(late)
    assert rule.work(0) > 0.04
    assert len(rule._held._holders) <= 150


@given(st.integers(2, 5), st.integers(1, 60), st.lists(st.integers(1, 40), min_size=20, max_size=60))
def test_a_prefix_that_all_requests_share_is_spread_over_all_replicas(
    replicas: int, blocks: int, outputs: list[int]
) -> None:
    """Once the prefix is shared, a replica's extra work is at most what the prefix saves."""
    rule, common = aware(replicas), text(0, BLOCK * blocks)
    chosen: list[int] = []
    for number, tokens in enumerate(outputs):
        req, before = (
            prefixed_request(number, [*common, number], tokens),
            [rule.work(replica) for replica in range(replicas)],
        )
        chosen.append(rule.choose(req))
        if chosen[:-1].count(chosen[-1]) >= 2:
            assert before[chosen[-1]] - min(before) <= COST.prefill_token * len(req.prompt) + 1e-9
    longest = COST.prefill_token * (len(common) + 1) + 40 * (COST.floor / 32 + COST.decode)
    if sum(outputs) * COST.decode > (OWN_WEIGHT + 2) * replicas * longest:
        assert set(chosen) == set(range(replicas))


def test_the_keys_of_a_long_prompt_are_limited() -> None:
    rule, prompt = aware(blocks=10**6), text(0, BLOCK * (MAX_KEYS + 500))
    rule.choose(prefixed_request(0, prompt))
    assert len(rule._held._holders) == MAX_KEYS
    assert rule.choose(prefixed_request(1, prompt)) == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["choose", "choose", "token", "end", "leave", "join"]), st.integers(0, 4), st.integers(0, 9)
        )
    )
)
def test_a_prefix_adds_no_more_work_to_a_replica_than_it_saves(actions: list[tuple[str, int, int]]) -> None:
    """The chosen replica's work exceeds the minimum by at most the weighted seconds of the request's prompt, and no
    replica is assumed to hold more blocks than it has."""
    rule, present, live = aware(3, blocks=60), {0, 1, 2}, list[Request]()
    for number, (action, which, length) in enumerate(actions):
        req = live[which % len(live)] if live else None
        if action == "choose":
            live.append(new := prefixed_request(number, text(which, 4 + 40 * length), 1 + 9 * length))
            before = {replica: rule.work(replica) for replica in present}
            saved = before[rule.choose(new)] - min(before.values())
            assert saved <= OWN_WEIGHT * COST.prefill_token * len(new.prompt) + 1e-9
        elif action == "token" and req is not None:
            generate(rule, req)
        elif action == "end" and req is not None:
            live.remove(req)
            rule.ended(req, FinishReason.STOP)
        elif action == "leave" and which in present and len(present) > 1:
            present.remove(which)
            live = [req for req in live if rule._left[req].replica != which]
            rule.leave(which)
        elif action == "join" and which not in present:
            present.add(which)
            rule.join(which, COST, 60, BLOCK)
        assert all(len(held) <= 60 for held in rule._held._held.values())
    for req in live:
        rule.ended(req, FinishReason.STOP)
    assert [rule.work(replica) for replica in present] == pytest.approx([0.0] * len(present), abs=1e-9)
    for replica in present:
        rule.leave(replica)
    assert not rule._held._holders


def learned(*lengths: int) -> LearnedLength:
    predictor = LearnedLength()
    for length in lengths:
        predictor.learn(request(0, max_tokens=10**6, output=length))
    return predictor


def test_the_prediction_is_the_mean_length_below_max_tokens() -> None:
    predictor = learned(*[50, 150] * 300)
    assert predictor.predict(request(0, max_tokens=10_000)) == pytest.approx(100, rel=0.05)
    assert predictor.predict(request(0, max_tokens=60)) in range(54, 57)  # half of them would be truncated
    assert predictor.predict(request(0, max_tokens=1)) == 1


def test_the_prediction_is_conditioned_on_the_tokens_so_far() -> None:
    predictor = learned(*[10] * 90, *[1000] * 10)
    expected = [predictor.predict(request(0, max_tokens=5000, output=n)) for n in (0, 9, 20, 500, 999, 2000)]
    assert expected[0] < 130
    assert expected[2:4] == pytest.approx([1000, 1000], rel=0.15)
    assert expected == sorted(expected)
    assert expected[-1] == 4000  # longer than all others: twice the tokens so far


def test_the_prediction_follows_recent_lengths() -> None:
    assert learned(*[500] * 500, *[20] * 3000).predict(request(0, max_tokens=10_000)) < 25


@given(st.lists(st.integers(1, 5000), max_size=30), st.integers(0, 3000), st.integers(1, 3000))
def test_the_prediction_is_above_the_output_and_at_most_max_tokens(
    lengths: list[int], generated: int, left: int
) -> None:
    predicted = learned(*lengths).predict(request(0, max_tokens=generated + left, output=generated))
    assert generated < predicted <= generated + left


def test_the_prediction_without_history_is_a_typical_chat() -> None:
    assert LearnedLength().predict(request(0, max_tokens=4000)) == 128


def test_aborted_and_timed_out_requests_are_not_learned_from() -> None:
    rule = LeastWork.learning()
    rule.join(0, COST)
    for number, reason in enumerate([FinishReason.ABORT, FinishReason.DEADLINE] * 20):
        req = request(number, max_tokens=5000)
        rule.choose(req)
        rule.ended(req, reason)
    assert rule._lengths(request(99, max_tokens=5000)) == 128
