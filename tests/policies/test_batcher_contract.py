from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papers.econoserve.coupled import WholePrompts
from papers.fastserve.static import RunToCompletion
from skipjoin.core.context import StepContext
from skipjoin.core.policy import BatchBuilder, Batcher, CountingBuilder
from skipjoin.core.refusals import NO_SLOT, NO_TOKENS, PROMPT_DOES_NOT_FIT, PROMPTS_ARE_FULL, Refusal, Scope
from skipjoin.core.request import NO_TARGET, FinishReason, Request, Target
from skipjoin.core.step import Slice, StepShape
from skipjoin.policies.batching import Greedy, TargetForward, Yielding
from skipjoin.policies.forward import saturating_tokens
from skipjoin.policies.stages import EvenStages
from skipjoin.policies.step_load import MIN_CHUNK, StepLoad
from support.load import make
from support.policies import COST

# Tests construct their own, because a batcher may remember its steps.
BATCHERS: dict[str, Callable[[], Batcher]] = {
    "whole": lambda: Greedy(4, 32, chunked=False),
    "chunked": lambda: Greedy(4, 32, chunked=True),
    "one slot": lambda: Greedy(1, 32, chunked=False),
    "one token": lambda: Greedy(4, 1, chunked=True),
    "static": lambda: RunToCompletion(4, 32),
    "static, one slot": lambda: RunToCompletion(1, 32),
    "static, one token": lambda: RunToCompletion(4, 1),
    "target": lambda: TargetForward(4, 32, COST),
    "whole to a target": lambda: WholePrompts(4, 32, COST, target=20),
    "target, one token": lambda: TargetForward(4, 32, COST, target=1),
    "yielding": lambda: Yielding(4, 32, COST),
    "yielding, one token": lambda: Yielding(4, 1, COST),
    "yielding to an objective": lambda: Yielding(4, 32, COST, tpot_s=0.021),
    "stages": lambda: EvenStages(Greedy(4, 32, chunked=True), COST, 2, max_seqs=8, max_tokens=64, cuts=True),
    "stages, static": lambda: EvenStages(
        RunToCompletion(4, 32), COST, 2, max_seqs=4, max_tokens=64, cuts=False, holds_back=False
    ),
}
every_batcher = pytest.mark.parametrize("batcher", BATCHERS.values(), ids=BATCHERS.keys())


class ChangingCost:
    def __init__(self) -> None:
        self.revision = 0
        self.margin = 1.0
        self.floor = 0.01

    def step(self, shape: StepShape) -> float:
        return self.floor + 1e-3 * shape.prefill

    def transfer(self, blocks: int) -> float:
        return 0.0


def fill(packing: BatchBuilder, pending: Sequence[int]) -> list[int | Refusal]:
    """Offer new requests with that many pending tokens in turn and return the verdicts."""
    return offer_all(packing, [make(number, tokens) for number, tokens in enumerate(pending)])


def offer_all(packing: BatchBuilder, requests: Sequence[Request]) -> list[int | Refusal]:
    verdicts: list[int | Refusal] = []
    for request in requests:
        verdict = packing.offer(request, request.progress.pending)
        if isinstance(verdict, int):
            packing.take(request, verdict)
            request.progress.planned += verdict
        verdicts.append(verdict)
    return verdicts


@every_batcher
@given(pending=st.lists(st.integers(1, 100), max_size=12))
def test_a_verdict_is_a_refusal_or_at_most_the_pending_tokens(
    batcher: Callable[[], Batcher], pending: list[int]
) -> None:
    for tokens, verdict in zip(pending, fill(batcher().open(StepContext()), pending), strict=True):
        assert isinstance(verdict, Refusal) or 1 <= verdict <= tokens


@every_batcher
@given(pending=st.lists(st.integers(1, 100), min_size=1, max_size=12))
def test_the_first_request_is_never_refused(batcher: Callable[[], Batcher], pending: list[int]) -> None:
    assert isinstance(fill(batcher().open(StepContext()), pending)[0], int)


@every_batcher
@given(pending=st.lists(st.integers(1, 100), max_size=12))
def test_a_refusal_of_scope_all_closes_the_step(batcher: Callable[[], Batcher], pending: list[int]) -> None:
    verdicts = fill(batcher().open(StepContext()), pending)
    stops = [at for at, verdict in enumerate(verdicts) if isinstance(verdict, Refusal) and verdict.scope is Scope.ALL]
    if stops:
        assert stops == list(range(stops[0], len(verdicts)))


@every_batcher
@given(pending=st.lists(st.integers(1, 100), max_size=12))
def test_an_offer_that_is_not_taken_uses_no_budget(batcher: Callable[[], Batcher], pending: list[int]) -> None:
    packing = batcher().open(StepContext())
    for number, tokens in enumerate(pending):
        packing.offer(make(number, tokens), tokens)
    assert fill(packing, pending) == fill(batcher().open(StepContext()), pending)


@every_batcher
@given(pending=st.lists(st.sampled_from([1, 1, 1, 2, 7, 40]), max_size=12))
def test_decodes_that_are_taken_by_their_number_count_as_those_that_were_offered(
    batcher: Callable[[], Batcher], pending: list[int]
) -> None:
    asked, counted = batcher().open(StepContext()), batcher().open(StepContext())
    if not isinstance(counted, CountingBuilder):
        return
    for tokens in pending:
        if tokens == 1 and counted.decodes:
            counted.take_decodes(1)
            assert fill(asked, [1]) == [1]
        else:
            verdicts = fill(counted, [tokens])
            assert verdicts == fill(asked, [tokens])
            assert tokens > 1 or isinstance(verdicts[0], Refusal)


@every_batcher
def test_a_step_begins_empty_after_all_requests_finish(batcher: Callable[[], Batcher]) -> None:
    same, requests = batcher(), [make(number, 9) for number in range(9)]
    verdicts = offer_all(same.open(StepContext()), requests)
    for request in requests:
        request.progress.finish_reason = FinishReason.STOP
    assert fill(same.open(StepContext(now=1.0)), [9] * 9) == verdicts


@every_batcher
@given(seed=st.integers(0, 10**9))
def test_a_step_that_is_offered_all_requests_schedules_at_least_one(batcher: Callable[[], Batcher], seed: int) -> None:
    """Neither the order of offers nor requests that finish or lose KV between steps cause a stall."""
    draw, same = random.Random(seed), batcher()
    alive = [make(number, draw.randint(1, 50)) for number in range(8)]
    while alive:
        draw.shuffle(alive)
        packing, taken, closed = same.open(StepContext()), 0, False
        for request in alive:
            if closed and not request.progress.planned:  # the scheduler offers a closed step only to requests with KV
                continue
            (verdict,) = offer_all(packing, [request])
            taken += isinstance(verdict, int)
            closed = closed or (isinstance(verdict, Refusal) and verdict.scope is Scope.INCOMING)
        assert taken
        for request in alive:
            chance = draw.random()
            if chance < 0.1:
                request.progress.finish_reason = FinishReason.STOP
            elif chance < 0.3:
                request.progress.planned = 0
            elif request.progress.planned:
                request.progress.planned = request.progress.known - 1
        alive = [request for request in alive if request.progress.finish_reason is None]


@pytest.mark.parametrize("chunked", [False, True])
@given(pending=st.lists(st.integers(1, 60), max_size=20), seqs=st.integers(1, 6), tokens=st.integers(1, 80))
def test_greedy_respects_its_budgets(pending: list[int], seqs: int, tokens: int, chunked: bool) -> None:
    taken = [v for v in fill(Greedy(seqs, tokens, chunked=chunked).open(StepContext()), pending) if isinstance(v, int)]
    assert len(taken) <= seqs
    if chunked:
        assert sum(taken) <= tokens
    else:
        # Decodes use no budget. A prompt longer than the whole budget may exceed it if it is the only prompt.
        prompts = [count for count in taken if count > 1]
        assert sum(prompts) <= tokens or len(prompts) == 1


@given(pending=st.lists(st.integers(1, 60), max_size=20))
def test_greedy_without_chunking_computes_whole_prompts(pending: list[int]) -> None:
    for tokens, verdict in zip(pending, fill(Greedy(4, 32, chunked=False).open(StepContext()), pending), strict=True):
        assert isinstance(verdict, Refusal) or verdict == tokens


@given(pending=st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_greedy_with_chunking_fills_the_token_budget(pending: list[int]) -> None:
    taken = [v for v in fill(Greedy(50, 32, chunked=True).open(StepContext()), pending) if isinstance(v, int)]
    assert sum(taken) == min(32, sum(pending))


def test_greedy_closes_the_step_to_incoming_requests_at_a_prompt_that_does_not_fit() -> None:
    assert fill(Greedy(4, 10, chunked=False).open(StepContext()), [1, 8, 3, 1, 1]) == [1, 8, PROMPT_DOES_NOT_FIT, 1, 1]


def test_greedy_takes_a_prompt_above_the_budget_alongside_decodes() -> None:
    assert fill(Greedy(9, 10, chunked=False).open(StepContext()), [1, 1, 20, 1, 2]) == [
        1,
        1,
        20,
        1,
        PROMPT_DOES_NOT_FIT,
    ]


def test_prompts_are_whole_up_to_the_target_and_chunked_above_it() -> None:
    def open_(target: int) -> BatchBuilder:
        return WholePrompts(9, 99, COST, target=target).open(StepContext())

    assert fill(open_(10), [1, 8, 3, 1, 1]) == [1, 8, PROMPT_DOES_NOT_FIT, 1, 1]
    assert fill(open_(10), [1, 1, 20, 1, 2]) == [1, 1, 8, 1, PROMPTS_ARE_FULL]


def test_greedy_stops_when_slots_or_tokens_run_out() -> None:
    assert fill(Greedy(2, 10, chunked=False).open(StepContext()), [1, 1, 1]) == [1, 1, NO_SLOT]
    assert fill(Greedy(9, 10, chunked=True).open(StepContext()), [5, 5, 1]) == [5, 5, NO_TOKENS]


def decoding(batcher: Yielding, count: int, target: Target = NO_TARGET) -> list[Request]:
    """Report a step of `count` prompts, and return them as streams with one output token."""
    streams = [make(number, 2, 99, target=target) for number in range(count)]
    for stream in streams:
        batcher.on_arrived(stream, 0.0)
    batcher.on_scheduled([Slice(stream, 0, 2, True, False, ()) for stream in streams], 0.0)
    for stream in streams:
        stream.progress.begin(2, False, 0)
        stream.progress.append(0)
    return streams


@pytest.mark.parametrize("is_last", [False, True])
def test_prompts_leave_tokens_for_decodes_whichever_are_offered_first(is_last: bool) -> None:
    batcher = Yielding(20, 32, COST)
    streams, long = decoding(batcher, 10), make(99, 500)
    offered = [*streams, long] if is_last else [long, *streams]
    for step in range(3):
        verdicts = offer_all(batcher.open(StepContext()), offered)
        assert sorted(verdicts) == [1] * 10 + [22]
        for stream in streams:
            stream.progress.append(step)


def test_tokens_of_finished_streams_go_to_prompts_which_get_half_of_them_at_least() -> None:
    batcher = Yielding(60, 32, COST)
    streams = decoding(batcher, 16)
    for stream in streams[4:]:
        stream.progress.finish(FinishReason.STOP)
        batcher.on_finished(stream, 0.0)
    assert fill(batcher.open(StepContext()), [500]) == [28]
    decoding(batcher, 16)
    assert fill(batcher.open(StepContext()), [500]) == [16]


def test_prompts_are_cut_to_the_shortest_tpot_objective_of_the_streams() -> None:
    """Requests that wait for their first token, too, have no stream that a prompt delays."""
    batcher = Yielding(20, 4096, COST)
    (stream,) = decoding(batcher, 1, Target(tpot_s=0.1))
    long = make(99, 4000, target=Target(tpot_s=0.001))
    cut, _ = offer_all(batcher.open(StepContext()), [long, stream])
    together = StepLoad.of(0, cut).plus(StepLoad.of(2, 1))
    assert 0.09 < together.seconds(COST) <= 0.1
    stream.progress.finish(FinishReason.STOP)
    assert fill(batcher.open(StepContext()), [4000]) == [4000]


def test_prompts_progress_if_decodes_alone_miss_their_objective() -> None:
    batcher = Yielding(20, 4096, COST, tpot_s=1e-3)
    streams = decoding(batcher, 4)
    cut, *decodes = offer_all(batcher.open(StepContext()), [make(99, 4000), *streams])
    assert decodes == [1] * 4
    assert MIN_CHUNK <= cut < 200


@pytest.mark.parametrize("arguments", [(0, 1), (1, 0), (-1, 1)])
def test_empty_budgets_are_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"max_(seqs|tokens) must be at least 1, got (0|-1)"):
        Greedy(*arguments, chunked=True)
    with pytest.raises(ValueError, match=r"max_(seqs|tokens) must be at least 1, got (0|-1)"):
        RunToCompletion(*arguments)


def test_a_target_limits_prompts_but_not_decodes() -> None:
    packing = TargetForward(7, 100, COST, target=32).open(StepContext())
    assert fill(packing, [1, 20, 20, 1, 5, 1, 1, 1, 1]) == [1, 20, 11, 1, PROMPTS_ARE_FULL, 1, 1, 1, NO_SLOT]


def test_the_target_is_updated_with_the_cost_model() -> None:
    cost = ChangingCost()
    batcher = TargetForward(4, 4096, cost)
    before = batcher.target
    cost.floor, cost.revision = 10 * cost.floor, 1
    batcher.open(StepContext())
    assert batcher.target > before
    assert batcher.target == saturating_tokens(cost, 4096)
