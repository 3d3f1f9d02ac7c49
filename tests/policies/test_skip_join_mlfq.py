"""The rules of FastServe's skip-join queues (section 4.1), one test each, in whole seconds.

Under `UnitCost` a prompt of n tokens takes n seconds and a decode takes one. Queue i has a quantum of 2^i seconds.
"""

from __future__ import annotations

import math

import pytest

from skipjoin.core.request import Request
from skipjoin.core.step import Slice, StepShape
from skipjoin.policies.cost import LearningCost, LinearCost
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.mlfq import Promotion, SkipJoinMlfq
from skipjoin.policies.predictors import longest_output
from skipjoin.policies.remaining import RemainingTime
from skipjoin.policies.valued import Valued
from support.load import make
from support.policies import COST
from support.queues import Queues


@pytest.mark.parametrize(("prompt", "level"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (32768, 15)])
def test_a_request_joins_the_first_queue_whose_quantum_covers_its_prefill(prompt: int, level: int) -> None:
    queues = Queues()
    assert queues.mlfq.level(queues.arrive(prompt)) == level


def test_a_prompt_longer_than_every_quantum_joins_the_last_queue() -> None:
    queues = Queues(levels=3)
    assert queues.mlfq.level(queues.arrive(100)) == 2


def test_plain_mlfq_joins_the_first_queue_for_any_prompt() -> None:
    queues = Queues(skip_join=False)
    assert queues.mlfq.level(queues.arrive(100)) == 0


def test_a_one_token_prompt_is_the_shortest_iteration_on_any_machine() -> None:
    """This holds even if a prefill token costs more than a decode: the slice is charged as a decode."""
    mlfq = SkipJoinMlfq(type(COST)(floor=1.0, prefill_token=0.5, decode=0.1))
    request = make(0, 1)
    mlfq.on_arrived(request, 0.0)
    assert mlfq.level(request) == 0


def test_only_uncomputed_tokens_determine_the_queue_to_join() -> None:
    queues = Queues()
    request = make(0, 9)
    request.progress.computed = request.progress.planned = 7
    queues.mlfq.on_arrived(request, 0.0)
    assert queues.mlfq.level(request) == 1


def test_a_request_is_demoted_one_queue_after_its_quantum() -> None:
    queues = Queues()
    request = queues.arrive(3)  # the third queue, of 4 seconds
    # 3 seconds of prefill, then decodes: 1 here, 8 in the next queue, 16 in the one below.
    levels = [queues.run(request) for _ in range(27)]
    assert levels == [2] + [3] * 8 + [4] * 16 + [5] * 2


def test_demotion_skips_queues_that_do_not_cover_the_next_iteration() -> None:
    queues = Queues(skip_join=False)
    request = queues.arrive(21)
    # The first chunk of one token uses up the first quantum. The remaining 20 need a queue of at least 20 seconds.
    assert queues.run(request, most=1) == 5


def test_demotion_goes_at_least_one_queue_down() -> None:
    queues = Queues()
    request = queues.arrive(8)
    assert [queues.run(request, most=4) for _ in range(2)] == [3, 4]


def test_the_last_queue_rotates_requests_that_use_up_their_quantum() -> None:
    queues = Queues(levels=2)
    request, other = queues.arrive(2), queues.arrive(2)
    assert queues.run(request) == 1
    assert queues.order() == [other, request]


def test_order_within_a_queue_is_first_in_first_out() -> None:
    queues = Queues()
    requests = [queues.arrive(4) for _ in range(5)]
    assert queues.order() == requests


def test_a_running_request_keeps_its_position() -> None:
    queues = Queues()
    first, second = queues.arrive(4), queues.arrive(4)
    assert queues.run(first, most=2) == 2
    assert queues.order() == [first, second]
    queues.run(second, most=3)
    assert queues.order() == [first, second]


def test_a_demoted_request_joins_the_tail() -> None:
    queues = Queues()
    demoted, low = queues.arrive(2), queues.arrive(3)
    assert queues.run(demoted) == 2
    assert queues.order() == [low, demoted]


def test_only_requests_in_higher_queues_outrank() -> None:
    queues = Queues()
    first, second, low = queues.arrive(1), queues.arrive(1), queues.arrive(9)
    outranks = queues.mlfq.outranks
    assert not outranks(first, second)
    assert not outranks(second, first)
    assert outranks(first, low)
    assert outranks(second, low)
    assert not outranks(low, first)


def test_shortest_prefill_order_keeps_the_first_queue_in_order_of_arrival() -> None:
    queues = Queues(starvation_s=100, shortest_prefill=True)
    longer, shorter, short = queues.arrive(4), queues.arrive(3), queues.arrive(1)
    assert queues.order() == [short, shorter, longer]
    assert [queues.run(shorter), queues.run(shorter)] == [2, 3]  # demoted, and still ahead in its next queue
    other = queues.arrive(8)
    assert queues.order() == [short, longer, shorter, other]
    queues.now += 100
    shortest = queues.arrive(1)
    assert queues.order() == [short, shortest, longer, shorter, other], "promoted in order of their last run"


def test_a_starving_request_is_promoted_to_the_tail_of_the_first_queue() -> None:
    queues = Queues(starvation_s=10)
    starving = queues.arrive(100)
    queues.now = 9.0
    newer = queues.arrive(1)
    assert queues.order() == [newer, starving]
    assert queues.mlfq.level(starving) == 7
    queues.now = 10.0
    assert queues.order() == [newer, starving]
    assert queues.mlfq.level(starving) == 0
    assert queues.arrive(1) is queues.order()[-1]


def test_starvation_is_measured_from_the_last_run() -> None:
    queues = Queues(starvation_s=10)
    request = queues.arrive(3)
    queues.now = 6.0
    queues.run(request, most=1)  # until 7
    queues.now = 16.9
    queues.order()
    assert queues.mlfq.level(request) == 2
    queues.now = 17.0
    queues.order()
    assert queues.mlfq.level(request) == 0


def test_a_promotion_lasts_one_quantum_and_preserves_the_time_used_before() -> None:
    queues = Queues(starvation_s=10, promotion=Promotion.ONE_QUANTUM)
    request = queues.arrive(4)
    assert queues.run(request, most=3) == 2  # 3 of 4 seconds used
    queues.now += 10
    queues.order()
    assert queues.mlfq.level(request) == 0
    # After one second in the first queue it returns with 3 seconds used, so one more second demotes it.
    assert [queues.run(request) for _ in range(2)] == [2, 3]


def test_a_promoted_request_returns_to_the_tail() -> None:
    queues = Queues(starvation_s=10, promotion=Promotion.ONE_QUANTUM)
    request = queues.arrive(3)
    queues.run(request)
    queues.now += 10
    assert queues.promoted(request) == [request]
    other = queues.arrive(4)
    queues.run(request)
    assert queues.order() == [other, request]


def test_a_request_is_promoted_again_only_after_starving_again() -> None:
    queues = Queues(starvation_s=10, promotion=Promotion.ONE_QUANTUM)
    request = queues.arrive(100)
    queues.run(request)
    levels = []
    for _ in range(3):
        queues.now += 9
        queues.order()
        levels.append(queues.mlfq.level(request))
        queues.now += 1
        queues.order()
        levels.append(queues.mlfq.level(request))
        queues.run(request)
    assert levels == [7, 0] * 3


def test_a_finished_request_is_not_promoted() -> None:
    queues = Queues(starvation_s=10)
    request, other = queues.arrive(5), queues.arrive(5)
    queues.mlfq.on_finished(request, 1.0)
    queues.now = 50.0
    assert queues.order() == [other]


def test_finished_requests_are_not_kept_until_their_starvation_time() -> None:
    """A starvation time of years switches promotions off."""
    queues = Queues(starvation_s=1e9)
    for _ in range(5000):
        queues.mlfq.on_finished(queues.arrive(5), queues.now)
    assert len(queues.mlfq._watch) < 1000


def slow_down(cost: LearningCost, times: float) -> None:
    before = cost.current
    for _ in range(500):
        for shape in (StepShape(decodes=1, context=1), StepShape(prefill=8, attention=36)):
            cost.learn(shape, times * before.step(shape))


def test_quanta_follow_the_cost_model_and_requests_stay_in_their_queues() -> None:
    cost = LearningCost(LinearCost(floor=1.0, prefill_token=0.5, attention_pair=1e-9, decode=1e-9, context_token=1e-9))
    mlfq = SkipJoinMlfq(cost, starvation_s=1e9)
    waiting, running = make(0, 8), make(1, 1)
    for request in (waiting, running):
        mlfq.on_arrived(request, 0.0)
    assert (mlfq.level(waiting), mlfq.level(running)) == (3, 0)
    running.progress.computed = 1
    mlfq.on_scheduled([Slice(running, 0, 1, True, False, ())], 1.0)
    assert mlfq.level(running) == 1
    mlfq.on_scheduled([Slice(running, 1, 1, True, False, ())], 2.0)  # the first of two decodes of this quantum
    slow_down(cost, 3.0)
    # The second decode ends the quantum on the slower machine as well. With the decode's old time, or without the time
    # used so far, more decodes would fit.
    mlfq.on_scheduled([Slice(running, 2, 1, True, False, ())], 3.0)
    assert (mlfq.level(waiting), mlfq.level(running)) == (3, 2)
    incoming = [make(2, 1), make(3, 8)]
    for request in incoming:
        mlfq.on_arrived(request, 4.0)
    assert [mlfq.level(request) for request in incoming] == [0, 3]


def test_time_used_before_a_promotion_is_scaled_with_the_quanta() -> None:
    cost = LearningCost(LinearCost(floor=1.0, prefill_token=1e-9, attention_pair=1e-9, decode=1e-9, context_token=1e-9))
    mlfq = SkipJoinMlfq(cost, starvation_s=10.0, promotion=Promotion.ONE_QUANTUM)
    request = make(0, 1)
    mlfq.on_arrived(request, 0.0)
    for position in range(2):  # a quantum in the first queue, half of one in the second
        mlfq.on_scheduled([Slice(request, position, 1, True, False, ())], 0.0)
    assert list(mlfq.ranked(10.0)) == [request]
    assert mlfq.level(request) == 0
    slow_down(cost, 3.0)
    mlfq.on_scheduled([Slice(request, 2, 1, True, False, ())], 11.0)  # the promotion's quantum
    assert mlfq.level(request) == 1
    mlfq.on_scheduled([Slice(request, 3, 1, True, False, ())], 12.0)  # the other half
    assert mlfq.level(request) == 2


def test_a_quantum_is_kept_and_decodes_are_charged_the_revised_cost() -> None:
    cost = LearningCost(LinearCost(floor=1.0, prefill_token=1e-9, attention_pair=1e-9, decode=1e-9, context_token=1e-9))
    mlfq = SkipJoinMlfq(cost, quantum_s=2.5)
    request = make(0, 1)
    mlfq.on_arrived(request, 0.0)
    mlfq.on_scheduled([Slice(request, 0, 1, True, False, ())], 1.0)
    assert mlfq.level(request) == 0
    slow_down(cost, 2.0)
    mlfq.on_scheduled([Slice(request, 1, 1, True, False, ())], 2.0)  # 1 + 2 seconds of 2.5
    assert mlfq.level(request) == 1


def test_srpt_counts_decode_steps_so_that_a_revised_cost_of_all_steps_changes_no_order() -> None:
    cost = LearningCost(LinearCost(floor=1.0, prefill_token=0.5, attention_pair=1e-9, decode=1e-9, context_token=1e-9))
    ordering = Valued(RemainingTime(ExecutionTime(cost), longest_output))
    waiting, running = make(0, 1, 10), make(1, 1, 11)

    def steps(request: Request) -> float:
        return math.exp(ordering.rank(request)[0][0])

    for request in (waiting, running):
        ordering.on_arrived(request, 0.0)
    assert steps(running) == pytest.approx(11.0)
    slow_down(cost, 3.0)
    running.progress.computed = 1
    ordering.on_scheduled([Slice(running, 0, 1, True, False, ())], 1.0)
    assert steps(running) == pytest.approx(10.0)
    assert steps(waiting) == pytest.approx(10.0)
    waiting.progress.computed = 1
    ordering.on_scheduled([Slice(waiting, 0, 1, True, False, ())], 2.0)
    assert ordering.outranks(waiting, running)
