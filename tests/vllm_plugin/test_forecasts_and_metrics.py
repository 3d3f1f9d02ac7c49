"""Forecasts in a thread, and metrics on a port, without vLLM."""

from __future__ import annotations

import socket
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from skipjoin.core.events import Preempted, Preemption
from skipjoin.core.request import FinishReason
from skipjoin.forecast import ForecastConfig
from skipjoin.vllm.forecasts import LengthForecasts
from skipjoin.vllm.metrics import EngineCollector, Tally, serve_metrics
from skipjoin.vllm.options import PluginOptions
from support.load import make
from support.watch import World


def test_forecasts_arrive_later_and_are_learned_and_kept(tmp_path: Path) -> None:
    config = ForecastConfig(forecaster="learned", forecast_dir=str(tmp_path))
    forecasts = LengthForecasts.open(config, "some/model")
    assert forecasts is not None
    first = make(0, 8, 100)
    forecasts.arrived(first)
    assert first.forecast is not None
    assert first.forecast.source == "prior"
    for number in range(1, 30):
        request = make(number, 8, 100, prefix=None)
        forecasts.arrived(request)
        request.output, request.finish_reason = [3] * 12, FinishReason.STOP
        forecasts.finished(request)
    found = {}
    while first not in found:
        found |= dict(forecasts.ready())
        time.sleep(0.001)
    forecasts.close()
    again = LengthForecasts.open(config, "some/model")
    again.arrived(last := make(99, 8, 100))
    again.close()
    assert dict(again.ready())[last].tokens < first.forecast.tokens


def test_a_failing_forecast_does_not_reach_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def prior(self, max_tokens: int) -> None:
            return None

        def forecast(self, prompt: object, max_tokens: int) -> None:
            raise RuntimeError("broken")

    forecasts = LengthForecasts(Broken())  # type: ignore[arg-type]
    forecasts.arrived(request := make(0))
    request.finish_reason = FinishReason.ABORT
    forecasts.arrived(make(1))
    forecasts.finished(request)
    forecasts.close()
    assert list(forecasts.ready()) == []
    assert "a forecast failed" in caplog.text


def test_metrics_are_read_on_request() -> None:
    core = World("fcfs", max_seqs=1).core()
    twins = {str(number): make(number, 8, 8) for number in range(3)}
    for request in twins.values():
        core.add(request, 0.0)
    core.scheduler.schedule(0.0)
    tally = Tally(steps=1)
    tally.take([Preempted(twins["0"], 0.0, Preemption.PAUSE)])
    collector = EngineCollector(core.scheduler, twins, tally, recipe="fcfs", vllm_version="9.9")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stop = serve_metrics(collector, PluginOptions(metrics_port=port - 1), 1)
    assert stop is not None
    try:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        with pytest.raises(ValueError, match=f"metrics_port {port} cannot be opened"):
            serve_metrics(collector, PluginOptions(metrics_port=port), 0)
    finally:
        stop()
    for line in (
        "skipjoin:num_requests_running 1.0",
        'skipjoin:num_requests_waiting{reason="no_slot"} 2.0',
        'skipjoin:preemptions_total{kind="pause"} 1.0',
        'skipjoin:scheduler_info{recipe="fcfs",',
    ):
        assert line in text
    assert serve_metrics(collector, PluginOptions(), 0) is None


def test_dropped_requests_are_reported_once() -> None:
    request, tally = make(0), Tally()
    events = [Preempted(request, 0.0, Preemption.DROP), SimpleNamespace()]
    assert tally.take(events) == [request]
    assert events == []
    assert "1 dropped" in tally.described()
