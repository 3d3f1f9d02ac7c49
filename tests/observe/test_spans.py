from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipjoin.core.events import Preempted
from skipjoin.core.request import Request, Trace
from skipjoin.observe.requests import RequestFacts, RequestLog
from skipjoin.observe.spans import Span, SpanLog
from support.load import load, make
from support.policies import EVICTIONS
from support.watch import World, run
from support.worlds import each_recipe


def traced(requests: list[Request]) -> list[Request]:
    for request in requests:
        request.options = replace(request.options, trace=Trace("", str(request.id)))
    return requests


def seconds(spans: list[Span], name: str) -> float | None:
    found = [span.end - span.begin for span in spans if span.name == name]
    assert len(found) <= 1
    return found[0] if found else None


@pytest.mark.parametrize("recipe", each_recipe())
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 1000), depth=st.sampled_from([1, 2]), eviction=st.sampled_from([None, *sorted(EVICTIONS)]))
def test_spans_agree_with_the_record(recipe: str, seed: int, depth: int, eviction: str | None) -> None:
    world = World(recipe, depth, overlap=depth > 1, eviction=EVICTIONS[eviction] if eviction else None)
    done = run(world, traced(load(seed, 12)))
    facts: dict[int, RequestFacts] = {}
    spans: dict[int, list[Span]] = {}
    records = RequestLog(lambda one: facts.update({one.id: one}))
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
