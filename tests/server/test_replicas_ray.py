from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from server_worlds import ServerProcess

from skipjoin.exec.ranks.cluster import ClusterError
from skipjoin.server.engines.supervisor import Needs, check_room
from support.commands import outcomes_of
from support.sockets import assert_only_local
from support.streams import Stream
from support.waiting import wait_until
from support.worlds import exhaustive

needs_ray = pytest.mark.ray
CHAT = {
    "messages": [{"role": "user", "content": "Count from 3 to 90"}],
    "max_tokens": 300,
    "temperature": 0,
    "logprobs": True,
    "top_logprobs": 2,
    "stream": True,
}
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 120, "maxItems": 130}
CONSTRAINED = CHAT | {"structured_outputs": {"json": NUMBERS}, "temperature": 1.1, "seed": 5}
SEEDED = CHAT | {"temperature": 1.1, "seed": 9, "n": 2, "min_tokens": 200, "max_tokens": 250}
BODIES = (CHAT, SEEDED, CONSTRAINED)


class Reader(Stream):
    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(f"{url}/v1/chat/completions", body)

    def end(self) -> dict[int, list[Any]]:
        """Wait for the end, and return text, scored tokens and finish reason of every choice."""
        assert self.last() == "[DONE]"
        choices: dict[int, list[Any]] = {}
        for event in self.events():
            (choice,) = event["choices"]
            seen = choices.setdefault(choice["index"], ["", [], None])
            seen[0] += choice["delta"].get("content", "")
            for token in (choice["logprobs"] or {"content": []})["content"]:
                tops = [top["token"] for top in token["top_logprobs"]]
                seen[1].append((token["token"], round(token["logprob"], 2), tops))
            seen[2] = choice["finish_reason"]
        return choices


def alive(server: ServerProcess) -> int:
    answer = httpx.get(f"{server.url}/health")
    return int(answer.json()["replicas_alive"]) if answer.status_code == 200 else 0


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    pytest.importorskip("ray")
    found = ServerProcess(["model", "tally", "replicas=2"])
    yield found
    found.stop()


@pytest.fixture(scope="module")
def undisturbed(server: ServerProcess) -> list[dict[int, list[Any]]]:
    return [Reader(server.url, body).end() for body in BODIES]


@needs_ray
def test_all_processes_listen_on_loopback_only(server: ServerProcess) -> None:
    processes = [server.api, *server.api.children(recursive=True)]
    assert_only_local(processes, "gcs_server", "raylet", "ray::EngineReplica", server.api.name())


@needs_ray
# test_replica_links.py kills engines without Ray.
@pytest.mark.parametrize("victim", [exhaustive("engines"), "replica"])
def test_streams_are_unchanged_by_kills(
    server: ServerProcess, undisturbed: list[dict[int, list[Any]]], victim: str
) -> None:
    wait_until(lambda: alive(server) == 2)
    moved = server.metric("requests_moved_total")
    readers = [Reader(server.url, body) for body in BODIES * 2]
    wait_until(lambda: all(len(reader.lines) > 5 for reader in readers))
    (first, second) = server.engines()
    if victim == "engines":
        first.kill()
        wait_until(lambda: alive(server) == 1, 5.0)
        seen = [len(reader.lines) for reader in readers]
        # A request is blamed for two engine deaths with no token in between. The first events may have older tokens.
        wait_until(lambda: all(len(reader.lines) > count + 10 for reader, count in zip(readers, seen, strict=True)))
        second.kill()  # all requests now wait for the first engine that restarts
    else:
        first.parent().kill()  # the actor, whose engine dies with it
    results = [reader.end() for reader in readers]
    assert results == undisturbed * 2
    assert server.metric("requests_moved_total") > moved
    wait_until(lambda: alive(server) == 2)
    assert server.metric("replica_restarts_total") > 0
    server.wait_idle()


@needs_ray
def test_sigterm_drains_and_leaves_no_process(server: ServerProcess) -> None:
    wait_until(lambda: alive(server) == 2)
    readers = [Reader(server.url, CHAT) for _ in range(2)]
    wait_until(lambda: all(len(reader.lines) for reader in readers))
    processes = server.api.children(recursive=True)
    assert len(processes) > 5
    server.process.terminate()
    for reader in readers:
        reader.end()
    assert server.process.wait(30) == 0
    _, remaining = psutil.wait_procs(processes, timeout=30)
    assert not remaining


# Parts of the error, by options.
REFUSED = {
    "--replicas 0": ("replicas", "[1, "),
    "--replicas 2 --timeline t.json": ("timeline", "replicas must be 1"),
    "--replicas 2 --ray-address 127.0.0.1:1": ("--ray-address", "no connection"),
    "--replicas 2 --ray-address here": ("--ray-address", "host:port"),
}


def test_invalid_options_are_rejected_before_loading() -> None:
    outcomes = outcomes_of([["serve", "tally", "--port", "0", *options.split()] for options in REFUSED])
    for parts, (code, _, stderr) in zip(REFUSED.values(), outcomes, strict=True):
        assert code in (1, 2)
        assert all(part in stderr for part in parts), stderr
        assert "loading" not in stderr
        assert "Traceback" not in stderr


CPU = {"CPU": 4.0}


def test_replicas_must_fit_cluster_resources() -> None:
    assert check_room(4, Needs(2, "cpu"), [CPU, CPU]) == 0
    with pytest.raises(ClusterError, match=r"replicas must be at most 2: each takes 3 CPU.*4 CPU; 4 CPU; got 3"):
        check_room(3, Needs(3, "cpu"), [CPU, CPU])
    mixed = [CPU | {"GPU": 2.0}, CPU]
    assert check_room(2, Needs(1, "auto"), mixed) == 1
    with pytest.raises(ClusterError, match="at most 2: each takes 1 CPU and 1 GPU"):
        check_room(3, Needs(1, "auto"), mixed)
    assert check_room(8, Needs(1, "cpu"), mixed) == 0
    with pytest.raises(ClusterError, match="at most 0"):
        check_room(1, Needs(1, "cuda"), [CPU])
    # Each rank needs a CPU, and a GPU of its own on CUDA.
    assert check_room(2, Needs(1, "cpu", ranks=3), [CPU, CPU]) == 0
    assert check_room(1, Needs(1, "auto", ranks=2), mixed) == 0
    with pytest.raises(ClusterError, match="at most 1: each takes 3 CPU and 2 GPU"):
        check_room(2, Needs(1, "auto", ranks=2), mixed)


def test_importing_replicas_does_not_change_environment() -> None:
    """Importing the module neither imports Ray nor sets environment variables."""
    code = (
        "import os, sys; before = dict(os.environ); import skipjoin.server.engines.replicas\n"
        "assert before == dict(os.environ); sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, env=dict(os.environ)).returncode == 0
