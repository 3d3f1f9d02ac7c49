from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from aiohttp import web
from typer.testing import CliRunner, Result

from skipjoin.cli.bench import bench
from skipjoin.loadtest import client as client_module
from skipjoin.report.results import load_results
from support.openai_stub import OpenAiStub, complete

SKIPJOIN = Path(sys.executable).with_name("skipjoin")
METRICS = 'skipjoin:cache_config_info{block_size="16",num_gpu_blocks="640",recipe="orca"} 1.0\n'
SMALL = ("--lengths", "uniform:4-8,2-3", "--requests", "12", "--settle", "0", "--warmup", "1")

PROGRAM = "import typer; from skipjoin.cli.bench import bench; typer.run(bench)"

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(bench)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def run(url: str, *args: object) -> Result:
    return CliRunner().invoke(app, ["--url", url, *map(str, args)])


def test_bench_writes_a_record_for_every_rate_and_seed(tmp_path: Path) -> None:
    out, times = tmp_path / "out.json", tmp_path / "times.jsonl"
    with OpenAiStub(metrics=METRICS, api_key="sesame") as stub:
        result = run(
            f"{stub.url}/v1/", *SMALL, "--rates", "200,400", "--seeds", "3,5", "--best-effort-share", "0.5",
            "--slo-jct", "60", "--api-key", "sesame", "--hardware-label", "bench", "--out", out,
            "--record-requests", times,
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    records = load_results([out])
    runs = [(record["workload"]["rate_rps"], record["workload"]["seed"]) for record in records]
    assert runs == [(200.0, 3), (200.0, 5), (400.0, 3), (400.0, 5)]
    for record in records:
        names = ("driver", "recipe", "model", "hardware")
        assert [record[name] for name in names] == ["http", "orca", "stub", "bench"]
        assert record["requests"] == {"submitted": 12, "finished": 12, "unfinished": 0, "rejected": 0, "errors": 0}
        assert record["slo"]["all_attained"] == 1.0
        assert set(record["classes"]) == set(record["services"]) == {"real-time", "best-effort"}
        assert (record["settings"]["block_size"], record["settings"]["kv_blocks"]) == (16, 640)
        assert record["client"]["errors_by_kind"] == {}
    lines = [json.loads(line) for line in times.read_text().splitlines()]
    assert len(lines) == 48
    assert all(line["due_s"] <= line["sent_s"] <= line["first_token_s"] <= line["ended_s"] for line in lines)
    assert len(stub.bodies) == 49  # including one warm-up request
    assert {body.get("service_tier") for body in stub.bodies} == {None, "flex"}
    assert "best-effort" in result.output


def test_bench_names_the_options_that_keep_or_replace_a_file(tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text("[]")
    result = run("http://127.0.0.1:9", *SMALL, "--rates", "1", "--out", tmp_path / "out.json")
    assert result.exit_code == 2
    assert "out.json exists; name another file, or --overwrite or --append it" in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "rates must be given"),
        (("--rates", "0"), "rates must be a number above 0"),
        (("--rates", "1e9", "--duration", "20"), "are 2e+10 requests, and a run has at most 5000000"),
        (("--rates", "1", "--warmup", "-1"), "warmup must be at least 0"),
        (("--rates", "1", "--timeout", "0"), "--timeout must be above 0"),
        (("--rates", "1", "--settle", "nan"), "--settle must be in [0, 1e+06]"),
        (("--rates", "0.001", "--duration", "0.1"), "no request arrives in 0.1 s"),
        (("--rates", "1", "--lengths", "sharegtp"), "did you mean sharegpt?"),
        (("--rates", "1", "--record-requests", "/no/folder/x"), "/no/folder/x: No such file"),
        (("--rates", "1"), "cannot reach http://127.0.0.1:9/v1/models: connection refused; is the server running?"),
    ],
)
def test_invalid_options_give_a_one_line_error(args: tuple[str, ...], message: str) -> None:
    result = run("http://127.0.0.1:9", *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_failing_warm_up_requests_end_the_command(tmp_path: Path) -> None:
    async def refuse(stub: OpenAiStub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "prompt must have at most 3 tokens"}}, status=400)

    out = tmp_path / "out.json"
    with OpenAiStub(refuse, api_key="sesame") as stub:
        keyless = run(stub.url, *SMALL, "--rates", "100")
        refused = run(stub.url, *SMALL, "--rates", "100", "--api-key", "sesame", "--out", out)
    assert keyless.exit_code == refused.exit_code == 2
    assert "give --api-key" in keyless.stderr
    assert "all 1 warm-up requests failed: http_400: prompt must have at most 3 tokens" in refused.stderr
    assert not out.exists()


def test_errors_are_reported_with_an_example_and_do_not_end_the_run() -> None:
    async def sometimes(stub: OpenAiStub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(stub.bodies) % 3 == 0:
            return web.json_response({"error": {"message": "the queue is full"}}, status=429)
        return await complete(stub, request, body)

    with OpenAiStub(sometimes) as stub:
        result = run(stub.url, *SMALL, "--rates", "100")
    assert result.exit_code == 0
    assert "4 of 12 requests: http_429: the queue is full" in result.stderr


@pytest.mark.parametrize("mode", ["batch", "refill"])
def test_a_closed_stream_keeps_its_number_of_requests_in_flight(tmp_path: Path, mode: str) -> None:
    in_flight: list[int] = []  # the stream's requests in flight at each arrival
    active = 0
    whole = asyncio.Barrier(3)

    async def count(stub: OpenAiStub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal active
        closed = body.get("service_tier") == "flex"
        active += closed
        if closed:
            in_flight.append(active)
            await (asyncio.wait_for(whole.wait(), 10) if mode == "batch" else asyncio.sleep(0.02))
        active -= closed  # before the client receives the response
        return await complete(stub, request, body)

    out, times = tmp_path / "out.json", tmp_path / "times.jsonl"
    with OpenAiStub(count) as stub:
        result = run(
            stub.url, "--lengths", "uniform:4-8,2-3", "--rates", "40", "--duration", "0.4", "--warmup", "0", "--closed",
            f"name=be,lengths=uniform:4-8,2-3,size=3,class=best-effort,mode={mode}", "--out", out,
            "--record-requests", times,
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert max(in_flight) == 3
    (record,) = load_results([out])
    lines = [json.loads(line) for line in times.read_text().splitlines()]
    due = [line["due_s"] for line in lines if line["service"] == "best-effort"]
    assert 6 <= len(due) == len(in_flight) == record["services"]["best-effort"]["requests"]["finished"]
    assert all(time < 0.45 for time in due)
    if mode == "batch":
        assert len(due) % 3 == 0
        assert in_flight == [1, 2, 3] * (len(due) // 3)
    assert record["services"]["best-effort"]["window"]["duration_s"] == 0.4
    assert re.search(r"be +best-effort", result.output)


def test_a_server_that_refuses_a_closed_stream_is_not_flooded() -> None:
    async def refuse(stub: OpenAiStub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "the queue is full"}}, status=429)

    with OpenAiStub(refuse) as stub:
        result = run(
            stub.url, "--rates", "1e-6", "--duration", "0.3", "--warmup", "0",
            "--closed", "name=be,lengths=fixed:4,2,size=3",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert len(stub.bodies) == 3


def test_records_are_kept_when_the_server_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_FAILING_S", 0.0)

    async def die(stub: OpenAiStub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(stub.bodies) == 20:
            stub.die()
        return await complete(stub, request, body)

    out = tmp_path / "out.json"
    with OpenAiStub(die) as stub:
        result = run(stub.url, *SMALL, "--rates", "20", "--seeds", "0-2", "--out", out)
    assert result.exit_code == 1
    assert "cannot reach" in result.stderr
    assert "2 of 3 runs were measured" in result.stderr
    complete_run, partial_run = load_results([out])
    assert complete_run["requests"]["finished"] == 12
    assert partial_run["requests"]["submitted"] == 12
    assert partial_run["requests"]["finished"] + partial_run["requests"]["errors"] == 12
    assert partial_run["requests"]["errors"] >= 5


def test_an_interrupt_keeps_finished_runs(tmp_path: Path) -> None:
    second = threading.Event()

    async def hang(stub: OpenAiStub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(stub.bodies) > 13:
            second.set()
            await asyncio.Event().wait()
        return await complete(stub, request, body)

    out = tmp_path / "out.json"
    with OpenAiStub(hang) as stub:
        command = [
            sys.executable,
            "-c",
            PROGRAM,
            "--base-url",
            stub.url,
            *SMALL,
            "--rates",
            "200,100",
            "--out",
            str(out),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert second.wait(60)
                process.send_signal(signal.SIGINT)
                output, errors = process.communicate(timeout=60)
            finally:
                process.kill()
    assert process.returncode == 130, errors
    assert "1 of 2 runs were measured" in errors
    assert "Traceback" not in errors
    assert "12/12" in output
    assert [record["workload"]["rate_rps"] for record in load_results([out])] == [200.0]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    command = [
        SKIPJOIN,
        "serve",
        "tally",
        "--port",
        "0",
        "--recipe",
        "fcfs",
        "--threads",
        "1",
        "--profile",
        "off",
        "--kv-cache-gib",
        "0.05",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process.stdout.readline().split(" at ")[1].split()[0]
        finally:
            process.terminate()


def test_a_server_serves_a_closed_stream_alongside_chat(server: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run(
        server, "--lengths", "uniform:20-60,4-12", "--rates", "10", "--duration", "1", "--warmup", "0", "--out", out,
        "--closed", "name=be,lengths=uniform:64-128,8-16,size=4,class=best-effort",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    services = load_results([out])[0]["services"]
    for service in services.values():
        assert service["requests"]["finished"] == service["requests"]["submitted"] > 0
    assert services["best-effort"]["requests"]["finished"] % 4 == 0


@pytest.mark.parametrize("endpoint", ["responses", "messages"])
def test_formats_of_agents_and_their_programs_are_measured(server: str, tmp_path: Path, endpoint: str) -> None:
    out, trace = tmp_path / "out.json", tmp_path / "calls.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens,program,pause_s\n0,9,5,a,\n0,9,5,,\n0,12,4,a,0.05\n")
    result = run(server, "--endpoint", endpoint, "--trace", trace, "--warmup", "0", "--out", out)
    assert result.exit_code == 0, result.output
    (record,) = load_results([out])
    assert record["requests"]["finished"] == 3
    assert record["settings"]["endpoint"] == endpoint
    assert record["programs"]["ended"] == 1
