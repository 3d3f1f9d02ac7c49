from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.waiting import wait_until

pytest.importorskip("ray")

import ray
from ray_nodes import Nodes, nodes
from test_ranks import Outputs, Session, config

from skipjoin.config import ConfigError
from skipjoin.core.events import Restarted
from skipjoin.engine.build import Engine, assemble
from skipjoin.exec.base import RankError
from skipjoin.exec.ranks import ranks, ray_ranks
from skipjoin.exec.ranks.links import RankListener
from skipjoin.exec.ranks.nodes import Node, excluding, silent
from skipjoin.model.errors import ModelError

pytestmark = pytest.mark.ray

# A restart of ranks may take this multiple of their first start plus this many seconds. On an idle machine both
# together are much less than Ray takes to detect a lost node.
REBUILD_STARTS, REBUILD_S = 3, 10.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with nodes() as started:
        yield started


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after each test that no rank runs and that all other processes on the nodes still do."""
    yield
    assert not ray.is_initialized()
    if "cluster" in request.fixturenames:
        cluster: Nodes = request.getfixturevalue("cluster")
        wait_until(lambda: not cluster.processes("RankActor"), 30)
        assert len(cluster.processes("raylet")) == 1 + len(cluster.cpus)


@pytest.fixture(scope="module")
def expected() -> Outputs:
    engine = assemble(config(1, 1, recipe="fcfs"))
    try:
        return Session(engine).run()
    finally:
        engine.executor.close()


def start(cluster: Nodes, tp: int, pp: int, **settings: Any) -> Engine:
    return assemble(config(tp, pp, ray_address=cluster.address, **settings))


def node_names(engine: Engine) -> list[str]:
    return list(engine.executor._live.started.nodes)


@pytest.mark.exhaustive  # test_lost_nodes_are_replaced places stages, too
def test_ranks_of_a_stage_share_a_node(cluster: Nodes, expected: Outputs) -> None:
    cluster.have(1, 1)
    stages: list[str] = []
    with pytest.raises(
        ConfigError, match=r"size 2 x .* needs 1 times 2 CPUs on one node, the cluster's nodes have 1, 1, 0"
    ):
        assemble(config(2, 1, ray_address=cluster.address), lambda what, share: stages.append(what))
    assert stages == ["joining Ray", "starting ranks"]

    large = cluster.add(2)
    engine = start(cluster, 2, 1)
    try:
        assert node_names(engine) == [large, large]
        assert Session(engine).run() == expected
    finally:
        engine.executor.close()


def test_lost_nodes_are_replaced(
    cluster: Nodes, expected: Outputs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stages run on two nodes. A spare replaces the first lost one, a node that joins later the second, none the third.

    The engine then fails, with max_restarts attempts within ten minutes.
    """
    cluster.have(1, 1)
    begin = time.monotonic()
    engine = start(cluster, 1, 2, max_restarts=3)
    start_s = time.monotonic() - begin
    adding = threading.Timer(2.0, lambda: cluster.add(1))
    try:
        first, second = node_names(engine)
        assert sorted((first, second)) == sorted(cluster.cpus)
        session = Session(engine)
        while len(session.events) < 200:
            session.step()
        third = cluster.add(1)
        cluster.lose(second)
        while not session.count(Restarted):
            session.step()
        assert sorted(node_names(engine)) == sorted((first, third))
        lost, restarted = (record.created for record in caplog.records if record.name == ranks.__name__)
        assert restarted - lost < REBUILD_STARTS * start_s + REBUILD_S

        cluster.lose(first)
        adding.start()
        assert session.run() == expected
        adding.join()
        assert session.count(Restarted) == 2
        assert sorted(node_names(engine)) == sorted(cluster.cpus)

        monkeypatch.setattr(ranks, "_PATIENCE_S", 0.5)
        again = Session(engine)
        while len(again.events) < 200:
            again.step()
        cluster.lose(third)
        with pytest.raises(RankError, match=r"needs 2 times 1 CPUs .*have 1, 0; .* max_restarts 3 within 10 minutes"):
            again.run()
        for number, tokens in again.outputs.items():
            assert tokens == expected[number][: len(tokens)]
        with pytest.raises(RankError, match="the ranks are not running"):
            again.loop.step()
    finally:
        engine.executor.close()
    assert sum("restarting all ranks" in record.message for record in caplog.records) == 5


@pytest.mark.exhaustive  # the start of the next test fails on such a node
def test_ranks_are_placed_on_reachable_nodes_only(cluster: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray considers a disconnected node alive for about a minute."""
    cluster.have(1, 1)
    cut_off = next(iter(cluster.cpus))
    monkeypatch.setattr(
        ray_ranks, "silent", lambda nodes: [node for node in nodes if node.name == cut_off or node in silent(nodes)]
    )
    engine = start(cluster, 1, 1, distributed_executor_backend="ray")
    try:
        assert node_names(engine) == list(set(cluster.cpus) - {cut_off})
    finally:
        engine.executor.close()
    with pytest.raises(ConfigError, match=r"needs 2 times 1 CPUs .*; .*node 127\.0\.0\.\d+ cannot be reached"):
        start(cluster, 1, 2)


def test_a_node_that_becomes_unreachable_fails_the_start_promptly(
    cluster: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.have(1, 1)
    answers = iter([[]])  # no node is unreachable at first
    monkeypatch.setattr(ray_ranks, "silent", lambda nodes: next(answers, nodes[:1]))
    with pytest.raises(ConfigError, match=r"a rank was lost: node 127\.0\.0\.\d+ cannot be reached"):
        start(cluster, 1, 1, distributed_executor_backend="ray")


def test_nodes_that_refuse_connections_are_silent() -> None:
    def node(name: str, port: int) -> Node:
        return Node(name, "127.0.0.1", port, {})

    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = one.getsockname()[1], other.getsockname()[1]
        found = [node("one", ports[0]), node("other", ports[1])]
        assert silent(found) == silent([]) == []
        other.close()
        assert silent(found) == found[1:]
    assert excluding(found) == {"ray.io/node-id": "!in(one,other)"}
    assert excluding([]) == {}


def test_nodes_must_have_the_same_versions(cluster: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.have(1, 1)
    ours = ray_ranks.versions()
    assert set(ours) == {"Skipjoin", "Python", "torch", "Ray"}
    monkeypatch.setattr(ray_ranks, "versions", lambda: {**ours, "torch": "1.0"})
    with pytest.raises(ConfigError, match=r"node 127\.0\.0\.\d+ has torch .*, this node has 1\.0; they must"):
        start(cluster, 1, 1, distributed_executor_backend="ray")


def test_a_pool_beyond_the_memory_of_a_rank_is_rejected(cluster: Nodes) -> None:
    cluster.have(1, 1)
    with pytest.raises(ConfigError, match=r"kv_cache_gib must be at most .* of a rank has .* GiB free"):
        start(cluster, 1, 2, kv_cache_gib=1e5, swap_space_gib=0, max_model_len=None)


def test_more_ranks_than_cpus_are_rejected(cluster: Nodes) -> None:
    cluster.have(1, 1)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size 3 needs 3 times 1 CPUs on one node"):
        start(cluster, 1, 3)


def test_sizes_that_do_not_divide_are_rejected_before_joining_the_cluster() -> None:
    with pytest.raises(ModelError, match="tensor_parallel_size must divide"):
        assemble(config(3, 1, ray_address="127.0.0.1:1"))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no.such.host.invalid:6379"])
def test_an_unreachable_cluster_address_is_rejected(address: str) -> None:
    with pytest.raises(ConfigError, match=f"ray_address {address}: no connection"):
        assemble(config(1, 2, ray_address=address))


def test_a_cluster_without_a_token_is_rejected() -> None:
    with nodes(has_token=False) as unprotected:
        before = dict(os.environ)
        with pytest.raises(ConfigError, match=r"asks for no token.* with RAY_AUTH_MODE=token and the same RAY_AUTH_T"):
            assemble(config(1, 2, ray_address=unprotected.address))
        assert dict(os.environ) == before


def test_cluster_start_failure_reports_the_cause(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 107)  # socket paths are limited to 107 characters
    with pytest.raises(AssertionError, match="AF_UNIX path length cannot exceed"):
        Nodes(long)


SERVE = "import sys; from skipjoin.cli import app; sys.argv[0] = 'skipjoin'; app()"


@pytest.mark.exhaustive  # test_replicas_ray.py kills replicas on one node
def test_replicas_leave_lost_nodes_and_exit_with_their_server(cluster: Nodes) -> None:
    """The server is killed, so that it can terminate nothing itself."""
    cluster.have(1, 1)
    options = ["--replicas", "2", "--ray-address", cluster.address, "--threads", "1", "--profile", "off"]
    command = [sys.executable, "-c", SERVE, "serve", "tally", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            (url,) = (line.split(" at ")[1].split()[0] for line in server.stdout.readlines(1) if line[:5] == "Ready")
            wait_until(lambda: replicas_alive(url) == 2)
            cluster.lose(next(iter(cluster.cpus)))
            wait_until(lambda: replicas_alive(url) == 1)
            cluster.add(1)
            wait_until(lambda: replicas_alive(url) == 2)
            assert len(cluster.processes("EngineReplica")) == 2
        finally:
            server.kill()
    wait_until(lambda: not cluster.processes("EngineReplica") and not engines(cluster))


def replicas_alive(url: str) -> int:
    health = httpx.get(f"{url}/health")
    return int(health.json()["replicas_alive"]) if health.status_code == 200 else 0


def engines(cluster: Nodes) -> list[psutil.Process]:
    found = []
    for process in cluster.processes():
        with suppress(psutil.NoSuchProcess):
            found += [process] if "engine_process" in " ".join(process.cmdline()) else []
    return found


def test_a_process_exits_when_its_connection_closes() -> None:
    code = """
import sys, time
from skipjoin.exec.ranks.links import end_with, connect
connection = connect((sys.argv[1], int(sys.argv[2])), bytes.fromhex(sys.argv[3]), 0)
end_with(connection)
time.sleep(60)
"""
    listener = RankListener("127.0.0.1")
    words = [listener.address[0], str(listener.address[1]), listener.secret.hex()]
    with subprocess.Popen([sys.executable, "-c", code, *words]) as process:
        (link,) = listener.accept(1, 30.0)
        listener.close()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        link.close()
        assert process.wait(30) == 1
