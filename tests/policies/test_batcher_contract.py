"""What the scheduler relies on in every batcher."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.policy import Batcher, Packing, Refusal
from skipjoin.policies.batching import Greedy
from support.load import make

BATCHERS: dict[str, Batcher] = {
    "whole": Greedy(4, 32, chunked=False),
    "chunked": Greedy(4, 32, chunked=True),
    "one seat": Greedy(1, 32, chunked=False),
    "one token": Greedy(4, 1, chunked=True),
}
every_batcher = pytest.mark.parametrize("batcher", BATCHERS.values(), ids=BATCHERS.keys())


def fill(packing: Packing, pending: list[int]) -> list[int | Refusal]:
    """The verdict on each request in turn; who gets tokens takes them."""
    verdicts: list[int | Refusal] = []
    for number, tokens in enumerate(pending):
        request = make(number, tokens)
        verdict = packing.offer(request, tokens)
        if isinstance(verdict, int):
            packing.take(request, verdict)
        verdicts.append(verdict)
    return verdicts


@every_batcher
@given(pending=st.lists(st.integers(1, 100), max_size=12))
def test_a_verdict_is_a_refusal_or_between_one_and_what_is_pending(batcher: Batcher, pending: list[int]) -> None:
    for tokens, verdict in zip(pending, fill(batcher.open(0.0), pending), strict=True):
        assert isinstance(verdict, Refusal) or 1 <= verdict <= tokens


@every_batcher
@given(pending=st.lists(st.integers(1, 100), min_size=1, max_size=12))
def test_the_first_request_is_never_refused(batcher: Batcher, pending: list[int]) -> None:
    assert isinstance(fill(batcher.open(0.0), pending)[0], int)


@every_batcher
@given(pending=st.lists(st.integers(1, 100), max_size=12))
def test_stop_is_final(batcher: Batcher, pending: list[int]) -> None:
    verdicts = fill(batcher.open(0.0), pending)
    if Refusal.STOP in verdicts:
        assert set(verdicts[verdicts.index(Refusal.STOP) :]) == {Refusal.STOP}


@every_batcher
@given(pending=st.lists(st.integers(1, 100), max_size=12))
def test_an_offer_that_is_not_taken_costs_nothing(batcher: Batcher, pending: list[int]) -> None:
    packing = batcher.open(0.0)
    for tokens in pending:
        packing.offer(make(0, tokens), tokens)
    assert fill(packing, pending) == fill(batcher.open(0.0), pending)


@every_batcher
def test_every_step_begins_empty(batcher: Batcher) -> None:
    assert fill(batcher.open(0.0), [9] * 9) == fill(batcher.open(1.0), [9] * 9)


@pytest.mark.parametrize("chunked", [False, True])
@given(pending=st.lists(st.integers(1, 60), max_size=20), seqs=st.integers(1, 6), tokens=st.integers(1, 80))
def test_greedy_keeps_its_budgets(pending: list[int], seqs: int, tokens: int, chunked: bool) -> None:
    taken = [v for v in fill(Greedy(seqs, tokens, chunked=chunked).open(0.0), pending) if isinstance(v, int)]
    assert len(taken) <= seqs
    if chunked:
        assert sum(taken) <= tokens
    else:
        # Decodes cost no budget, and only a prompt longer than a whole step passes it, as the only one.
        prompts = [count for count in taken if count > 1]
        assert sum(prompts) <= tokens or len(prompts) == 1


@given(pending=st.lists(st.integers(1, 60), max_size=20))
def test_greedy_computes_prompts_whole_unless_it_may_cut_them(pending: list[int]) -> None:
    for tokens, verdict in zip(pending, fill(Greedy(4, 32, chunked=False).open(0.0), pending), strict=True):
        assert isinstance(verdict, Refusal) or verdict == tokens


@given(pending=st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_greedy_wastes_no_token_of_a_step_while_it_may_cut_prompts(pending: list[int]) -> None:
    taken = [v for v in fill(Greedy(50, 32, chunked=True).open(0.0), pending) if isinstance(v, int)]
    assert sum(taken) == min(32, sum(pending))


def test_greedy_closes_the_step_to_newcomers_at_a_prompt_that_does_not_fit() -> None:
    assert fill(Greedy(4, 10, chunked=False).open(0.0), [1, 8, 3, 1, 1]) == [1, 8, Refusal.CLOSE, 1, 1]


def test_greedy_takes_a_prompt_longer_than_a_step_however_many_decode() -> None:
    assert fill(Greedy(9, 10, chunked=False).open(0.0), [1, 1, 20, 1, 2]) == [1, 1, 20, 1, Refusal.CLOSE]


def test_greedy_stops_at_the_last_seat_and_at_the_last_token() -> None:
    assert fill(Greedy(2, 10, chunked=False).open(0.0), [1, 1, 1]) == [1, 1, Refusal.STOP]
    assert fill(Greedy(9, 10, chunked=True).open(0.0), [5, 5, 1]) == [5, 5, Refusal.STOP]


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0), (-1, 1)])
def test_greedy_refuses_empty_budgets(arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Greedy(*arguments, chunked=True)
