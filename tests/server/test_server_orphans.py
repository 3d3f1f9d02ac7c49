"""A server with a rank on Ray leaves no processes or files, however it ends."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.leftovers import Mark

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


def test_killed_server_leaves_no_processes_or_files(serve: Callable[..., Server]) -> None:
    server = serve()
    server.complete()
    server.popen.kill()
    server.mark.seconds_until_gone(GONE_S)
    assert not server.folder.exists()
