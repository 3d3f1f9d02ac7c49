"""A server with a rank on Ray leaves no processes or files, however it ends."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.leftovers import Mark
from support.sockets import assert_only_local

pytest.importorskip("ray")

pytestmark = pytest.mark.ray
GONE_S = 30.0
SERVE = "import sys; from skipjoin.cli import app; sys.argv[0] = 'skipjoin'; app()"


class Server:
    """`skipjoin serve` with one rank on Ray, and its processes and files."""

    def __init__(self, *options: str) -> None:
        self.mark = Mark()
        ray = ["--distributed-executor-backend", "ray", "--threads", "1", "--profile", "off"]
        self.popen = subprocess.Popen(
            [sys.executable, "-c", SERVE, "serve", "tally", "--port", "0", *ray, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self.mark.environment,
        )
        assert self.popen.stdout is not None
        self.url = ""
        for line in self.popen.stdout:
            if line.startswith("Ready"):
                self.url = line.split(" at ")[1].split()[0]
                break
        assert self.url
        (self.engine,) = [one for one in self.mark.processes() if "engine_process" in " ".join(one.cmdline())]
        (self.rank,) = self.mark.processes("RankActor")
        assert self.mark.processes("raylet")
        (self.folder,) = Path(tempfile.gettempdir()).glob(f"skipjoin-ray-{self.engine.pid}-*")

    def complete(self) -> None:
        """Start a long completion and ignore its response."""
        body = {"prompt": "abc", "max_tokens": 900, "ignore_eos": True}
        threading.Thread(target=_post, args=(f"{self.url}/v1/completions", body), daemon=True).start()

    def code(self) -> int:
        """Wait for the exit code."""
        return self.popen.wait(60)

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        self.mark.seconds_until_gone(GONE_S)


def _post(url: str, body: dict[str, Any]) -> None:
    try:
        httpx.post(url, json=body, timeout=60)
    except httpx.HTTPError:
        return


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(*options: str) -> Server:
        started.append(Server(*options))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.mark.exhaustive  # test_ranks_on_ray.py closes a cluster, and test_replicas_ray.py terminates a server
def test_terminated_server_leaves_no_processes_or_files(serve: Callable[..., Server]) -> None:
    """The engine ignores signals, because service managers signal all processes of a service."""
    server = serve()
    assert_only_local(server.mark.processes(), "raylet")
    server.engine.terminate()
    time.sleep(0.5)
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 4}).status_code == 200
    server.popen.terminate()
    assert server.code() == 0
    server.mark.seconds_until_gone(GONE_S)
    assert not server.folder.exists()


def test_killed_server_leaves_no_processes_or_files(serve: Callable[..., Server]) -> None:
    server = serve()
    server.complete()
    server.popen.kill()
    server.mark.seconds_until_gone(GONE_S)
    assert not server.folder.exists()


@pytest.mark.exhaustive  # test_guard.py kills a process with a guarded folder, too
def test_killed_engine_leaves_no_processes_or_files(serve: Callable[..., Server]) -> None:
    server = serve()
    server.complete()
    server.engine.kill()
    deadline = time.monotonic() + GONE_S
    while httpx.get(f"{server.url}/health").status_code != 503 and time.monotonic() < deadline:
        time.sleep(0.05)
    server.popen.terminate()  # It does not wait for the grace time.
    assert server.code() == 1
    server.mark.seconds_until_gone(GONE_S)
    assert not server.folder.exists()


@pytest.mark.exhaustive  # a failed engine closes its executor as a terminated one does
def test_failed_engine_leaves_no_processes_or_files(serve: Callable[..., Server]) -> None:
    server = serve("--max-restarts", "0")
    server.complete()
    server.rank.kill()
    psutil.wait_procs([server.engine], timeout=GONE_S)
    assert not server.engine.is_running()
    assert not server.folder.exists()
    assert httpx.get(f"{server.url}/health").status_code == 503
    server.popen.terminate()  # It does not wait for the grace time.
    assert server.code() == 1
    server.mark.seconds_until_gone(GONE_S)
