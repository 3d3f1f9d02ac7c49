"""Forecasts in a thread, and metrics on a port, without vLLM."""

from __future__ import annotations

import itertools
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from skipjoin.cli import app
from skipjoin.core.events import Preempted, Preemption, Started, Waited
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import FinishReason
from skipjoin.core.waits import WaitReason
from skipjoin.forecast import ForecastConfig
from skipjoin.observe.histories import MAX_FINISHED
from skipjoin.recipes import Settings, build
from skipjoin.vllm.forecasts import LengthForecasts
from skipjoin.vllm.histories import Limits, RequestHistories
from skipjoin.vllm.listener import listen
from skipjoin.vllm.metrics import EngineCollector, Tally
from skipjoin.vllm.options import PluginOptions
from support.load import make
from support.policies import COST
from support.watch import World


def test_forecasts_arrive_later_and_are_learned_and_kept(tmp_path: Path) -> None:
    config = ForecastConfig(forecaster="learned", forecast_dir=str(tmp_path))
    forecasts = LengthForecasts.open(config, "some/model")
    first = make(0, 8, 100)
    forecasts.arrived(first)
    assert first.progress.forecast.source == "prior"
    for number in range(1, 30):
        request = make(number, 8, 100, prefix=None)
        forecasts.arrived(request)
        request.progress.output, request.progress.finish_reason = [3] * 12, FinishReason.STOP
        forecasts.finished(request)
    found = {}
    while first not in found:
        found |= dict(forecasts.ready())
        time.sleep(0.001)
    forecasts.close()
    again = LengthForecasts.open(config, "some/model")
    again.arrived(last := make(99, 8, 100))
    again.close()
    assert dict(again.ready())[last].tokens < first.progress.forecast.tokens


def test_a_failing_forecast_does_not_reach_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def prior(self, max_tokens: int) -> None:
            return None

        def forecast(self, prompt: object, max_tokens: int) -> None:
            raise RuntimeError("broken")

    forecasts = LengthForecasts(Broken())  # type: ignore[arg-type]
    forecasts.arrived(request := make(0))
    request.progress.finish_reason = FinishReason.ABORT
    forecasts.arrived(make(1))
    forecasts.finished(request)
    forecasts.close()
    assert list(forecasts.ready()) == []
    assert "a forecast failed" in caplog.text


LIMITS = Limits(4, 256, 30, 16, "fastserve")


def _status(url: str, method: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method)) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_metrics_are_read_on_request() -> None:
    core = World("fcfs", max_seqs=1).core()
    mirrors = {str(number): make(number, 8, 8) for number in range(3)}
    for request in mirrors.values():
        core.add(request, 0.0)
    core.scheduler.schedule(0.0)
    tally = Tally(steps=1)
    tally.take([Preempted(mirrors["0"], 0.0, Preemption.PAUSE)])
    collector = EngineCollector(core.scheduler, mirrors, tally, recipe="fcfs", vllm_version="9.9")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    histories = RequestHistories(LIMITS, 1, time.monotonic)
    histories.arrived(mirrors["0"], "cmpl-a-0", time.monotonic())
    stop = listen(collector, histories, PluginOptions(metrics_port=port - 1), 1)
    assert stop is not None
    try:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"}
        )
        text = urllib.request.urlopen(asked).read().decode()
        with pytest.raises(ValueError, match=f"metrics_port {port} cannot be opened"):
            listen(collector, histories, PluginOptions(metrics_port=port), 0)
        answers = {
            (method, path): _status(f"http://127.0.0.1:{port}{path}", method)
            for method, path in itertools.product(("GET", "HEAD", "POST"), ("/", "/metrics", "/metricsx", "/v1/models"))
        }
        assert answers == {
            (method, path): 404 if path != "/metrics" else 405 if method == "POST" else 200 for method, path in answers
        }
        shown = CliRunner().invoke(app, ["explain", "cmpl-a", "--url", f"http://127.0.0.1:{port}"])
        assert "cmpl-a: not examined after" in shown.stdout
        shown = CliRunner().invoke(app, ["explain", "a/b c", "--url", f"http://127.0.0.1:{port}"])
        assert shown.exit_code == 1
        assert "no request 'a/b c' is live or finished" in shown.stderr
    finally:
        stop()
    for line in (
        "skipjoin:num_requests_running 1.0",
        'skipjoin:num_requests_waiting{reason="no_slot"} 2.0',
        'skipjoin:preemptions_total{kind="pause"} 1.0',
        'skipjoin:scheduler_info{recipe="fcfs",',
    ):
        assert line in text
    assert listen(collector, None, PluginOptions(), 0) is None


def test_a_request_is_explained_by_each_of_its_ids_with_what_it_waited_for() -> None:
    now = 0.0
    histories = RequestHistories(LIMITS, 2, lambda: now)
    first, second, other, again = (make(number, 8, 8) for number in range(4))
    # Two samples of one prompt, as vLLM names them, and a later request with the id of another one.
    names = ("1_chatcmpl-me-7-0a1b2c3d", "0_chatcmpl-me-7-0a1b2c3d", "cmpl-you-0-00000000", "cmpl-you-0-11111111")
    for request, name in zip((first, second, other, again), names, strict=True):
        histories.arrived(request, name, 0.0)
    histories.observe([Started(other, 1.0), Waited(second, 1.0, WaitReason.NO_KV, 3)])
    now = 4.0
    second.progress.output.append(5)
    histories.observe([Started(second, now)])
    histories.generated(second, now)
    histories.finished(second, FinishReason.STOP, 5.0)
    for name in ("chatcmpl-me-7", "me-7"):
        found = histories.explain(name)
        choices = found["choices"]
        assert [(choice["number"], choice["replica"]) for choice in choices] == [(1, 2), (0, 2)]
        assert (choices[0]["state"], choices[0]["first_token_s"], choices[0]["total_s"]) == ("stop", 4.0, 5.0)
        assert choices[0]["seconds"] == {"not_examined": 1.0, "no_kv": 3.0, "running": 1.0}
        assert "--kv-cache-memory-bytes (now 30 blocks of 16 tokens)" in choices[0]["advice"]
        assert [(competitor["id"], competitor["seconds"]) for competitor in choices[0]["competitors"]] == [
            ("cmpl-you-0", 3.0)
        ]
    assert [choice["number"] for choice in (histories.explain("you") or {})["choices"]] == [3]
    assert histories.explain("me") is histories.explain("7") is None


def test_live_request_is_explained_by_the_policies_in_the_next_step_of_the_engine() -> None:
    histories, policies, kv = RequestHistories(LIMITS, 0, lambda: 3.0), build("fcfs", Settings(COST)), KVLedger(8, 0, 4)
    for request in (make(0, 8, 8, arrival=1.0), make(1, 8, 8, arrival=2.0)):
        for notify in policies.on_arrived:
            notify(request, request.arrival)
        histories.arrived(request, f"cmpl-r{request.id}-0", request.arrival)
    with ThreadPoolExecutor() as pool:
        found = pool.submit(histories.explain, "r1")
        while not found.done():
            histories.answer(policies, kv)
    (choice,) = (found.result() or {})["choices"]
    assert (choice["place"], choice["live_requests"]) == (1, 2)
    assert [(fact["label"], fact["value"]) for fact in choice["facts"]] == [("age", 1.0)]


def test_names_of_old_requests_are_forgotten() -> None:
    histories = RequestHistories(LIMITS, 0, lambda: 0.0)
    for number in range(MAX_FINISHED + 1):
        histories.arrived(request := make(number), f"cmpl-r{number}-0", 0.0)
        histories.finished(request, FinishReason.STOP, 0.0)
    assert histories.explain("r0") is None
    assert histories.explain("r1") is not None
    assert len(histories._names) == MAX_FINISHED


def test_dropped_requests_are_reported_once() -> None:
    request, tally = make(0), Tally()
    events = [Preempted(request, 0.0, Preemption.DROP), SimpleNamespace()]
    assert tally.take(events) == [request]
    assert events == []
    assert "1 dropped" in tally.described()
