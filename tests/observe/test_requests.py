from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipjoin.core.events import Computed, Finished, Planned, Preempted, Started, Token
from skipjoin.core.request import Request, Trace
from skipjoin.observe.requests import RequestFacts, RequestLog
from skipjoin.observe.spans import Span, SpanLog
from support.load import changed, load, make
from support.policies import EVICTIONS, UnitCost
from support.watch import Run, World, run
from support.worlds import each_recipe

UNIT = World("fcfs", cost=UnitCost())


def facts_of(done: Run) -> dict[int, RequestFacts]:
    ended: list[RequestFacts] = []
    log = RequestLog(ended.append)
    for event in done.events:
        log.observe([event])
    assert list(log.live(done.end)) == []
    return {facts.id: facts for facts in ended}


def test_figures_of_a_single_request() -> None:
    # Five prompt tokens take 5 s, each further token 1 s.
    facts = facts_of(run(UNIT, [make(0, 5, 3, arrival=2.0)]))[0]
    assert (facts.prompt_tokens, facts.output_tokens, facts.output_limit) == (5, 3, 3)
    assert (facts.arrival, facts.started, facts.first_token, facts.last_token, facts.ended) == (2, 2, 7, 9, 9)
    assert facts.is_complete
    assert (facts.ttft(99), facts.tpot(99), facts.jct(99)) == (5.0, 1.0, 7.0)
    assert facts.normalized_latency(99) == pytest.approx(7 / 3)
    assert (facts.queue(99), facts.prefill(99), facts.decode()) == (0.0, 5.0, 2.0)
    assert (facts.execution_s, facts.scheduling_s, facts.waiting(99)) == (7.0, 0.0, 0.0)


def test_waiting_is_the_latency_without_execution() -> None:
    facts = facts_of(run(replace(UNIT, max_seqs=1), [make(0, 5, 2), make(1, 3, 1, arrival=1.0)]))[1]
    # The first request has the device until 6 s.
    assert (facts.queue(99), facts.ttft(99), facts.execution_s, facts.waiting(99)) == (5.0, 8.0, 3.0, 5.0)
    assert facts.tpot(99) is None


def test_an_unfinished_request_counts_with_its_age() -> None:
    ended: list[RequestFacts] = []
    log = RequestLog(ended.append)
    core = UNIT.core()
    core.add(make(0, 5, 10), 0.0)
    core.add(make(1, 5, 10), 0.0)
    log.observe(core.take_events())
    waiting, _ = log.live(4.0)
    assert (waiting.ttft(4.0), waiting.queue(4.0), waiting.jct(4.0)) == (4.0, 4.0, 4.0)
    assert waiting.tpot(4.0) is None
    assert waiting.normalized_latency(4.0) == 0.4
    assert not waiting.is_complete


def test_the_current_gap_between_tokens_counts() -> None:
    facts = RequestFacts(0, 0.0, 5, 10, output_tokens=2, first_token=1.0, last_token=2.0)
    assert facts.tpot(21.0) == 10.0
    facts.ended, facts.reason = 21.0, "abort"
    assert facts.tpot(99.0) == 10.0


@pytest.mark.parametrize("recipe", each_recipe(parts=4))
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 1000), depth=st.sampled_from([1, 2]), eviction=st.sampled_from([None, *sorted(EVICTIONS)]))
def test_figures_agree_with_the_events(recipe: str, seed: int, depth: int, eviction: str | None) -> None:
    world = World(recipe, depth, overlap=depth > 1, eviction=EVICTIONS[eviction] if eviction else None)
    done = run(world, load(seed, 12))
    facts = facts_of(done)
    assert sorted(facts) == [request.id for request in done.requests]
    execution: dict[int, float] = defaultdict(float)
    swapping: dict[int, float] = defaultdict(float)
    planned: dict[int, float] = {}
    computed = 0.0
    preemptions: dict[int, int] = defaultdict(int)
    finished: set[int] = set()
    for event in done.events:
        if isinstance(event, Planned):
            planned[event.plan.id] = event.now
        elif isinstance(event, Computed):
            result = event.result
            for piece in result.plan.slices:
                if piece.request.id not in finished:
                    execution[piece.request.id] += result.seconds - result.moving
                    swapping[piece.request.id] += result.moving
            # A request that could run if it had its KV waits for a swap, as do all requests of a plan that only waits.
            missed = result.seconds if result.plan.slices else event.now - max(planned[result.plan.id], computed)
            computed = event.now
            for request in result.plan.waiting_for_kv:
                if request.id not in finished:
                    swapping[request.id] += missed
        elif isinstance(event, Preempted):
            preemptions[event.request.id] += 1
        elif isinstance(event, Finished):
            finished.add(event.request.id)
    for request in done.requests:
        one = facts[request.id]
        tokens = [e.now for e in done.events if isinstance(e, Token) and e.request is request]
        starts = [e.now for e in done.events if isinstance(e, Started) and e.request is request]
        assert (one.first_token, one.last_token, one.output_tokens) == (tokens[0], tokens[-1], len(tokens))
        assert one.started == starts[0]
        assert one.preemptions == preemptions[request.id]
        assert one.execution_s == pytest.approx(execution[request.id])
        assert one.swapping_s == pytest.approx(swapping[request.id])
        assert 0 <= one.queue(0) <= one.ttft(0) <= one.jct(0)
        assert one.prefill(0) == pytest.approx(one.ttft(0) - one.queue(0))
        if depth == 1:
            # Only the device takes time here, so a request waits whenever the device does not work for it.
            assert one.scheduling_s == 0
            assert one.waiting(0) + one.execution_s + one.swapping_s == pytest.approx(one.jct(0))


def traced(requests: list[Request]) -> list[Request]:
    return [changed(request, trace=Trace("", str(request.id))) for request in requests]


def seconds(spans: list[Span], name: str) -> float | None:
    found = [span.end - span.begin for span in spans if span.name == name]
    assert len(found) <= 1
    return found[0] if found else None


@pytest.mark.parametrize("recipe", each_recipe(parts=4, begin=1))
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 1000), depth=st.sampled_from([1, 2]), eviction=st.sampled_from([None, *sorted(EVICTIONS)]))
def test_spans_agree_with_the_record(recipe: str, seed: int, depth: int, eviction: str | None) -> None:
    world = World(recipe, depth, overlap=depth > 1, eviction=EVICTIONS[eviction] if eviction else None)
    done = run(world, traced(load(seed, 12)))
    facts: dict[int, RequestFacts] = {}
    spans: dict[int, list[Span]] = {}
    records = RequestLog(lambda record: facts.update({record.id: record}))
    log = SpanLog(lambda request, found: spans.update({request.id: found}))
    for event in done.events:
        records.observe([event])
        log.observe([event])
    assert sorted(spans) == sorted(facts) == [request.id for request in done.requests]
    for number, (whole, *children) in spans.items():
        one = facts[number]
        assert (whole.begin, whole.end) == (one.arrival, one.ended)
        assert whole.attributes["gen_ai.usage.output_tokens"] == one.output_tokens
        assert seconds(children, "queue") == one.queue(done.end)
        assert seconds(children, "prefill") == one.prefill(done.end)
        assert seconds(children, "decode") == one.decode()
        preempted = [span for span in children if span.name == "preempted"]
        assert len(preempted) == whole.attributes["skipjoin.preemptions"] == one.preemptions
        times = [event.now for event in done.events if isinstance(event, Preempted) and event.request.id == number]
        assert [span.begin for span in preempted] == times
        assert all(whole.begin <= span.begin <= span.end <= whole.end for span in children)


def test_requests_without_a_trace_have_no_spans() -> None:
    done = run(World("fcfs"), [make(0, 5, 3), *traced([make(1, 5, 3)])])
    found: list[int] = []
    log = SpanLog(lambda request, spans: found.append(request.id))
    log.observe(done.events)
    assert found == [1]
