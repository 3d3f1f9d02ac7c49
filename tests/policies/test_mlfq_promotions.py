"""Promotions in FastServe's queues (section 4.1): their pacing and their effect. As in `test_skip_join_mlfq.py`, a
prompt of n tokens takes n seconds and a decode takes one."""

from __future__ import annotations

import math
import random
from itertools import pairwise, product

import pytest

from skipjoin.core.request import Request
from skipjoin.core.step import Slice
from skipjoin.policies.mlfq import Promotion
from support.queues import Queues


def test_without_pacing_all_starving_requests_are_promoted_at_once() -> None:
    queues = Queues(starvation_s=10)
    requests = [queues.arrive(10 + number) for number in range(30)]
    queues.now = 10.0
    assert queues.promoted(*requests) == requests


@pytest.mark.parametrize("share", [0.05, 0.25, 1.0])
def test_promotions_take_at_most_their_share_of_the_time_while_many_wait(share: float) -> None:
    """A prompt of five tokens takes five seconds, so a share of a quarter allows one promotion every 20 s."""
    queues = Queues(starvation_s=10, promotion_share=share, promotion=Promotion.ONE_QUANTUM)
    requests, others = [queues.arrive(5) for _ in range(8)], [queues.arrive(5) for _ in range(8)]
    queues.now = 10.0
    seen: list[float] = []
    for _ in range(1000):
        for _ in queues.promoted(*requests)[len(seen) :]:
            seen.append(queues.now)
        queues.now += 0.5
        for other in others:  # they wait, and do not starve
            queues.mlfq._jobs[other].last = queues.now - 5.0
    assert len(seen) == min(8, 1 + int(499.5 * share / 5))
    assert [later - earlier for earlier, later in pairwise(seen)] == pytest.approx([5 / share] * (len(seen) - 1))


def test_promotions_are_not_limited_while_few_wait() -> None:
    """Promoting all that wait takes a tenth of the threshold. With ten times as many, it would take all of the time."""
    for count, promoted in ((4, 4), (40, 1)):
        queues = Queues(starvation_s=200, promotion_share=0.05, promotion=Promotion.ONE_QUANTUM)
        requests = [queues.arrive(5) for _ in range(count)]
        queues.now = 200.0
        for _ in range(20):
            queues.order()
            queues.now += 1.0
        assert len(queues.promoted(*requests)) == promoted


def test_a_quantum_counts_by_the_context_where_memory_is_short() -> None:
    """Two requests decode together. The longer one is demoted earlier, and a request in the first queue is not."""
    levels = {}
    for slots in (math.inf, 2.0):
        queues = Queues(slots=slots)
        long, short = queues.arrive(100), queues.arrive(65)
        for request in (long, short):
            queues.run(request)
        queues.mlfq._batch = 2.0
        at = queues.mlfq.level(short)
        assert queues.mlfq.level(long) == at == 7
        counts = {long: 0, short: 0}
        for _ in range(400):
            pieces = [Slice(request, request.progress.known - 1, 1, True, False, ()) for request in (long, short)]
            for piece in pieces:
                counts[piece.request] += queues.mlfq.level(piece.request) == at
                piece.request.progress.computed = piece.request.progress.known
            queues.now += 1.0
            queues.mlfq.on_scheduled(pieces, queues.now)
            for piece in pieces:
                piece.request.progress.known += 1
        levels[slots] = counts[short] - counts[long]
    # Without weights, the shorter prompt leaves more of the quantum, 35 seconds, for its decodes.
    assert levels[2.0] == 35
    assert levels[math.inf] > 35


def test_a_quantum_beside_others_is_charged_by_its_share_of_the_batch() -> None:
    """Prompts of five seconds are in the fourth queue, whose quantum is seven seconds beside the first token."""
    queues = Queues(starvation_s=10, promotion_share=0.5)
    first, second = queues.arrive(5), queues.arrive(5)
    queues.now, queues.mlfq._batch = 10.0, 2.0
    assert queues.promoted(first, second) == [first]
    queues.now = 10.0 + (5 + 7 / 2) / 0.5 - 0.01
    assert queues.promoted(first, second) == [first]
    queues.now += 0.01
    assert queues.promoted(first, second) == [first, second]


def test_recomputed_chunks_delay_the_next_promotion() -> None:
    """Each chunk of one token costs a second; the promotion was charged five seconds for the whole prompt."""
    queues = Queues(starvation_s=10, promotion_share=0.5, promotion=Promotion.ONE_QUANTUM)
    first, second = queues.arrive(5), queues.arrive(5)
    queues.now = 10.0
    assert queues.promoted(first, second) == [first]
    for _ in range(5):
        assert queues.run(first, most=1) == (3 if first.progress.known > 5 else 0)
    # Ten seconds after the first promotion, plus two for each of the four chunks that do not sample.
    queues.now = 27.9
    assert queues.promoted(first, second) == []
    queues.now = 28.0
    assert queues.promoted(first, second) == [second]


def test_starving_requests_are_promoted_longest_wait_first() -> None:
    queues = Queues(starvation_s=10, promotion_share=0.5, promotion=Promotion.ONE_QUANTUM)
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
    queues = Queues(starvation_s=10, promotion_share=0.1, promotion=Promotion.ONE_QUANTUM)
    first, second = queues.arrive(4), queues.arrive(4)
    queues.now = 10.0
    assert queues.promoted(first, second) == [first]
    queues.now = 40.0
    queues.run(second, most=1)  # until 41
    queues.now = 50.5
    assert queues.promoted(first, second) == [first]
    queues.now = 51.0
    assert queues.promoted(first, second) == [first, second]


@pytest.mark.parametrize(
    ("promotion", "after"),
    [
        (Promotion.ONE_QUANTUM, [4, 4]),
        (Promotion.FIRST_QUEUE, [1, 1, 2, 2, 2, 2, 3]),
        (Promotion.OWN_QUANTUM, [0] * 15 + [4]),
    ],
)
def test_a_promotion_lasts_for_the_recomputation_and_its_quantum(promotion: Promotion, after: list[int]) -> None:
    """Then the request returns to its former queue, or moves down from the first one as a new request does."""
    queues = Queues(starvation_s=10, promotion=promotion)
    request = queues.arrive(5)
    assert [queues.run(request) for _ in range(4)] == [3, 3, 3, 4]  # 5 of 8 seconds, then three decodes
    queues.drop(request)
    queues.now += 20
    assert queues.promoted(request) == [request]
    # Three chunks of three tokens, the last of which samples, and then the quantum, of a second or of 16 decodes.
    assert [queues.run(request, most=3) for _ in range(3)] == [0] * 3
    assert request.progress.computed == 9
    assert [queues.run(request) for _ in after] == after


def test_a_promotion_covers_the_recomputation_of_kv_dropped_after_it() -> None:
    queues = Queues(starvation_s=10, promotion=Promotion.ONE_QUANTUM)
    request = queues.arrive(5)
    queues.run(request)
    queues.now += 20
    assert queues.promoted(request) == [request]
    queues.drop(request)
    assert [queues.run(request, most=1) for _ in range(5)] == [0] * 5
    assert queues.run(request, most=1) == 3, "only the sixth token samples"


def test_a_starving_prompt_is_computed_whole() -> None:
    """This holds for chunks of one token too: otherwise it would starve again between two of them."""
    queues = Queues(starvation_s=10, promotion=Promotion.ONE_QUANTUM)
    request = queues.arrive(9)
    queues.run(request, most=1)
    queues.now += 20
    assert queues.promoted(request) == [request]
    assert [queues.run(request, most=1) for _ in range(7)] == [0] * 7
    assert queues.run(request, most=1) == 4


def enst(queues: Queues, live: list[Request]) -> dict[Request, float]:
    """Return the estimated next scheduled time of each request, as in section 4.2, but not before a promotion."""
    level = queues.mlfq.level
    quantum = [2.0**k for k in range(16)]
    batch = queues.mlfq._batch
    found = {}
    for i in live:
        execute = 0.0
        for j in live:
            if level(j) < level(i):
                execute += sum(quantum[k] for k in range(level(j), level(i)))
        found[i] = execute / batch
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("hysteresis_s", [0.25, 5.0])
def test_next_turns_match_the_paper_to_within_one_hysteresis(seed: int, hysteresis_s: float) -> None:
    draw = random.Random(seed)
    queues = Queues(starvation_s=draw.choice([20.0, 200.0]), hysteresis_s=hysteresis_s)
    live: list[Request] = []
    for _ in range(60):
        if not live or draw.random() < 0.4:
            live.append(queues.arrive(draw.choice([1, 1, 2, 5, 9, 40, 300])))
        else:
            queues.run(draw.choice(live))
        if draw.random() < 0.1:
            queues.order()
        if draw.random() < 0.05:
            finished = live.pop(draw.randrange(len(live)))
            queues.mlfq.on_finished(finished, queues.now)
    expected = enst(queues, live)
    asked = draw.sample(live, len(live) * 3 // 4)
    turns = queues.mlfq.expected_order(asked, queues.now)
    assert sorted(request.id for _, request in turns) == sorted(request.id for request in asked)
    assert [turn for turn, _ in turns] == sorted(turn for turn, _ in turns)
    for turn, request in turns:
        assert abs(turn * hysteresis_s - expected[request]) <= hysteresis_s
    for (at, (one_turn, one)), (after, (other_turn, other)) in product(enumerate(turns), repeat=2):
        if at < after:
            assert expected[one] < expected[other] + hysteresis_s
            if one_turn == other_turn and queues.mlfq.level(one) == queues.mlfq.level(other):
                assert queues.mlfq.rank(one) < queues.mlfq.rank(other), "in one queue the order is FIFO"


def test_the_time_of_higher_queues_is_divided_by_the_batch_size() -> None:
    queues = Queues(hysteresis_s=1.0)
    low = queues.arrive(60)  # the seventh queue, below quanta of 63 seconds
    above = [queues.arrive(1) for _ in range(8)]
    assert [turn for turn, _ in queues.mlfq.expected_order([low], 0.0)] == [8 * 63]
    pieces = [Slice(request, 0, 1, True, False, ()) for request in above]
    for _ in range(200):  # converge to steps of eight requests without any other change
        queues.mlfq._batch += 0.05 * (len(pieces) - queues.mlfq._batch)
    assert [turn for turn, _ in queues.mlfq.expected_order([low], 0.0)] == pytest.approx([63], abs=1)


def test_a_step_without_slices_does_not_change_the_batch_size() -> None:
    queues = Queues(hysteresis_s=1.0)
    low, _ = queues.arrive(60), queues.arrive(1)
    before = queues.mlfq.expected_order([low], 0.0)
    for _ in range(10_000):
        queues.mlfq.on_scheduled((), 0.0)
    assert queues.mlfq.expected_order([low], 0.0) == before
