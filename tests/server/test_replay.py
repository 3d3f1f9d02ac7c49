from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import sys
from pathlib import Path

import httpx
import msgspec
import pytest
from server_worlds import COST, READY, MakeApi, ServerProcess, StartServer
from typer.testing import CliRunner

from skipjoin.cli import app
from skipjoin.core.request import ServiceClass
from skipjoin.core.step import StepShape
from skipjoin.engine.step_times import StepTimes
from skipjoin.recipes import DEFAULT
from skipjoin.replay.comparison import Limits, compare
from skipjoin.replay.simulation import FIGURES, Outcome
from skipjoin.report.numbers import duration
from skipjoin.server.api import debug
from skipjoin.server.api.arrivals import Arrival, ArrivalLog
from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.replays import Replays

pytestmark = pytest.mark.anyio


def test_recent_load_is_simulated_under_other_recipes_and_limits(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(step_s=0.005)

    async def load() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            bodies = [{"prompt": "abcdef", "max_tokens": 5 + number, "ignore_eos": True} for number in range(12)]
            await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    refused = CliRunner().invoke(app, ["replay", "--url", server.url])
    assert (refused.exit_code, "at least 2 requests" in refused.stderr) == (2, True)
    asyncio.run(load())
    for path, why in ((tmp_path / "ttft.txt", "must end in .png or .svg"), (tmp_path / "no/ttft.svg", "no folder")):
        refused = CliRunner().invoke(app, ["replay", "--url", server.url, "--plot", str(path)])
        assert (refused.exit_code, why in refused.stderr) == (2, True)
    picture = tmp_path / "ttft.svg"
    options = ["--recipes", "fcfs,srpt", "--max-num-seqs", "1", "--url", server.url]
    shown = CliRunner().invoke(app, ["replay", *options, "--plot", str(picture)])
    assert shown.exit_code == 0, shown.output
    assert "12 requests of tiny" in shown.output
    assert "error of the simulator" in shown.output
    assert "fcfs, max_num_seqs 1" in picture.read_text()
    figures = json.loads(CliRunner().invoke(app, ["replay", *options, "--json"]).output)
    assert list(figures) == [
        *(f"{DEFAULT}, measured", f"{DEFAULT}, simulated"),
        *("fcfs, max_num_seqs 1", "srpt, max_num_seqs 1"),
    ]
    # With one slot, requests wait for each other, and the shortest first wait least.
    assert figures["fcfs, max_num_seqs 1"]["ttft_s.p50"] > figures[f"{DEFAULT}, simulated"]["ttft_s.p50"]
    assert figures["srpt, max_num_seqs 1"]["jct_s.mean"] <= figures["fcfs, max_num_seqs 1"]["jct_s.mean"]
    assert f"{duration(figures['srpt, max_num_seqs 1']['jct_s.mean'])}" in shown.output


async def test_arrivals_have_no_texts_and_belong_to_their_key(
    make_api: MakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug, "TIMEOUT_S", 0.01)  # the scripted engine does not answer
    async with make_api(api_keys=("one", "two")) as api:
        headers = {"Authorization": "Bearer one"}
        await api.http.post("/v1/completions", json={"prompt": "abcdef", "max_tokens": 3, "n": 2}, headers=headers)
        found = (await api.http.get("/debug/arrivals", headers=headers)).json()
        assert [(arrival["prompt_tokens"], arrival["output_tokens"]) for arrival in found["arrivals"]] == [(6, 3)] * 2
        fields = {"at", "prompt_tokens", "output_tokens", "service", "ttft_s", "jct_s", "around_s"}
        assert set(found["arrivals"][0]) == fields
        others = await api.http.get("/debug/arrivals", headers={"Authorization": "Bearer two"})
        assert others.json()["arrivals"] == []
        refused = await api.http.get("/debug/arrivals?since_s=4000", headers=headers)
        assert refused.status_code == 400


def test_arrivals_are_kept_for_an_hour_and_in_order() -> None:
    log = ArrivalLog(clock=lambda: 5000.0)
    for at in (4999.0, 1000.0, 2000.0):
        log.add(Arrival(at, 1, 1, ServiceClass.REAL_TIME, None, 1.0, "me"))
    assert [entry.at for entry in log.since(3600.0, None)] == [2000.0, 4999.0]
    assert [entry.at for entry in log.since(100.0, "me")] == [4999.0]
    assert log.since(3600.0, "you") == []


async def test_simulations_run_one_at_a_time_in_a_process_that_ends_with_its_reader() -> None:
    program = """import time; print('{"share": 0}', flush=True); time.sleep(600)"""
    replays = Replays((sys.executable, "-c", program))
    first = replays.events(b"{}\n")
    assert b"progress" in await anext(first)
    process = replays._process
    with pytest.raises(ApiError, match="runs already"):
        await anext(replays.events(b"{}\n"))
    await first.aclose()
    assert await process.wait() == -signal.SIGKILL
    again = replays.events(b"{}\n")
    assert b"progress" in await anext(again)
    replays.close()  # as when the server stops
    assert b"without a result" in await anext(again)


def test_question_of_the_console_gets_progress_and_the_answer_of_the_command(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for number in range(3):
            client.post("/v1/completions", json={"prompt": "abcdef", "max_tokens": 5 + number, "ignore_eos": True})
        answer = client.post("/debug/replay", json={"recipes": ["fcfs"], "max_num_seqs": 1})
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [part.split("\n") for part in answer.text.strip().split("\n\n")]
        names = [name.removeprefix("event: ") for name, _ in events]
        assert set(names[:-1]) == {"progress"}
        assert names[-1] == "result"
        result = json.loads(events[-1][1].removeprefix("data: "))
        assert [outcome["name"] for outcome in result["outcomes"]] == [
            *(f"{DEFAULT}, measured", f"{DEFAULT}, simulated", "fcfs, max_num_seqs 1")
        ]
        assert set(result["errors"]) == set(FIGURES)
        assert all(outcome["curve"] == sorted(outcome["curve"]) for outcome in result["outcomes"])
        for body, error in (
            ({"recipes": ["./own.py:mine"]}, "'./own.py:mine' is not one of"),  # no file of the client's choice runs
            ({"recipes": ["fcfs"], "max_num_seqs": 0}, "max_num_seqs must be in"),
            ({"recipes": ["fcfs[nothing=1]"]}, "nothing"),
            ({"recipes": []}, "recipes"),
        ):
            refused = client.post("/debug/replay", json=body)
            assert (refused.status_code, error in refused.json()["error"]["message"]) == (400, True), refused.text


async def test_only_operators_may_start_simulations(make_api: MakeApi) -> None:
    async with make_api(api_keys=("one",)) as api:
        headers = {"Authorization": "Bearer one"}
        refused = await api.http.post("/debug/replay", json={"recipes": ["fcfs"]}, headers=headers)
        assert refused.status_code == 403


def test_times_of_steps_are_means_without_pauses() -> None:
    times = StepTimes()
    assert (times.matched(COST), times.between_s) == (COST, 0.0)
    shape = StepShape(prefill=0, attention=0, decodes=10, context=0)
    times.step_ended(10.0, 1.0, 0.8, shape)
    times.step_ended(11.5, 1.0, 0.6, shape)
    assert times.between_s == pytest.approx(0.5)
    assert times.matched(COST).step(shape) == pytest.approx(0.7, rel=1e-3)
    times.paused()
    times.step_ended(20.0, 1.0, 0.7, shape)
    times.step_ended(20.9, 1.0, 0.7, shape)  # overlapped: no time between them
    assert times.between_s == pytest.approx(0.25, rel=1e-2)


def test_measured_overheads_are_part_of_simulated_times() -> None:
    machine = {**msgspec.structs.asdict(READY), "recipe_path": "fcfs", "replicas": 1, "between_steps_s": 0.0}
    machine |= {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    machine["cost"] = dataclasses.asdict(COST)
    times = {"prompt_tokens": 8, "output_tokens": 4, "service": "real-time", "ttft_s": 0.1, "jct_s": 0.2}
    arrivals = [{"at": float(at), "around_s": around, **times} for at, around in ((0, 0.0), (100, 0.3), (200, None))]

    def simulated() -> Outcome:
        return compare({"machine": machine, "arrivals": arrivals}, [], Limits()).outcomes[1]

    bare = simulated()
    assert bare.ttft_s[1] - bare.ttft_s[0] == pytest.approx(0.3)
    assert bare.ttft_s[2] - bare.ttft_s[0] == pytest.approx(0.15)  # the median where it was not measured
    machine["between_steps_s"] = 0.5
    slow = simulated()
    assert slow.ttft_s[0] - bare.ttft_s[0] == pytest.approx(0.5)
    assert slow.jct_s[0] - bare.jct_s[0] == pytest.approx(4 * 0.5)
