"""Next turns in FastServe's queues: the order in which KV is swapped (section 4.2)."""

from __future__ import annotations

import random
from itertools import product

import pytest

from skipjoin.core.request import Request
from skipjoin.core.step import Slice
from support.queues import Queues


def enst(queues: Queues, live: list[Request], starvation_s: float, last: dict[Request, float]) -> dict[Request, float]:
    """Return the estimated next scheduled time of each request, exactly as section 4.2 defines it."""
    level = queues.mlfq.level
    quantum = [2.0**k for k in range(16)]
    batch = queues.mlfq._batch
    found = {}
    for i in live:
        execute = 0.0
        for j in live:
            if level(j) < level(i):
                execute += sum(quantum[k] for k in range(level(j), level(i)))
        promote = last[i] + starvation_s - queues.now
        found[i] = min(max(0.0, promote), execute / batch)
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("hysteresis_s", [0.25, 5.0])
def test_next_turns_match_the_paper(seed: int, hysteresis_s: float) -> None:
    """They match to within one hysteresis as long as promotions are not paced."""
    draw = random.Random(seed)
    starvation_s = draw.choice([20.0, 200.0])
    queues = Queues(starvation_s=starvation_s, hysteresis_s=hysteresis_s)
    live: list[Request] = []
    last: dict[Request, float] = {}
    for _ in range(60):
        if not live or draw.random() < 0.4:
            live.append(queues.arrive(draw.choice([1, 1, 2, 5, 9, 40, 300])))
            last[live[-1]] = queues.now
        else:
            running = draw.choice(live)
            queues.run(running)
            last[running] = queues.now
        if draw.random() < 0.1:
            queues.order()
        if draw.random() < 0.05:
            finished = live.pop(draw.randrange(len(live)))
            queues.mlfq.on_finished(finished, queues.now)
    expected = enst(queues, live, starvation_s, last)
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


def test_turns_of_paced_promotions_are_spaced() -> None:
    """The pacing allows one promotion in 20 s here."""
    queues = Queues(starvation_s=10, promotion_share=0.05, hysteresis_s=0.001)
    requests = [queues.arrive(2000 + number) for number in range(3)]
    queues.arrive(1)
    queues.now = 10.0
    turns = queues.mlfq.expected_order(requests, queues.now)
    assert [(turn * 0.001, request) for turn, request in turns] == [
        (pytest.approx(20.0 * number), request) for number, request in enumerate(requests)
    ]
