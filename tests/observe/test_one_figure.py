"""Figures that a user can read in several places: metrics, record, explanations, steps and spans agree."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from skipjoin.core.request import Trace
from skipjoin.core.waits import WaitReason
from skipjoin.observe.histories import HistoryLog
from skipjoin.observe.metrics import EngineMetrics
from skipjoin.observe.record import Record, add_usage, summarize
from skipjoin.observe.requests import RequestFacts, RequestLog
from skipjoin.observe.spans import Span, SpanLog
from skipjoin.observe.steps import StepLog, StepSummary
from skipjoin.observe.usage import EngineUsage
from support.load import changed, load
from support.watch import World, run

BLOCK_BYTES = 1000


class Read:
    def __init__(self, world: World, fails: float) -> None:
        self.overlap = world.overlap
        draw, pool = random.Random(3), {"device_blocks": world.device_blocks, "block_size": world.block_size}
        requests = [changed(request, trace=Trace("", str(request.id))) for request in load(5, 24, texts=3)]
        done = run(world, requests, fails=lambda move: draw.random() < fails)
        facts: list[RequestFacts] = []
        self.spans: list[Span] = []
        self.steps: list[StepSummary] = []
        metrics, histories, steps = EngineMetrics(**pool, block_bytes=BLOCK_BYTES), HistoryLog(), StepLog()
        usage, log = EngineUsage(**pool, block_bytes=BLOCK_BYTES), RequestLog(facts.append)
        spans = SpanLog(lambda request, found: self.spans.extend(found))
        for event in done.events:
            for observer in (metrics, histories, steps, usage, log, spans):
                observer.observe([event])
            self.steps += steps.take() if len(facts) == len(requests) else []
        self.facts, self.histories = facts, histories.finished.after(0, len(requests))
        self.snapshot, self.end = metrics.snapshot(), done.end
        self.record: Record = summarize(facts, now=done.end)
        add_usage(self.record, [usage])


@pytest.fixture(scope="module", params=[("fastserve", 1, 0.0), ("fastserve", 2, 0.3), ("bros", 1, 0.0), ("fcfs", 1, 0)])
def read(request: pytest.FixtureRequest) -> Read:
    recipe, depth, fails = request.param
    return Read(World(recipe, depth, overlap=depth > 1), fails)


def test_swapped_bytes_are_those_of_completed_moves_everywhere(read: Read) -> None:
    swapped = {way: sum(read.snapshot.row(f"swap_{way}_bytes_total")) for way in ("out", "in")}
    assert swapped == {way: read.record["kv"][f"swapped_{way}_bytes"] for way in ("out", "in")}
    if not read.record["kv"]["checkpointed_bytes"]:  # steps count whole blocks
        blocks = {"out": sum(step.blocks_out for step in read.steps), "in": sum(step.blocks_in for step in read.steps)}
        assert swapped == {way: BLOCK_BYTES * count for way, count in blocks.items()}


def test_preemptions_agree(read: Read) -> None:
    in_metrics = read.snapshot.summed("num_preemptions_total")
    assert in_metrics == list(read.record["kv"]["preemptions"].values())
    of_histories = Counter[str]()
    for history in read.histories:
        of_histories.update(history.preemptions)
    assert of_histories == +Counter(read.record["kv"]["preemptions"])
    assert sum(in_metrics) == sum(fact.preemptions for fact in read.facts) > 0
    assert sum(in_metrics) == read.snapshot.summed("request_preemptions")[-1]
    assert sum(in_metrics) == sum(span.name == "preempted" for span in read.spans)
    assert sum(in_metrics) == sum(span.attributes.get("skipjoin.preemptions", 0) for span in read.spans)
    assert sum(in_metrics) == sum(step.preemptions for step in read.steps)


def test_prefix_hits_agree(read: Read) -> None:
    hits, queried = sum(read.snapshot.row("prefix_cache_hits_total")), read.snapshot.row("prefix_cache_queries_total")
    assert hits == read.record["prefix"]["hit_tokens"] == sum(history.cached_tokens for history in read.histories) > 0
    assert queried == [read.record["prefix"]["queried_tokens"]]


def test_wait_seconds_agree(read: Read) -> None:
    total = Counter[WaitReason]()
    for fact in read.facts:
        total.update(fact.wait_s())
    in_metrics = dict(zip(WaitReason, read.snapshot.row("wait_seconds_total"), strict=True))
    assert in_metrics == pytest.approx({reason: total[reason] for reason in WaitReason}, abs=1e-9)
    in_record = {reason: seconds * len(read.facts) for reason, seconds in read.record["wait_s"].items()}
    assert in_record == pytest.approx({str(reason): total[reason] for reason in WaitReason if total[reason]}, rel=1e-5)
    in_histories = Counter[str]()
    for history in read.histories:
        in_histories.update(history.seconds(read.end))
    # A history counts what precedes its step as running. With plans in flight, it ends a wait at the decision.
    within = (WaitReason.DISPATCH, WaitReason.TOKEN_PENDING, WaitReason.KV_IN_TRANSIT)
    for reason in () if read.overlap else set(WaitReason).difference(within):
        assert in_histories[reason] == pytest.approx(total[reason], abs=1e-6), reason
    assert in_histories.total() == pytest.approx(sum(fact.jct(read.end) for fact in read.facts))
