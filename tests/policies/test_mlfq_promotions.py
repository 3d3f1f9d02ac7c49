"""Promotions in FastServe's queues (section 4.1): their pace, and what they are for. As in `test_skip_join_mlfq.py`, a
prompt of n tokens takes n seconds, a decode one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from support.queues import Queues


def test_without_pacing_all_who_starve_are_promoted_at_once() -> None:
    queues = Queues(starvation_s=10)
    requests = [queues.arrive(10 + number) for number in range(30)]
    queues.now = 10.0
    assert queues.promoted(*requests) == requests


@pytest.mark.parametrize("share", [0.05, 0.25, 1.0])
def test_promotions_take_no_more_than_their_share_of_the_time(share: float) -> None:
    """A prompt of five tokens keeps the device for five seconds: a share of a quarter lets in one every 20."""
    queues = Queues(starvation_s=10, promotion_share=share)
    requests = [queues.arrive(5) for _ in range(8)]
    queues.now = 10.0
    seen: list[float] = []
    for _ in range(1000):
        for _ in queues.promoted(*requests)[len(seen) :]:
            seen.append(queues.now)
        queues.now += 0.5
    assert len(seen) == min(8, 1 + int(499.5 * share / 5))
    assert [later - earlier for earlier, later in pairwise(seen)] == pytest.approx([5 / share] * (len(seen) - 1))


def test_chunks_of_what_is_computed_again_put_the_next_promotion_off() -> None:
    """A chunk of one token costs a second like any other here; told of were the five seconds of a prompt in one go."""
    queues = Queues(starvation_s=10, promotion_share=0.5)
    first, second = queues.arrive(5), queues.arrive(5)
    queues.now = 10.0
    assert queues.promoted(first, second) == [first]
    for _ in range(5):
        assert queues.run(first, most=1) == (3 if first.known > 5 else 0)
    # Ten seconds after the first promotion, and two more for each of the four chunks that do not sample.
    queues.now = 27.9
    assert queues.promoted(first, second) == []
    queues.now = 28.0
    assert queues.promoted(first, second) == [second]


def test_who_starves_longest_is_promoted_first_and_the_rest_is_not_forgotten() -> None:
    queues = Queues(starvation_s=10, promotion_share=0.5)
    requests = []
    for _ in range(3):
        requests.append(queues.arrive(4))
        queues.now += 1.0
    queues.now = 13.0
    assert queues.promoted(*requests) == requests[:1]
    queues.now = 13.0 + 4 / 0.5 - 0.01
    assert queues.promoted(*requests) == requests[:1]
    queues.now += 0.01
    assert queues.promoted(*requests) == requests[:2]
    queues.now += 8.0
    assert queues.promoted(*requests) == requests


def test_who_ran_while_it_waited_for_its_promotion_does_not_starve() -> None:
    queues = Queues(starvation_s=10, promotion_share=0.1)
    first, second = queues.arrive(4), queues.arrive(4)
    queues.now = 10.0
    assert queues.promoted(first, second) == [first]
    queues.now = 40.0
    queues.run(second, most=1)  # until 41
    queues.now = 50.5
    assert queues.promoted(first, second) == [first]
    queues.now = 51.0
    assert queues.promoted(first, second) == [first, second]


def test_who_was_promoted_computes_again_what_it_lost_and_has_its_quantum_besides() -> None:
    queues = Queues(starvation_s=10)
    request = queues.arrive(5)
    assert [queues.run(request) for _ in range(4)] == [3, 3, 3, 4]  # 5 of 8 seconds, and three decodes
    queues.drop(request)
    queues.now += 20
    assert queues.promoted(request) == [request]
    # Three chunks of three, the last of which samples, and then one quantum, which a decode fills.
    assert [queues.run(request, most=3) for _ in range(3)] == [0] * 3
    assert request.computed == 9
    assert queues.run(request) == 4


def test_who_loses_its_kv_after_the_promotion_has_time_for_that_too() -> None:
    queues = Queues(starvation_s=10)
    request = queues.arrive(5)
    queues.run(request)
    queues.now += 20
    assert queues.promoted(request) == [request]
    queues.drop(request)
    assert [queues.run(request, most=1) for _ in range(5)] == [0] * 5
    assert queues.run(request, most=1) == 3, "the sixth token is the one that samples"


def test_a_prompt_that_starves_is_computed_whole() -> None:
    """In chunks of one token, too: it would starve again between any two of them."""
    queues = Queues(starvation_s=10)
    request = queues.arrive(9)
    queues.run(request, most=1)
    queues.now += 20
    assert queues.promoted(request) == [request]
    assert [queues.run(request, most=1) for _ in range(7)] == [0] * 7
    assert queues.run(request, most=1) == 4
