from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import psutil
import pytest
from server_worlds import ServerProcess, StartServer, outcome_of, simulated_server
from simulated_engine import HOPELESS, OUT_OF_MEMORY, STUCK

from skipjoin.config import EngineConfig, ForecastConfig, ServerConfig
from skipjoin.server.lifecycle import EXIT_OK, Server
from skipjoin.server.listeners import connection_limits
from skipjoin.server.settings import check_settings
from support.streams import Stream
from support.waiting import wait_until
from support.worlds import exhaustive

JSON_HEAD = "Host: localhost\r\nContent-Type: application/json"
LONG = {"prompt": "abc", "max_tokens": 500, "stream": True}


def long_stream(server: ServerProcess, **fields: Any) -> Stream:
    return Stream(f"{server.url}/v1/completions", {**LONG, **fields})


def health(server: ServerProcess) -> int:
    return httpx.get(f"{server.url}/health").status_code


@pytest.fixture(scope="module")
def slow_server(tokenizer_folder: Path) -> Iterator[ServerProcess]:
    """A server with steps of 20 ms and room for one request of the maximum length. Each test must leave it idle."""
    shared = simulated_server(tokenizer_folder, 0.02, 33, priority_range=f"-1:{HOPELESS}")
    yield shared
    shared.stop()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_blocks_are_freed_after_disconnect(slow_server: ServerProcess, path: str, stream: bool) -> None:
    server = slow_server
    generated = server.metric("generation_tokens_total")
    host, port = server.url.removeprefix("http://").split(":")
    fields = {"stream": stream, "max_tokens": 400, "n": 2, "ignore_eos": True}
    prompt = {"prompt": "abc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "abc"}]}
    body = json.dumps({**fields, **prompt}).encode()
    head = f"POST {path} HTTP/1.1\r\n{JSON_HEAD}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: httpx.get(f"{server.url}/load").json()["running"] == 2)
    server.wait_idle()
    assert server.metric("generation_tokens_total") - generated < 400  # of 800


def connect(server: ServerProcess) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_disconnect_during_prefill_generates_no_token(start_server: StartServer) -> None:
    server = start_server(step_s=1.5)
    prompts = {
        "/v1/completions": {"prompt": "abc" * 100},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc" * 100}]},
    }
    with contextlib.ExitStack() as stack:
        for (path, prompt), stream in product(prompts.items(), (True, False)):
            body = json.dumps({**prompt, "stream": stream, "max_tokens": 100}).encode()
            head = f"POST {path} HTTP/1.1\r\n{JSON_HEAD}\r\nContent-Length: {len(body)}\r\n\r\n"
            stack.enter_context(connect(server)).sendall(head.encode() + body)
        wait_until(lambda: httpx.get(f"{server.url}/load").json()["server_load"] == 4)
    server.wait_idle()
    assert server.metric("generation_tokens_total") == 0
    assert server.metric("engine_steps_total") <= 2
    assert not any("ERROR" in line for line in server.errors)


PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/batches", "/v1/files")


def test_disconnect_within_a_body_only_logs_the_request(server: ServerProcess) -> None:
    logged, open_files = len(server.errors), server.api.num_fds()
    for path in PATHS:
        kind = "multipart/form-data; boundary=b" if path == "/v1/files" else "application/json"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: 100000\r\n\r\n"
        with connect(server) as connection:
            connection.sendall(head.encode() + b'{"prompt": "')
    wait_until(lambda: server.api.num_fds() <= open_files)
    server.wait_idle()
    assert [line for line in server.errors[logged:] if "request_log: POST" not in line] == []


def test_deadline_expires_in_the_queue(slow_server: ServerProcess) -> None:
    server = slow_server
    running = long_stream(server, prompt="abc" * 30, max_tokens=120, priority=-1)
    assert running.begun.wait(30)
    body = {"prompt": "z" * 500, "max_tokens": 5, "deadline_ms": 100}
    begin = time.monotonic()
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == 408
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert time.monotonic() - begin > 0.09
    assert running.lines[-1] != "[DONE]"  # The request would have had to wait for it.
    streamed = long_stream(server, **{**body, "stream": True})
    assert streamed.last()["error"]["code"] == "deadline_exceeded"
    assert running.last() == "[DONE]"
    server.wait_idle()


def finished(server: ServerProcess, reason: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    name = f'skipjoin:request_success_total{{class="real-time",finished_reason="{reason}"}} '
    (found,) = (line.removeprefix(name) for line in text.splitlines() if line.startswith(name))
    return float(found)


def test_failed_request_gets_an_error_and_the_others_finish(slow_server: ServerProcess) -> None:
    server = slow_server
    before = [finished(server, reason) for reason in ("error", "length")]
    other = long_stream(server, max_tokens=40)
    assert other.begun.wait(30)
    body = {"prompt": "abc", "max_tokens": 50, "priority": HOPELESS}
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": OUT_OF_MEMORY,
        "type": "server_error",
        "param": None,
        "code": "request_failed",
    }
    streamed = long_stream(server, **body)
    assert streamed.last() == response.json()
    assert len(streamed.lines) == 4  # three tokens and the error
    assert other.last() == "[DONE]"
    server.wait_idle()
    after = [finished(server, reason) for reason in ("error", "length")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [2, 1]


def test_sigterm_drains(start_server: StartServer) -> None:
    server = start_server(step_s=0.02)
    streams = [long_stream(server, max_tokens=150) for _ in range(4)]
    assert all(stream.begun.wait(30) for stream in streams)
    server.process.terminate()
    wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
    refused = httpx.post(f"{server.url}/v1/completions", json=LONG)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    assert health(server) == 200
    assert [stream.last() for stream in streams] == ["[DONE]"] * 4
    assert server.process.wait(30) == 0


def test_drain_ends_at_its_timeout(start_server: StartServer) -> None:
    server = start_server(step_s=0.05, shutdown_timeout_s=0.5)
    stream = long_stream(server)
    assert stream.begun.wait(30)
    server.process.terminate()
    assert stream.last()["error"]["code"] == "shutting_down"
    assert server.process.wait(30) == 0


def test_second_signal_exits_immediately(start_server: StartServer) -> None:
    server = start_server(step_s=0.05)
    stream = long_stream(server)
    assert stream.begun.wait(30)
    server.process.send_signal(signal.SIGINT)
    wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(15) == 0, server.errors  # The stream would take 25 s.


class KilledAtOnce:
    def __init__(self, *arguments: Any) -> None:
        self.died, self.cause = asyncio.Event(), "killed"

    def kill(self) -> None:
        self.died.set()


@pytest.mark.anyio
async def test_an_engine_killed_by_the_second_signal_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = check_settings(EngineConfig(), ServerConfig(batch_dir="none"), ForecastConfig())
    server = Server(settings, connection_limits(settings.server), (), KilledAtOnce)
    started = asyncio.Event()
    monkeypatch.setattr(server, "_start", AsyncMock(return_value="a tokenizer"))
    monkeypatch.setattr(server, "_announce", lambda *urls: started.set())
    serving = asyncio.create_task(server._serve([]))
    await started.wait()
    server._on_signal()
    server._on_signal()
    assert await serving == EXIT_OK


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_engine_ignores_signals(server: ServerProcess, number: int) -> None:
    """Ctrl-C and service managers signal every process of a group."""
    server.engine.send_signal(number)
    time.sleep(0.2)
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 200


def test_engine_death_under_load_is_reported_to_clients(start_server: StartServer) -> None:
    server = start_server(step_s=0.02)
    streams = [long_stream(server) for _ in range(6)]
    with ThreadPoolExecutor(1) as pool:
        response = pool.submit(httpx.post, f"{server.url}/v1/completions", json={**LONG, "stream": False}, timeout=30)
        assert all(stream.begun.wait(30) for stream in streams)
        wait_until(lambda: httpx.get(f"{server.url}/load").json()["running"] == 7)
        server.engine.kill()
        assert wait_until(lambda: health(server) == 503, 5.0) < 5
        assert response.result().status_code == 503
    assert [stream.last()["error"]["code"] for stream in streams] == ["engine_dead"] * 6
    refused = httpx.post(f"{server.url}/v1/completions", json=LONG)
    assert refused.json()["error"]["code"] == "engine_dead"
    server.process.terminate()  # It does not wait for the grace time.
    assert server.process.wait(30) == 1
    assert any("the engine has died: the engine process was killed by SIGKILL (" in line for line in server.errors)


@pytest.mark.parametrize("is_stopped", [True, exhaustive(False)])
def test_hanging_engine_is_reported_and_killed(start_server: StartServer, is_stopped: bool) -> None:
    server = start_server(step_s=0.02 if is_stopped else 300, hang_timeout_s=2, step_timeout_s=1)
    stream = long_stream(server)
    wait_until(lambda: httpx.get(f"{server.url}/load").json()["server_load"] == 1)
    if is_stopped:
        server.engine.suspend()
    body = {"prompt": "abc", "deadline_ms": 200}
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (408, "deadline_exceeded")
    wait_until(lambda: health(server) == 503)
    assert stream.last()["error"]["code"] == "engine_dead"
    assert 'skipjoin:requests_lost_total{reason="engine_dead"} 1.0' in httpx.get(f"{server.url}/metrics").text
    server.process.terminate()
    assert server.process.wait(30) == 1
    wait_until(
        lambda: any("the engine has died: the engine process gave no sign of life" in line for line in server.errors)
    )
    wait_until(lambda: any("simulated_engine.py" in line for line in server.errors))  # the dumped stacks


def test_stalled_engine_drops_all_kv_and_then_exits(start_server: StartServer) -> None:
    server = start_server(hang_timeout_s=3, step_timeout_s=60, priority_range="0:99")
    body = {"prompt": "abc", "priority": STUCK}
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
    assert 'skipjoin:requests_lost_total{reason="engine_dead"} 1.0' in httpx.get(f"{server.url}/metrics").text
    server.process.terminate()
    assert server.process.wait(30) == 1
    wait_until(
        lambda: any("StallError: no step could be planned for 3 s: 1 requests wait" in line for line in server.errors)
    )
    assert any("no step can be planned; all KV is dropped" in line for line in server.errors)


def test_engine_exits_with_the_api_process(start_server: StartServer) -> None:
    server = start_server()
    stream = long_stream(server)
    assert stream.begun.wait(30)
    server.process.kill()
    _, alive = psutil.wait_procs([server.engine], timeout=20)
    assert not alive
    stream.join(10)
    assert stream.lines[-1] != "[DONE]"


def test_an_engine_that_cannot_start_is_reported() -> None:
    folder = "/nowhere"
    code, errors = outcome_of("model", folder)
    assert code == 2
    assert "error: " in errors
    assert folder in errors
    assert "Traceback" not in errors


def test_an_engine_that_dies_while_starting_is_reported(tokenizer_folder: Path) -> None:
    code, errors = outcome_of("simulated", str(tokenizer_folder), "0.001", "not-a-number", "9")
    assert code == 1
    assert "the engine process ended with exit code 1" in errors


def test_a_port_in_use_is_reported_before_anything_is_loaded(tokenizer_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, errors = outcome_of("simulated", str(tokenizer_folder), "0", "9", "9", f"port={port}")
    assert code == 2
    assert f"port {port}" in errors
    assert "in use" in errors
    assert "pretending to load" not in errors


def test_hundreds_of_requests_leak_no_resources(server: ServerProcess) -> None:
    def resources() -> tuple[int, int, int, int]:
        return (server.api.num_fds(), server.engine.num_fds(), server.api.num_threads(), len(server.api.children()))

    def post(client: httpx.Client, number: int) -> int:
        body = {"prompt": f"request {number}", "max_tokens": 4, "stream": number % 2 == 0, "n": 1 + number % 2}
        return client.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code

    def run(count: int) -> None:
        limits = httpx.Limits(max_connections=8, max_keepalive_connections=8)
        with httpx.Client(limits=limits) as client, ThreadPoolExecutor(8) as pool:
            assert set(pool.map(partial(post, client), range(count))) == {200}
        server.wait_idle()

    run(200)
    before, memory = resources(), server.api.memory_info().rss
    run(400)
    # The server may still be closing connections at both times.
    wait_until(lambda: all(now <= then for now, then in zip(resources(), before, strict=True)))
    assert server.api.memory_info().rss - memory < 10 << 20


def test_engine_socket_is_private_and_its_folder_is_removed(server: ServerProcess) -> None:
    """A folder that is already removed cannot remain after kill -9."""
    sockets = [entry.laddr for entry in server.api.net_connections("unix") if "skipjoin-" in str(entry.laddr)]
    assert sockets
    assert not Path(str(sockets[0])).parent.exists()
    listening = [entry.laddr.ip for entry in server.api.net_connections("tcp") if entry.status == "LISTEN"]
    assert listening == ["127.0.0.1"]
    assert not server.engine.net_connections("tcp")


def test_the_api_process_imports_no_torch_and_without_batches_no_database() -> None:
    code = """
import sys
from skipjoin.config import EngineConfig, ForecastConfig, ServerConfig
from skipjoin.server.engines.engine_handle import EngineHandle
from skipjoin.server.lifecycle import Server
from skipjoin.server.listeners import connection_limits
from skipjoin.server.settings import check_settings
settings = check_settings(EngineConfig(), ServerConfig(batch_dir="none"), ForecastConfig())
Server(settings, connection_limits(settings.server), ("engine",), EngineHandle)
print(*{"torch", "sqlalchemy"}.intersection(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "\n"), done
