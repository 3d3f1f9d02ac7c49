"""Promotions in FastServe's queues (section 4.1): their pacing and their effect. As in `test_skip_join_mlfq.py`, a
prompt of n tokens takes n seconds and a decode takes one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from support.queues import Queues


def test_without_pacing_all_starving_requests_are_promoted_at_once() -> None:
    queues = Queues(starvation_s=10)
    requests = [queues.arrive(10 + number) for number in range(30)]
    queues.now = 10.0
    assert queues.promoted(*requests) == requests


@pytest.mark.parametrize("share", [0.05, 0.25, 1.0])
def test_promotions_take_at_most_their_share_of_the_time(share: float) -> None:
    """A prompt of five tokens takes five seconds, so a share of a quarter allows one promotion every 20 s."""
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


def test_recomputed_chunks_delay_the_next_promotion() -> None:
    """Each chunk of one token costs a second; the promotion was charged five seconds for the whole prompt."""
    queues = Queues(starvation_s=10, promotion_share=0.5, returns=True)
    first, second = queues.arrive(5), queues.arrive(5)
    queues.now = 10.0
    assert queues.promoted(first, second) == [first]
    for _ in range(5):
        assert queues.run(first, most=1) == (3 if first.known > 5 else 0)
    # Ten seconds after the first promotion, plus two for each of the four chunks that do not sample.
    queues.now = 27.9
    assert queues.promoted(first, second) == []
    queues.now = 28.0
    assert queues.promoted(first, second) == [second]


def test_starving_requests_are_promoted_longest_wait_first() -> None:
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


def test_a_run_before_the_paced_promotion_resets_starvation() -> None:
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


@pytest.mark.parametrize(("returns", "after"), [(True, [4, 4]), (False, [1, 1])])
def test_a_promotion_lasts_for_the_recomputation_and_one_quantum(*, returns: bool, after: list[int]) -> None:
    """Then the request returns to its former queue, or moves down from the first one as a new request does."""
    queues = Queues(starvation_s=10, returns=returns)
    request = queues.arrive(5)
    assert [queues.run(request) for _ in range(4)] == [3, 3, 3, 4]  # 5 of 8 seconds, then three decodes
    queues.drop(request)
    queues.now += 20
    assert queues.promoted(request) == [request]
    # Three chunks of three tokens, the last of which samples, and then one quantum, which a decode uses up.
    assert [queues.run(request, most=3) for _ in range(3)] == [0] * 3
    assert request.computed == 9
    assert [queues.run(request), queues.run(request)] == after


def test_a_promotion_covers_the_recomputation_of_kv_dropped_after_it() -> None:
    queues = Queues(starvation_s=10, returns=True)
    request = queues.arrive(5)
    queues.run(request)
    queues.now += 20
    assert queues.promoted(request) == [request]
    queues.drop(request)
    assert [queues.run(request, most=1) for _ in range(5)] == [0] * 5
    assert queues.run(request, most=1) == 3, "only the sixth token samples"


def test_a_starving_prompt_is_computed_whole() -> None:
    """This holds for chunks of one token too: otherwise it would starve again between two of them."""
    queues = Queues(starvation_s=10, returns=True)
    request = queues.arrive(9)
    queues.run(request, most=1)
    queues.now += 20
    assert queues.promoted(request) == [request]
    assert [queues.run(request, most=1) for _ in range(7)] == [0] * 7
    assert queues.run(request, most=1) == 4
