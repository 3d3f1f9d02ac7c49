from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from forked_servers import ForkedServer
from server_worlds import BLOCKS, HERE, Api, MakeApi, ServerProcess, simulated_server

from skipjoin.config import EngineConfig
from skipjoin.core.request import FinishReason
from skipjoin.server import logs
from skipjoin.server.api.request_log import RequestLogging
from skipjoin.server.engines.engine_program import ORPHANED
from skipjoin.server.engines.messages import Setup
from skipjoin.server.logs import JsonFormatter, TextFormatter

pytestmark = pytest.mark.anyio

LOG = "skipjoin.server.api.request_log"
BODY = {"prompt": "abcdef", "max_tokens": 4}


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, object]]]:
    return [(record.getMessage(), record.fields) for record in caplog.records if record.name == LOG]  # type: ignore[attr-defined]


def logged(api: Api) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(RequestLogging(api.app)), base_url="http://localhost")


def test_json_log_has_no_other_line_when_settings_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPJOIN_MAX_NUM_SEQ", "3")
    run = ForkedServer(["command", "serve", "--log-format", "json", "--max-num-seqs", "0"])
    with run.stdout, run.stderr:
        printed, records = run.stdout.read(), [json.loads(line) for line in run.stderr]
    assert run.wait(60) == 2
    assert [record["level"] for record in records] == ["warning", "error"]
    assert "SKIPJOIN_MAX_NUM_SEQ" in records[0]["message"]
    assert records[1]["message"].startswith("--max-num-seqs must be in")
    assert printed == ""


def test_ready_line_is_a_record_in_json_mode(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.announce("Ready: tally\nTry: curl", url="http://127.0.0.1:1")
    assert capsys.readouterr().out == "Ready: tally\nTry: curl\n"
    monkeypatch.setenv("SKIPJOIN_LOG_FORMAT", "json")
    logs.announce("Ready: tally\nTry: curl", url="http://127.0.0.1:1")
    (line,) = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert (record["message"], record["url"], record["level"]) == ("Ready: tally", "http://127.0.0.1:1", "info")


def test_full_disk_under_standard_output_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", FullDisk())
    for _ in range(2):
        logs.announce("Ready: tally")
    assert caplog.messages == ["standard output cannot be written: No space left on device"]


async def test_each_request_is_logged_in_one_line(make_api: MakeApi, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOG)
    key = {"Authorization": "Bearer secret-key"}
    async with make_api(api_keys=("secret-key",)) as api, logged(api) as http:
        await http.post("/v1/completions", json=BODY, headers=key | {"x-request-id": "mine"})
        await http.post("/v1/completions", json=BODY | {"stream": True, "n": 2}, headers=key)
        await http.post("/v1/completions", json=BODY | {"temperature": 9}, headers=key)
        await http.post("/v1/completions", json=BODY | {"model": "other"}, headers=key)
        await http.post("/v1/completions", json=BODY)
        await http.get("/no/such%0Apath", headers=key)
        for probe in ("/health", "/metrics", "/v1/models"):
            await http.get(probe, headers=key)
    whole, stream, *others = lines(caplog)
    message, fields = whole
    assert message == "POST /v1/completions"
    assert (fields["id"], fields["status"], fields["reason"]) == ("mine", 200, "length")
    assert (fields["prompt_tokens"], fields["output_tokens"]) == (6, 4)
    assert 0 < fields["ttft_s"] <= fields["total_s"] < 60  # type: ignore[operator]
    assert re.fullmatch("[0-9a-f]{8}", str(fields["key"]))
    assert (stream[1]["output_tokens"], stream[1]["reason"], stream[1]["key"]) == (8, "length", fields["key"])
    logged_fields = [
        (message, one["status"], one["reason"], one["output_tokens"], one["key"]) for message, one in others
    ]
    assert logged_fields == [
        ("POST /v1/completions", 400, "bad_request", None, fields["key"]),
        ("POST /v1/completions", 404, "model_not_found", None, fields["key"]),
        ("POST /v1/completions", 401, "unauthorized", None, None),
        ("GET /no/such%0Apath", 404, "not_found", None, fields["key"]),
    ]
    assert "secret-key" not in caplog.text


async def test_failed_stream_is_logged_with_its_error_code(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOG)
    api.engine.paused = True
    async with logged(api) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": True}))
        while not api.engine.live:
            await asyncio.sleep(0)
        api.engine.step()
        api.engine.end_all(FinishReason.ERROR, "no memory")
        await asking
    ((_, fields),) = lines(caplog)
    assert (fields["status"], fields["reason"], fields["output_tokens"]) == (200, "request_failed", 1)


async def test_requests_are_not_logged_at_warning_level(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, LOG)
    async with logged(api) as http:
        await http.post("/v1/completions", json=BODY)
    assert not lines(caplog)


def test_record_is_one_text_line_or_one_json_object() -> None:
    record = logging.LogRecord("skipjoin.x", logging.INFO, "x.py", 1, "%s done", ("a\nb",), None)
    record.fields = {"id": "mine", "ttft_s": 0.25, "key": None}
    text, line = TextFormatter().format(record), json.loads(JsonFormatter().format(record))
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(rf"{time} INFO skipjoin\.x: a\nb done id=mine ttft_s=0\.25 key=-", text)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line.pop("time"))
    assert line == {"level": "info", "logger": "skipjoin.x", "message": "a\nb done", **record.fields}


def test_json_log_has_no_other_line_after_errors_and_warnings() -> None:
    code = """
import logging, threading, warnings
from skipjoin.server import logs
logs.configure("info", "json")
warnings.warn("odd")
logging.getLogger("uvicorn.error").error("refused")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
class Left:
    def __del__(self): raise KeyError("left")
Left()
raise OSError("over")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    records = [json.loads(line) for line in run.stderr.splitlines()]
    assert [record["level"] for record in records] == ["warning", "error", "critical", "critical", "critical"]
    errors = [record["exception"].splitlines()[-1] for record in records[2:]]
    assert errors == ["ZeroDivisionError: division by zero", "KeyError: 'left'", "OSError: over"]


@pytest.fixture(scope="module")
def on_full_disk(tokenizer_folder: Path) -> Iterator[ServerProcess]:
    """A server that logs JSON and cannot write its timeline."""
    server = simulated_server(tokenizer_folder, 0.001, BLOCKS, log_format="json", timeline="/dev/full")
    yield server
    server.stop()


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@needs_full
def test_a_full_disk_ends_the_timeline_and_not_the_server(on_full_disk: ServerProcess) -> None:
    for _ in range(2):
        response = httpx.post(f"{on_full_disk.url}/v1/completions", json=BODY, timeout=60)
        assert response.status_code == 200
    on_full_disk.wait_idle()
    assert httpx.get(f"{on_full_disk.url}/health").status_code == 200
    assert sum("the timeline /dev/full ends here" in line for line in on_full_disk.errors) == 1


@needs_full
def test_every_server_log_line_has_a_timestamp(on_full_disk: ServerProcess) -> None:
    """Engine processes get their log settings through the environment."""
    httpx.post(f"{on_full_disk.url}/v1/completions", json=BODY, timeout=60)
    on_full_disk.stop()
    found = [json.loads(line) for line in on_full_disk.errors]
    assert all(line["time"] and line["level"] for line in found)
    messages = [line["message"] for line in found]
    assert "POST /v1/completions" in messages
    assert any(message.startswith("the timeline /dev/full ends here") for message in messages)
    assert any(message.startswith("draining: ") for message in messages)


def test_orphaned_engine_logs_why_it_exits(tokenizer_folder: Path) -> None:
    setup = msgspec.json.encode(Setup(EngineConfig(), "ipc:///nowhere", parent=1))
    command = [sys.executable, str(HERE / "simulated_engine.py"), str(tokenizer_folder), "0", "10", "100"]
    done = subprocess.run(command, input=setup, capture_output=True, check=False, timeout=60)
    assert done.returncode == ORPHANED
    assert re.fullmatch(rb"\d{4}-.* ERROR \S+: the engine ends: the process that started it has exited\n", done.stderr)
