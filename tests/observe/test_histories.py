from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.events import Admitted
from skipjoin.core.forecast import Forecast, length_quantile, share_below
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import FinishReason
from skipjoin.observe.histories import FinishedHistories, HistoryLog
from skipjoin.observe.history import RUNNING, History, current_prediction, prediction_of
from support.load import changed, load, make
from support.policies import EVICTIONS
from support.watch import Stepper, World

WORLDS = [
    pytest.param(World(recipe, depth, overlap, EVICTIONS[name]), id=f"{recipe}-{depth}-{overlap}-{name}")
    for recipe, depth, overlap, name in [
        ("fastserve", 1, False, "proactive"),
        ("srpt", 2, True, "chaos"),
        ("fcfs", 1, False, "recompute"),
        ("srpt", 2, True, "swap"),
    ]
]


class Watched:
    """Stepper whose events a history log observes as they occur."""

    def __init__(self, world: World, **bounds: float) -> None:
        self.stepper = Stepper(world.core())
        self.log = HistoryLog(FinishedHistories(**bounds))  # type: ignore[arg-type]
        self._seen = 0

    def observe(self) -> None:
        self.log.observe(self.stepper.events[self._seen :])
        self._seen = len(self.stepper.events)

    def start(self) -> bool:
        plan = self.stepper.start()
        self.observe()
        return plan is not None

    def run(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            while self.start():
                self.check_current()
            if not self.stepper.core.plans:
                return
            self.stepper.finish()
            self.observe()

    def check_current(self) -> None:
        core, now = self.stepper.core, self.stepper.now
        for request in core.requests.values():
            history, wait = self.log.find(request.id, now), core.wait_of(request)
            assert history.intervals[-1].end is None
            state = history.intervals[-1].state
            # A request that a plan in flight computes does not wait, whatever later plans decide.
            assert state == (RUNNING if wait is None else wait.reason.value) or request.progress.in_flight


def check_cover(history: History, end: float) -> None:
    """Intervals follow each other from the arrival to the end, and only omitted ones leave a gap."""
    assert history.intervals[0].begin == history.arrival
    assert history.intervals[-1].end == history.ended
    assert all(later.begin == earlier.end for earlier, later in pairwise(history.intervals)) or history.omitted_s
    assert sum(history.seconds(end).values()) == pytest.approx(end - history.arrival)


@pytest.mark.parametrize("world", WORLDS)
def test_intervals_cover_a_life_and_end_with_the_current_state(world: World) -> None:
    watched = Watched(world)
    requests = [changed(request, arrival=0.0) for request in load(3, count=20)]
    watched.stepper.add(*requests)
    watched.run()
    found = {history.number: history for history in watched.log.recent(0.0, watched.stepper.now)}
    assert sorted(found) == sorted(request.id for request in requests)
    for request in requests:
        history = found[request.id]
        assert history.ended is not None
        check_cover(history, history.ended)
        assert history.output_tokens == len(request.progress.output)
        assert history.first_token is not None
        assert any(interval.state == RUNNING for interval in history.intervals)
    assert any(history.preemptions for history in found.values())


def test_waiting_request_names_the_requests_that_held_its_slot() -> None:
    watched = Watched(World("fcfs", max_seqs=2))
    watched.stepper.add(*(make(number, max_tokens=10 + 10 * number) for number in range(3)))
    watched.run(5)
    now = watched.stepper.now
    history = watched.log.find(2, now)
    assert [interval.state for interval in history.intervals] == ["no_slot"]
    assert [other.number for other in watched.log.competitors(history, now)] == [0, 1]
    watched.run()
    ended = watched.log.find(2, watched.stepper.now)
    assert [interval.state for interval in ended.intervals] == ["no_slot", RUNNING]
    (first, *_), end = ended.intervals, watched.stepper.now
    competitors = {other.number: other for other in watched.log.competitors(ended, end)}
    assert competitors[0].seconds == pytest.approx((first.end or 0) - first.begin)
    assert competitors[0].is_finished


def test_aborted_request_that_never_ran_is_kept_with_its_reason() -> None:
    watched = Watched(World("fcfs", max_seqs=1))
    watched.stepper.add(make(0, max_tokens=30), make(1))
    watched.run(3)
    watched.stepper.core.abort(1, watched.stepper.now)
    watched.stepper._take()
    watched.observe()
    history = watched.log.find(1, watched.stepper.now)
    assert (history.reason, history.first_token) == (FinishReason.ABORT.value, None)
    check_cover(history, watched.stepper.now)


def test_number_and_age_of_finished_requests_are_bounded() -> None:
    watched = Watched(World("fcfs"), keep_s=5.0, max_finished=3)
    watched.stepper.add(*(make(number) for number in range(6)))
    watched.run()
    now = watched.stepper.now
    assert [history.number for history in watched.log.recent(0.0, now)] == [5, 4, 3]
    assert [history.number for history in watched.log.finished.after(4, 10)] == [5, 4]
    assert watched.log.find(0, now) is None
    assert watched.log.find(5, now + 4) is not None
    assert watched.log.find(5, now + 6) is None


def test_intervals_of_one_request_are_bounded_and_their_seconds_stay_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipjoin.observe.history._FIRST", 2)
    monkeypatch.setattr("skipjoin.observe.history._LAST", 3)
    watched = Watched(World("fastserve", max_seqs=1, device_blocks=200))
    watched.stepper.add(*(make(number, max_tokens=100) for number in range(4)))
    watched.run()
    for history in watched.log.recent(0.0, watched.stepper.now):
        assert len(history.intervals) <= 5
        assert history.ended is not None
        check_cover(history, history.ended)
    assert any(history.omitted_s for history in watched.log.recent(0.0, watched.stepper.now))


def test_own_kv_found_after_a_drop_is_no_cache_hit() -> None:
    watched = Watched(World("fcfs", eviction=EVICTIONS["recompute"], device_blocks=20, cpu_blocks=0))
    sizes = ((18, 25), (15, 37))  # the second one is dropped, and runs again when the first one has finished
    for number, (prompt, output) in enumerate(sizes):
        watched.stepper.add(make(number, prompt, output, prefix=ContentPrefix(4, b"%d" % number)))
    watched.run()
    admitted = [event for event in watched.stepper.events if isinstance(event, Admitted)]
    assert sum(event.cached for event in admitted) > 0
    assert sum(event.cached for event in admitted if event.is_first) == 0
    assert [history.cached_tokens for history in watched.log.recent(0.0, watched.stepper.now)] == [0, 0]


_MASSES = (
    st.lists(st.floats(0, 1), min_size=1, max_size=36)
    .filter(any)
    .map(lambda shares: tuple(share / sum(shares) for share in shares))
)


@given(_MASSES, st.floats(1, 1e5), st.integers(1, 5000), st.data())
def test_forecast_of_a_growing_output_is_ahead_of_it_and_within_its_interval(
    mass: tuple[float, ...], tokens: float, most: int, data: st.DataObject
) -> None:
    request = make(0, 4, most, forecast=Forecast(tokens, "test", mass))
    first = prediction_of(request)
    assert current_prediction(request) == first
    request.progress.output.extend([1] * data.draw(st.integers(0, most - 1)))
    found = current_prediction(request)
    assert len(request.progress.output) + 1 <= found.tokens <= most
    if found.low is not None and found.high is not None:
        assert len(request.progress.output) + 1 <= found.low <= found.tokens <= found.high <= most
    assert prediction_of(request) == first


def test_forecast_without_a_distribution_stays_ahead_of_the_output() -> None:
    request = make(0, 4, 100, forecast=Forecast(10.0, "test"))
    request.progress.output.extend([1] * 50)
    assert current_prediction(request) == (51.0, None, None, "test")


@given(_MASSES, st.floats(0.05, 0.95))
def test_share_below_is_the_inverse_of_the_quantile(mass: tuple[float, ...], level: float) -> None:
    tokens = length_quantile(mass, level)
    assert share_below(mass, tokens) <= level + 1e-6
    assert share_below(mass, tokens + 1) >= level - 1e-6


def test_finished_request_keeps_the_forecast_with_which_it_began() -> None:
    watched = Watched(World("fcfs"))
    request = make(0, 4, 30, forecast=Forecast(10.0, "test"))
    watched.stepper.core.add(request, watched.stepper.now)
    watched.run()
    history = watched.log.find(0, watched.stepper.now)
    assert (history.output_tokens, history.prediction) == (30, (10.0, None, None, "test"))
