"""The rules of FastServe's skip-join queues (section 4.1), one test each, on whole seconds.

Under `UnitCost` a prompt of n tokens takes n seconds, a decode one: queue i has a quantum of 2^i seconds.
"""

from __future__ import annotations

import math
import random
from itertools import pairwise, product
from typing import Any

import pytest

from skipjoin.core.request import Request
from skipjoin.core.step import Slice, StepShape
from skipjoin.policies.cost import LearningCost, LinearCost
from skipjoin.policies.mlfq import SkipJoinMlfq
from skipjoin.policies.ordering import ShortestRemaining
from skipjoin.policies.predictors import MaxTokens
from support.load import make
from support.policies import COST, UnitCost


class Queues:
    """A skip-join ordering and requests that run in it without an engine."""

    def __init__(self, *, starvation_s: float = 1e6, promotion_share: float = math.inf, **settings: Any) -> None:
        self.mlfq = SkipJoinMlfq(UnitCost(), starvation_s=starvation_s, promotion_share=promotion_share, **settings)
        self.now = 0.0
        self._count = 0

    def arrive(self, prompt: int) -> Request:
        request = make(self._count, prompt, 1000, arrival=self.now)
        self._count += 1
        self.mlfq.arrived(request, self.now)
        return request

    def run(self, request: Request, most: int = 1000) -> int:
        """One iteration of up to `most` tokens; the level afterwards."""
        tokens = min(most, request.known - request.computed)
        start, end = request.computed, request.computed + tokens
        request.computed = request.planned = end
        self.now += tokens
        self.mlfq.ran([Slice(request, start, tokens, end == request.known, False, ())], self.now)
        request.known += end == request.known
        return self.mlfq.level(request)

    def drop(self, request: Request) -> None:
        """Its KV is gone."""
        request.computed = request.planned = 0
        self.mlfq.evicted(request, self.now)

    def order(self) -> list[Request]:
        return list(self.mlfq.ranked(self.now))

    def promoted(self, *requests: Request) -> list[Request]:
        """Those of the requests that are in the first queue now."""
        self.order()
        return [request for request in requests if self.mlfq.level(request) == 0]


@pytest.mark.parametrize(("prompt", "level"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (32768, 15)])
def test_a_request_joins_the_first_queue_whose_quantum_covers_its_prefill(prompt: int, level: int) -> None:
    queues = Queues()
    assert queues.mlfq.level(queues.arrive(prompt)) == level


def test_a_prompt_longer_than_every_quantum_joins_the_last_queue() -> None:
    queues = Queues(levels=3)
    assert queues.mlfq.level(queues.arrive(100)) == 2


def test_plain_mlfq_joins_the_first_queue_whatever_the_prompt() -> None:
    queues = Queues(skip_join=False)
    assert queues.mlfq.level(queues.arrive(100)) == 0


def test_a_one_token_prompt_is_the_shortest_iteration_on_any_machine() -> None:
    """Also where a prefill token costs more than a decode: the slice is charged as a decode."""
    mlfq = SkipJoinMlfq(type(COST)(floor=1.0, prefill_token=0.5, decode=0.1))
    request = make(0, 1)
    mlfq.arrived(request, 0.0)
    assert mlfq.level(request) == 0


def test_only_uncomputed_tokens_count_for_the_queue_to_join() -> None:
    queues = Queues()
    request = make(0, 9)
    request.computed = request.planned = 7
    queues.mlfq.arrived(request, 0.0)
    assert queues.mlfq.level(request) == 1


def test_a_request_stays_while_its_quantum_lasts_and_then_goes_one_queue_down() -> None:
    queues = Queues()
    request = queues.arrive(3)  # the third queue, of 4 seconds
    # 3 seconds of prefill, then decodes: 1 here, 8 in the next queue, 16 in the one below.
    levels = [queues.run(request) for _ in range(27)]
    assert levels == [2] + [3] * 8 + [4] * 16 + [5] * 2


def test_demotion_skips_queues_that_do_not_cover_the_next_iteration() -> None:
    queues = Queues(skip_join=False)
    request = queues.arrive(21)
    # The first chunk of 1 uses up the first quantum; 20 tokens are left: the next queue of at least 20 seconds.
    assert queues.run(request, most=1) == 5


def test_demotion_goes_at_least_one_queue_down() -> None:
    queues = Queues()
    request = queues.arrive(8)
    assert [queues.run(request, most=4) for _ in range(2)] == [3, 4]


def test_the_last_queue_keeps_who_uses_up_its_quantum() -> None:
    queues = Queues(levels=2)
    request, other = queues.arrive(2), queues.arrive(2)
    assert queues.run(request) == 1
    assert queues.order() == [other, request]


def test_order_within_a_queue_is_first_in_first_out() -> None:
    queues = Queues()
    requests = [queues.arrive(4) for _ in range(5)]
    assert queues.order() == requests


def test_who_runs_keeps_its_place() -> None:
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


def test_equals_do_not_outrank_each_other_and_levels_do() -> None:
    queues = Queues()
    first, second, low = queues.arrive(1), queues.arrive(1), queues.arrive(9)
    outranks = queues.mlfq.outranks
    assert not outranks(first, second)
    assert not outranks(second, first)
    assert outranks(first, low)
    assert outranks(second, low)
    assert not outranks(low, first)


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


def test_starving_is_measured_from_the_last_run() -> None:
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


def test_a_promotion_lasts_one_quantum_and_returns_with_the_time_used_before() -> None:
    queues = Queues(starvation_s=10)
    request = queues.arrive(4)
    assert queues.run(request, most=3) == 2  # 3 of 4 seconds used
    queues.now += 10
    queues.order()
    assert queues.mlfq.level(request) == 0
    # One second in the first queue, back with 3 seconds used, so one more second leads down.
    assert [queues.run(request) for _ in range(2)] == [2, 3]


def test_a_promoted_request_returns_to_the_tail() -> None:
    queues = Queues(starvation_s=10)
    request = queues.arrive(3)
    queues.run(request)
    queues.now += 10
    assert queues.promoted(request) == [request]
    other = queues.arrive(4)
    queues.run(request)
    assert queues.order() == [other, request]


def test_a_request_may_be_promoted_again_but_only_after_starving_again() -> None:
    queues = Queues(starvation_s=10)
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


def test_a_request_that_left_is_forgotten_by_the_watch_for_starving() -> None:
    queues = Queues(starvation_s=10)
    request, other = queues.arrive(5), queues.arrive(5)
    queues.mlfq.left(request, 1.0)
    queues.now = 50.0
    assert queues.order() == [other]


def test_requests_that_left_are_not_kept_until_they_would_have_starved() -> None:
    """Starvation may be set to years, to switch it off."""
    queues = Queues(starvation_s=1e9)
    for _ in range(5000):
        queues.mlfq.left(queues.arrive(5), queues.now)
    assert len(queues.mlfq._watch) < 1000


# -- the pace of promotions -------------------------------------------------------------------------------------------


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
    assert queues.promoted(first, second) == [first, second] or queues.promoted(first, second) == [second]


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


# -- whose turn is next -----------------------------------------------------------------------------------------------


def enst(queues: Queues, live: list[Request], starvation_s: float, last: dict[Request, float]) -> dict[Request, float]:
    """The estimated next scheduled time of each request, to the letter of section 4.2."""
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
def test_turns_are_estimated_as_in_the_paper(seed: int, hysteresis_s: float) -> None:
    """To within one hysteresis, where promotions are not paced."""
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
            runs = draw.choice(live)
            queues.run(runs)
            last[runs] = queues.now
        if draw.random() < 0.1:
            queues.order()
        if draw.random() < 0.05:
            gone = live.pop(draw.randrange(len(live)))
            queues.mlfq.left(gone, queues.now)
    expected = enst(queues, live, starvation_s, last)
    asked = draw.sample(live, len(live) * 3 // 4)
    turns = queues.mlfq.next_turns(asked, queues.now)
    assert sorted(request.id for _, request in turns) == sorted(request.id for request in asked)
    assert [turn for turn, _ in turns] == sorted(turn for turn, _ in turns)
    for turn, request in turns:
        assert abs(turn * hysteresis_s - expected[request]) <= hysteresis_s
    for (at, (one_turn, one)), (after, (other_turn, other)) in product(enumerate(turns), repeat=2):
        if at < after:
            assert expected[one] < expected[other] + hysteresis_s
            if one_turn == other_turn and queues.mlfq.level(one) == queues.mlfq.level(other):
                assert queues.mlfq.rank(one) < queues.mlfq.rank(other), "in one queue the order is FIFO"


def test_a_batch_shares_the_time_of_those_above() -> None:
    queues = Queues(hysteresis_s=1.0)
    low = queues.arrive(60)  # the seventh queue, below quanta of 63 seconds
    above = [queues.arrive(1) for _ in range(8)]
    assert [turn for turn, _ in queues.mlfq.next_turns([low], 0.0)] == [8 * 63]
    pieces = [Slice(request, 0, 1, True, False, ()) for request in above]
    for _ in range(200):  # steps of eight: who runs one token at a time is told of nothing else here
        queues.mlfq._batch += 0.05 * (len(pieces) - queues.mlfq._batch)
    assert [turn for turn, _ in queues.mlfq.next_turns([low], 0.0)] == pytest.approx([63], abs=1)


def test_a_step_without_slices_says_nothing_about_the_batch() -> None:
    queues = Queues(hysteresis_s=1.0)
    low, _ = queues.arrive(60), queues.arrive(1)
    before = queues.mlfq.next_turns([low], 0.0)
    for _ in range(10_000):
        queues.mlfq.ran((), 0.0)
    assert queues.mlfq.next_turns([low], 0.0) == before


def test_paced_promotions_follow_each_other() -> None:
    """Of those that starve, one in 20 seconds of these: not all have their turn at once."""
    queues = Queues(starvation_s=10, promotion_share=0.05, hysteresis_s=0.001)
    requests = [queues.arrive(2000 + number) for number in range(3)]
    queues.arrive(1)
    queues.now = 10.0
    turns = queues.mlfq.next_turns(requests, queues.now)
    assert [(turn * 0.001, request) for turn, request in turns] == [
        (pytest.approx(20.0 * number), request) for number, request in enumerate(requests)
    ]


@pytest.mark.parametrize(
    "bad",
    [
        {"levels": 0},
        {"quantum_s": 0.0},
        {"starvation_s": 0.0},
        {"hysteresis_s": 0.0},
        {"promotion_share": 0.0},
        {"promotion_share": math.nan},
    ],
)
def test_settings_are_above_zero(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        SkipJoinMlfq(COST, **bad)  # type: ignore[arg-type]


# -- a cost model that learns -----------------------------------------------------------------------------------------


def slow_down(cost: LearningCost, times: float) -> None:
    """Teach that every step takes `times` as long as it did."""
    truth = cost.current
    for _ in range(500):
        for shape in (StepShape(decodes=1, context=1), StepShape(prefill=8, attention=36)):
            cost.learn(shape, times * truth.step(shape))


def test_quanta_follow_the_cost_model_and_requests_keep_their_queues() -> None:
    cost = LearningCost(LinearCost(floor=1.0, prefill_token=0.5, attention_pair=1e-9, decode=1e-9, context_token=1e-9))
    mlfq = SkipJoinMlfq(cost, starvation_s=1e9)
    waiting, running = make(0, 8), make(1, 1)
    for request in (waiting, running):
        mlfq.arrived(request, 0.0)
    assert (mlfq.level(waiting), mlfq.level(running)) == (3, 0)
    running.computed = 1
    mlfq.ran([Slice(running, 0, 1, True, False, ())], 1.0)
    assert mlfq.level(running) == 1
    mlfq.ran([Slice(running, 1, 1, True, False, ())], 2.0)  # one of two decodes of this quantum
    slow_down(cost, 3.0)
    # The other decode ends the quantum on the slower machine as well: neither was half of it forgotten, nor is the
    # decode's old time in use, with which three more would fit.
    mlfq.ran([Slice(running, 2, 1, True, False, ())], 3.0)
    assert (mlfq.level(waiting), mlfq.level(running)) == (3, 2)
    newcomers = [make(2, 1), make(3, 8)]
    for request in newcomers:
        mlfq.arrived(request, 4.0)
    assert [mlfq.level(request) for request in newcomers] == [0, 3]


def test_time_used_before_a_promotion_is_scaled_with_the_quanta() -> None:
    cost = LearningCost(LinearCost(floor=1.0, prefill_token=1e-9, attention_pair=1e-9, decode=1e-9, context_token=1e-9))
    mlfq = SkipJoinMlfq(cost, starvation_s=10.0)
    request = make(0, 1)
    mlfq.arrived(request, 0.0)
    for position in range(2):  # a quantum in the first queue, half of one in the second
        mlfq.ran([Slice(request, position, 1, True, False, ())], 0.0)
    assert list(mlfq.ranked(10.0)) == [request]
    assert mlfq.level(request) == 0
    slow_down(cost, 3.0)
    mlfq.ran([Slice(request, 2, 1, True, False, ())], 11.0)  # the promotion's quantum
    assert mlfq.level(request) == 1
    mlfq.ran([Slice(request, 3, 1, True, False, ())], 12.0)  # the other half
    assert mlfq.level(request) == 2


def test_a_quantum_that_was_given_stays_and_decodes_are_charged_anew() -> None:
    cost = LearningCost(LinearCost(floor=1.0, prefill_token=1e-9, attention_pair=1e-9, decode=1e-9, context_token=1e-9))
    mlfq = SkipJoinMlfq(cost, quantum_s=2.5)
    request = make(0, 1)
    mlfq.arrived(request, 0.0)
    mlfq.ran([Slice(request, 0, 1, True, False, ())], 1.0)
    assert mlfq.level(request) == 0
    slow_down(cost, 2.0)
    mlfq.ran([Slice(request, 1, 1, True, False, ())], 2.0)  # 1 + 2 seconds of 2.5
    assert mlfq.level(request) == 1


def test_shortest_remaining_ranks_who_runs_by_the_revised_cost() -> None:
    cost = LearningCost(LinearCost(floor=1.0, prefill_token=0.5, attention_pair=1e-9, decode=1e-9, context_token=1e-9))
    ordering = ShortestRemaining(cost, MaxTokens())
    waiting, running = make(0, 1, 10), make(1, 1, 11)
    for request in (waiting, running):
        ordering.arrived(request, 0.0)
    assert ordering.rank(running)[0] == pytest.approx(11.0)
    slow_down(cost, 3.0)
    running.computed = 1
    ordering.ran([Slice(running, 0, 1, True, False, ())], 1.0)
    assert ordering.rank(running)[0] == pytest.approx(10 * cost.step(StepShape(decodes=1, context=1)))
    assert ordering.rank(waiting)[0] == pytest.approx(10.0)  # until it runs
    waiting.computed = 1
    ordering.ran([Slice(waiting, 0, 1, True, False, ())], 2.0)
    assert ordering.outranks(waiting, running)
