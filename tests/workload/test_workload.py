from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.config import ConfigError
from skipjoin.core.request import ServiceClass
from skipjoin.workload.arrivals import parse_arrivals
from skipjoin.workload.lengths import parse_lengths
from skipjoin.workload.request import WorkloadRequest
from skipjoin.workload.streams import Stream, parse_stream
from skipjoin.workload.traces import Trace, TraceRow
from skipjoin.workload.workload import DEFAULT, Replay, Synthetic, Workload, synthetic, with_best_effort

BATCH = "name=batch,lengths=uniform:512-1024,32-128,arrivals=gamma:2,share=0.5,priority=10"
REAL_TIME, BEST_EFFORT = ServiceClass
TIMED = Trace("timed.csv", tuple(TraceRow(100 + 0.5 * index, 10 + index, 5 + index) for index in range(40)))
UNTIMED = Trace("untimed.csv", tuple(TraceRow(None, 10 + index, 5 + index, str(index)) for index in range(7)))
POISSON = parse_arrivals("poisson")
WORKLOADS: dict[str, Workload] = {
    "one stream": synthetic("sharegpt", "poisson"),
    "two streams": synthetic("alpaca", "burst:5,0.2,10", [BATCH]),
    "classes": with_best_effort(synthetic("lmsys", "gamma:3", [BATCH]), 0.3),
    "trace with arrivals": with_best_effort(Replay(TIMED, speedup=2), 0.5),
    "trace without arrivals": with_best_effort(Replay(UNTIMED, arrivals=POISSON), 0.5),
}
PINNED = [
    (0.00125575, 19, 302, "default", 0),
    (0.009729853, 808, 114, "batch", 10),
    (0.031963633, 836, 108, "batch", 10),
    (0.041327302, 707, 73, "batch", 10),
]
every_workload = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS.keys())
SEEDS = st.integers(0, 2**31)


@every_workload
@given(seed=SEEDS, duration_s=st.floats(0.1, 5), rate_rps=st.floats(0.5, 8), more=st.floats(0, 5))
def test_a_longer_duration_only_adds_jobs(
    workload: Workload, seed: int, duration_s: float, rate_rps: float, more: float
) -> None:
    jobs = workload.draw(rate_rps, duration_s, seed)
    assert all(earlier.at <= later.at for earlier, later in pairwise(jobs))
    assert all(0 <= job.at < duration_s for job in jobs)
    longer = workload.draw(rate_rps, duration_s + more, seed)
    assert longer[: len(jobs)] == jobs
    assert all(job.at >= duration_s for job in longer[len(jobs) :])


@every_workload
@given(seed=SEEDS, limit=st.integers(1, 30))
def test_a_limit_is_the_number_of_jobs(workload: Workload, seed: int, limit: int) -> None:
    jobs = workload.draw(2.0, None, seed, limit=limit)
    assert len(jobs) == limit
    assert workload.draw(2.0, None, seed, limit=limit + 5)[:limit] == jobs
    assert workload.draw(2.0, math.nextafter(jobs[-1].at, math.inf), seed)[:limit] == jobs


@pytest.mark.parametrize("name", ["one stream", "two streams", "classes", "trace without arrivals"])
@given(seed=SEEDS, factor=st.floats(0.1, 50))
def test_a_rate_only_stretches_time(name: str, seed: int, factor: float) -> None:
    """Rates are compared with common random numbers: the same requests in the same pattern."""
    slow, fast = (WORKLOADS[name].draw(rate, None, seed, limit=30) for rate in (1.5, 1.5 * factor))
    for one, other in zip(slow, fast, strict=True):
        assert one.at == pytest.approx(other.at * factor)
        assert one[1:] == other[1:]


def test_jobs_are_the_same_in_every_version_and_process() -> None:
    """Recorded results name a seed, which must give the same jobs in the future and on other machines."""
    jobs = synthetic("sharegpt", "poisson", [BATCH]).draw(2.0, None, 7, limit=4)
    assert [(round(job.at, 9), *job[1:5]) for job in jobs] == PINNED


def test_another_seed_gives_other_jobs() -> None:
    one, other = (synthetic("sharegpt", "poisson").draw(1.0, None, seed, limit=20) for seed in (0, 1))
    assert not {job.at for job in one} & {job.at for job in other}
    assert [job[1:3] for job in one] != [job[1:3] for job in other]


def test_a_second_stream_does_not_change_the_first() -> None:
    alone = synthetic("sharegpt", "poisson").draw(1.0, 100.0, 3)
    both = synthetic("sharegpt", "poisson", [BATCH]).draw(2.0, 100.0, 3)
    assert [job for job in both if job.stream == "default"] == alone
    assert {job[3:5] for job in both} == {("default", 0), ("batch", 10)}


def test_streams_have_their_shares_of_the_rate() -> None:
    third = "name=third,lengths=fixed:9,9,arrivals=constant,share=0.2"
    jobs = synthetic("fixed:1,1", "poisson", [third]).draw(10.0, 500.0, 0)
    counts = Counter(job.stream for job in jobs)
    assert counts["default"] == pytest.approx(4000, rel=0.05)
    # There is one every half second; the last is at 500 s and excluded.
    assert counts["third"] == 999


def test_streams_draw_independent_random_numbers() -> None:
    """The two streams differ in their names only."""
    copy = "name=copy,lengths=sharegpt,arrivals=poisson,share=0.5"
    jobs = synthetic("sharegpt", "poisson", [copy]).draw(2.0, 50.0, 0)
    one, other = ([job for job in jobs if job.stream == name] for name in ("default", "copy"))
    assert not {job.at for job in one} & {job.at for job in other}
    assert [job[1:3] for job in one[:10]] != [job[1:3] for job in other[:10]]


def test_a_stream_prefix_is_prepended_per_group() -> None:
    streams = [BATCH, "name=chat,lengths=fixed:9,9,share=0.2,prefix=50"]
    plain, shared = (synthetic("sharegpt", "poisson", streams, prefix).draw(2.0, 60.0, 0) for prefix in (None, "100:3"))
    assert [job[:5] for job in shared if job.stream != DEFAULT] == [job[:5] for job in plain if job.stream != DEFAULT]
    added = [one.prompt_tokens - other.prompt_tokens for one, other in zip(shared, plain, strict=True)]
    assert set(added) == {0, 100}
    groups = Counter((job.stream, job.parts) for job in shared)
    assert sorted(name for name, parts in groups if parts) == ["chat", *[DEFAULT] * 3]
    assert len({parts.names for _, parts in groups if parts}) == 4
    assert groups["batch", None]
    (alone,) = synthetic("fixed:9,9", "poisson", prefix="50:1").describe(1.0, 9.0, 0)["streams"]
    assert alone["prefix"] == "50:1"


@pytest.mark.parametrize("text", ["x", "1:2:3", "", "1.5", "0", "5:0", "-3:1"])
def test_invalid_prefixes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"prefix(:| must be) "):
        parse_stream(f"name=a,lengths=fixed:1,1,share=0.5,prefix={text}")


def test_best_effort_takes_a_share_of_each_stream() -> None:
    plain = synthetic("fixed:8,8", "poisson", ["name=b,lengths=fixed:9,9,share=0.5"])
    jobs = with_best_effort(plain, 0.3).draw(10.0, 400.0, 0)
    assert [job[:3] for job in jobs] == [job[:3] for job in plain.draw(10.0, 400.0, 0)]
    for prompt in (8, 9):
        classes = Counter(job.kind for job in jobs if job.prompt_tokens == prompt)
        assert set(classes) == {("best-effort", BEST_EFFORT), ("real-time", REAL_TIME)}
        assert classes["best-effort", BEST_EFFORT] / classes.total() == pytest.approx(0.3, abs=0.04)


def test_a_larger_best_effort_share_includes_the_smaller_one() -> None:
    few, many = (with_best_effort(Replay(TIMED), share).draw(None, None, 1) for share in (0.25, 0.75))
    added = [(one.stream, other.stream) for one, other in zip(few, many, strict=True) if one != other]
    assert added
    assert set(added) == {("real-time", "best-effort")}


@pytest.mark.parametrize(("share", "names"), [(0.0, {"real-time"}), (1.0, {"best-effort"})])
def test_the_best_effort_share_may_be_zero_or_one(share: float, names: set[str]) -> None:
    assert {job.stream for job in with_best_effort(Replay(TIMED), share).draw(None, None, 0)} == names


def test_a_timed_trace_is_replayed_from_zero_with_speedup() -> None:
    jobs = Replay(TIMED, speedup=2).draw(None, None, 0)
    assert jobs[:2] == [WorkloadRequest(0.0, 10, 5, "default", 0, 0), WorkloadRequest(0.25, 11, 6, "default", 0, 1)]
    assert len(jobs) == 40
    # The seed and the rate have no effect.
    assert Replay(TIMED, speedup=2).draw(9.0, 5.0, 1) == jobs[:20]


def test_a_trace_without_arrivals_repeats_from_a_random_offset() -> None:
    replay = Replay(UNTIMED, arrivals=POISSON)
    jobs = replay.draw(4.0, None, 5, limit=20)
    rows = [job.prompt_tokens - 10 for job in jobs]
    assert all(later == (earlier + 1) % 7 for earlier, later in pairwise(rows))
    assert all(job.output_tokens == job.prompt_tokens - 5 for job in jobs)
    assert [(job.row, job.prompt) for job in jobs] == [(row, str(row)) for row in rows]
    assert {replay.draw(4.0, None, seed, limit=1)[0].prompt_tokens - 10 for seed in range(60)} == set(range(7))
    # Without a duration or limit, every row is drawn once.
    assert sorted(job.prompt_tokens - 10 for job in replay.draw(4.0, None, 5)) == list(range(7))


def test_descriptions_contain_the_arguments_of_the_draw() -> None:
    assert WORKLOADS["one stream"].describe(2.5, 300.0, 0) == {
        "lengths": "sharegpt",
        "arrivals": "poisson",
        "rate_rps": 2.5,
        "duration_s": 300.0,
        "seed": 0,
    }
    combined = WORKLOADS["classes"].describe(2.5, None, 0, limit=10)
    assert (combined["lengths"], combined["limit"]) == ("lmsys + uniform:512-1024,32-128", 10)
    assert (combined["best_effort"], combined["duration_s"]) == (0.3, None)
    assert [(stream["name"], stream["share"]) for stream in combined["streams"]] == [("default", 0.5), ("batch", 0.5)]
    recorded = Replay(TIMED, speedup=2, arrivals=POISSON).describe(None, None, 0)
    assert (recorded["lengths"], recorded["arrivals"]) == ("trace:timed.csv", "trace")
    assert (recorded["rate_rps"], recorded["speedup"]) == (4.0, 2)
    untimed = Replay(UNTIMED, arrivals=POISSON).describe(3.0, 60.0, 1)
    assert (untimed["arrivals"], untimed["rate_rps"]) == ("poisson", 3.0)


@every_workload
def test_descriptions_are_json_serializable(workload: Workload) -> None:
    record = workload.describe(2.0, 60.0, 0)
    assert json.loads(json.dumps(record)) == record


def test_streams_are_parsed_from_text() -> None:
    stream = parse_stream(BATCH)
    assert (stream.name, stream.share, stream.priority) == ("batch", 0.5, 10)
    assert stream.lengths == parse_lengths("uniform:512-1024,32-128")
    assert stream.arrivals == parse_arrivals("gamma:2")
    short = parse_stream(" share=0.25 , arrivals=burst:5,0.1,20, name=x ,lengths=sharegpt*0.25,0.5")
    assert (short.name, short.lengths.name, short.arrivals.name) == ("x", "sharegpt*0.25,0.5", "burst:5,0.1,20")
    default = parse_stream("name=x,lengths=alpaca,share=0.25")
    assert (default.arrivals.name, default.service) == ("poisson", REAL_TIME)
    offline = synthetic("alpaca", "poisson", ["name=x,lengths=alpaca,share=0.25,class=best-effort"])
    assert {job.kind for job in offline.draw(5.0, 20.0, 0)} == {("default", REAL_TIME), ("x", BEST_EFFORT)}
    with pytest.raises(ConfigError, match="a stream of class best-effort exclude each other"):
        with_best_effort(offline, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch", "stream must consist of KEY=VALUE fields, got 'batch'"),
        ("name=b,length=alpaca,share=0.5", "stream: there is no 'length'; did you mean lengths?"),
        ("name=b,share=0.5", "stream needs lengths="),
        ("lengths=alpaca,share=0.5", "stream needs name="),
        ("name=b,lengths=alpaca", "stream needs share="),
        ("name=b,name=c,lengths=alpaca,share=0.5", "stream: name is given twice"),
        ("name=b,lengths=alpacca,share=0.5", "lengths: there is no 'alpacca'; did you mean alpaca?"),
        ("name=b,lengths=alpaca,share=1.5", "share must be in (0, 1], got 1.5"),
        ("name=b,lengths=alpaca,share=0", "share must be in (0, 1], got 0.0"),
        ("name=b,lengths=alpaca,share=0.5,priority=high", "priority must be an integer, got 'high'"),
        ("name=b,lengths=alpaca,share=0.5,class=batch", "class: there is no 'batch'; choose from real-time, best-eff"),
    ],
)
def test_errors_of_streams_name_the_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_stream(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("rate_rps", "duration_s", "limit", "message"),
    [
        (0.0, 10.0, None, "rate_rps must be a number above 0, got 0.0"),
        (-1.0, 10.0, None, "rate_rps must be a number above 0, got -1.0"),
        (math.nan, 10.0, None, "rate_rps must be a number above 0, got nan"),
        (math.inf, 10.0, None, "rate_rps must be a number above 0, got inf"),
        (None, 10.0, None, "rate_rps must be a number above 0, got None"),
        (1.0, 0.0, None, "duration_s must be a number above 0, got 0.0"),
        (1.0, math.nan, None, "duration_s must be a number above 0, got nan"),
        (1.0, None, 0, "limit must be at least 1 request, got 0"),
        (1.0, 10.0, 5, "one of duration_s and limit must be given, not both"),
    ],
)
@pytest.mark.parametrize("name", ["two streams", "trace without arrivals"])
def test_draw_arguments_out_of_bounds_are_refused(
    name: str, rate_rps: float | None, duration_s: float | None, limit: int | None, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        WORKLOADS[name].draw(rate_rps, duration_s, 0, limit=limit)
    assert message in str(caught.value)


def test_inconsistent_workloads_are_refused() -> None:
    one = Stream("one", parse_lengths("alpaca"), POISSON, 0.5)
    with pytest.raises(ConfigError, match=r"shares of the streams must add up to 1, got 0\.5"):
        Synthetic((one,))
    with pytest.raises(ConfigError, match="'one' is named twice"):
        Synthetic((one, one))
    with pytest.raises(ConfigError, match="must add up to less than 1, got 1"):
        synthetic("alpaca", "poisson", [BATCH, BATCH.replace("batch", "other")])
    with pytest.raises(ConfigError, match=r"best_effort must be in \[0, 1\], got 1\.1"):
        with_best_effort(Replay(TIMED), 1.1)
    with pytest.raises(ConfigError, match="speedup must be a number above 0, got 0"):
        Replay(TIMED, speedup=0)
    with pytest.raises(ConfigError, match="speedup needs a trace with arrival times"):
        Replay(UNTIMED, speedup=2, arrivals=POISSON)
    with pytest.raises(ConfigError, match=r"untimed\.csv has no arrival times"):
        Replay(UNTIMED)
    with pytest.raises(ConfigError, match=r"limit must be at most 40, the rows of timed\.csv, got 41"):
        Replay(TIMED).draw(None, None, 0, limit=41)
    with pytest.raises(ConfigError, match="must be given"):
        synthetic("alpaca", "poisson").draw(1.0, None, 0)
