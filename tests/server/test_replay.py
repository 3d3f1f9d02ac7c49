"""`skipjoin replay`: recorded arrivals, simulated for the server as it is and for other recipes and limits."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from server_worlds import MakeApi, StartServer
from typer.testing import CliRunner

from skipjoin.cli import app
from skipjoin.cli.explain import duration
from skipjoin.core.request import ServiceClass
from skipjoin.recipes import DEFAULT
from skipjoin.server.api.arrivals import Arrival, ArrivalLog


def test_recent_load_is_simulated_under_other_recipes_and_limits(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(step_s=0.005)

    async def load() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            bodies = [{"prompt": "abcdef", "max_tokens": 5 + number, "ignore_eos": True} for number in range(12)]
            await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    refused = CliRunner().invoke(app, ["replay", "--url", server.url])
    assert (refused.exit_code, "at least 2 requests" in refused.stderr) == (2, True)
    asyncio.run(load())
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


@pytest.mark.anyio
async def test_arrivals_have_no_texts_and_belong_to_their_key(make_api: MakeApi) -> None:
    async with make_api(api_keys=("one", "two")) as api:
        headers = {"Authorization": "Bearer one"}
        await api.http.post("/v1/completions", json={"prompt": "abcdef", "max_tokens": 3, "n": 2}, headers=headers)
        found = (await api.http.get("/debug/arrivals", headers=headers)).json()
        assert [(one["prompt_tokens"], one["output_tokens"]) for one in found["arrivals"]] == [(6, 3)] * 2
        assert set(found["arrivals"][0]) == {"at", "prompt_tokens", "output_tokens", "service", "ttft_s", "jct_s"}
        others = await api.http.get("/debug/arrivals", headers={"Authorization": "Bearer two"})
        assert others.json()["arrivals"] == []
        refused = await api.http.get("/debug/arrivals?since_s=4000", headers=headers)
        assert refused.status_code == 400


def test_arrivals_are_kept_for_an_hour_and_in_order() -> None:
    log = ArrivalLog(clock=lambda: 5000.0)
    for at in (4999.0, 1000.0, 2000.0):
        log.add(Arrival(at, 1, 1, ServiceClass.REAL_TIME, None, 1.0, "me"))
    assert [one.at for one in log.since(3600.0, None)] == [2000.0, 4999.0]
    assert [one.at for one in log.since(100.0, "me")] == [4999.0]
    assert log.since(3600.0, "you") == []
