from __future__ import annotations

import statistics
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.observe.decisions import DecisionTimes
from skipjoin.observe.record import Slo, percentile, summarize
from skipjoin.observe.requests import Kind, RequestFacts


def complete(number: int, arrival: float, first: float, last: float, tokens: int, *, stream: str = "a") -> RequestFacts:
    return RequestFacts(
        number,
        arrival,
        10,
        tokens,
        stream,
        output_tokens=tokens,
        started=arrival,
        first_token=first,
        last_token=last,
        ended=last,
        reason="length",
    )


def test_figures_of_two_requests() -> None:
    facts = [complete(0, 0.0, 1.0, 5.0, 5), complete(1, 2.0, 4.0, 12.0, 5)]
    record = summarize(facts, now=20.0)
    assert record["requests"] == {"submitted": 2, "finished": 2, "unfinished": 0, "rejected": 0, "errors": 0}
    assert (record["throughput_rps"], record["throughput_tps"]) == (0.1, 0.5)
    assert record["normalized_latency_s"]["mean"] == 1.5  # 5 / 5 and 10 / 5
    assert record["ttft_s"]["mean"] == 1.5
    assert record["tpot_s"]["mean"] == 1.5  # 4 / 4 and 8 / 4
    assert record["jct_s"]["p50"] == 7.5
    assert "classes" not in record


def test_unfinished_and_rejected_requests_are_counted() -> None:
    late = RequestFacts(2, 5.0, 10, 5)
    record = summarize([complete(0, 0.0, 1.0, 5.0, 5), late], now=105.0, rejected=[Kind("a")] * 2, errors=[Kind("a")])
    assert record["requests"] == {"submitted": 5, "finished": 1, "unfinished": 1, "rejected": 2, "errors": 1}
    assert record["ttft_s"]["mean"] == 50.5
    assert record["normalized_latency_s"]["mean"] == (1 + 20) / 2
    assert record["jct_s"]["p99"] > 95


def test_a_record_of_no_requests_has_no_latencies() -> None:
    record = summarize([], now=0.0)
    assert record["ttft_s"] == {"mean": None, "p50": None, "p95": None, "p99": None}
    assert record["quantiles"]["jct_s"] == []


def test_objectives_count_every_request() -> None:
    facts = [complete(0, 0.0, 1.0, 5.0, 5), complete(1, 0.0, 3.0, 4.0, 5), RequestFacts(2, 0.0, 10, 5)]
    slo = summarize(facts, now=9.0, rejected=[Kind("a")], slo=Slo(ttft_s=2.0, tpot_s=0.5, jct_s=4.5))["slo"]
    assert (slo["ttft_attained"], slo["tpot_attained"], slo["jct_attained"], slo["all_attained"]) == (
        0.25,
        0.25,
        0.25,
        0.0,
    )
    assert summarize(facts, now=8.0, slo=Slo(ttft_s=2.0))["slo"]["goodput_rps"] == 1 / 8
    without = summarize(facts, now=9.0)["slo"]
    assert without["goodput_rps"] is None
    assert without["ttft_attained"] is None
    assert without["all_attained"] is None


def test_streams_are_summarized_separately() -> None:
    facts = [complete(0, 0.0, 1.0, 5.0, 5, stream="chat"), complete(1, 0.0, 7.0, 9.0, 3, stream="batch")]
    classes = summarize(facts, now=9.0, rejected=[Kind("batch"), Kind("bulk")], slo=Slo(ttft_s=8.0))["classes"]
    assert list(classes) == ["batch", "bulk", "chat"]
    assert classes["batch"]["requests"] == {
        "submitted": 2, "finished": 1, "unfinished": 0, "rejected": 1, "errors": 0
    }  # fmt: skip
    assert classes["batch"]["slo"]["ttft_attained"] == 0.5
    assert classes["bulk"]["jct_s"]["mean"] is None
    assert classes["chat"]["ttft_s"]["mean"] == 1.0
    assert classes["batch"]["requests"]["finished"] == 1


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=60))
def test_percentiles_match_the_statistics_module(values: list[float]) -> None:
    values.sort()
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 50, 95, 99):
        assert percentile(values, percent) == pytest.approx(cuts[percent - 1])
    assert (percentile(values, 0), percentile(values, 100)) == (values[0], values[-1])


@given(st.lists(st.floats(1e-7, 10.0), min_size=1, max_size=300))
def test_the_summary_covers_all_schedulers(seconds: list[float]) -> None:
    schedulers = [DecisionTimes() for _ in range(3)]
    for number, one in enumerate(seconds):
        schedulers[number % 3].add(one)
    found = DecisionTimes.summary(schedulers)
    assert found["mean"] == pytest.approx(1000 * fmean(seconds))
    # The longest time after the longest 1 % are left out.
    assert found["p99"] == pytest.approx(1000 * sorted(seconds, reverse=True)[len(seconds) // 100], rel=0.022)


def test_the_summary_without_decisions_is_none() -> None:
    assert DecisionTimes.summary([DecisionTimes()]) == {"mean": None, "p99": None}
