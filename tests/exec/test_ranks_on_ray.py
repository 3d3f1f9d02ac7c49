"""The private cluster of Ray on this machine. All tests share one, which pytest's process starts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from test_ranks import Session, config

from skipjoin.config import ConfigError
from skipjoin.core.events import Restarted
from skipjoin.engine.build import assemble
from skipjoin.exec.ranks.cluster import Cluster
from support.waiting import wait_until
from support.worlds import exhaustive

pytestmark = pytest.mark.ray
pytest.importorskip("ray")

RANKS = 4
# Settings that a user may have for other clusters.
INHERITED = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "known to others"}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in INHERITED.items():
            patch.setenv(name, value)
        started = Cluster.start(RANKS)
        yield started
        started.close()
        assert not [*Path(tempfile.gettempdir()).glob(f"skipjoin-ray-{os.getpid()}-*")]
        assert {name: os.environ[name] for name in INHERITED} == INHERITED


def ranks() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it may have exited since
            if "RankActor" in child.name():
                found.append(child)
    return found


def test_other_users_cannot_enter_the_cluster_folder(cluster: Cluster) -> None:
    """The folder's contents are world-readable, so its path must not be accessible."""
    (folder,) = Path(tempfile.gettempdir()).glob(f"skipjoin-ray-{os.getpid()}-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [inside.name for inside in folder.iterdir()] == ["ray"]
    assert list(folder.glob("ray/session_2*/sockets/*"))


@pytest.mark.parametrize(
    ("stated", "joins"),
    [
        ({}, True),
        exhaustive({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": ""}, False),
        ({"RAY_AUTH_TOKEN": "other"}, False),
    ],
)
def test_processes_without_the_token_are_rejected(cluster: Cluster, stated: dict[str, str], joins: bool) -> None:
    program = (
        "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1]).internal_kv_keys(b'', None, 5)"
    )
    command = (sys.executable, "-c", program, cluster.address)
    run = subprocess.run(command, env=os.environ | stated, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode == 0) is joins, run.stderr
    assert joins or "nauthenticated" in run.stderr, run.stderr


def test_cluster_processes_listen_on_loopback_only() -> None:
    listening = []
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            listening += [
                connection.laddr.ip
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            ]
    assert len(listening) > 5
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


def test_ranks_run_on_ray_if_asked_for_and_restart() -> None:
    """`test_ray_nodes.py` loses whole nodes, and compares all tokens."""
    engine = assemble(config(1, 1, distributed_executor_backend="ray"))
    try:
        assert [rank.nice() for rank in ranks()] == [psutil.Process().nice()]
        session = Session(engine, tokens=20)
        while len(session.events) < 60:
            session.step()
        ranks()[0].kill()
        session.run()
        assert session.count(Restarted) == 1
    finally:
        engine.executor.close()
    wait_until(lambda: not ranks(), 30)


def test_ranks_that_the_cluster_has_no_room_for_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"4 x pipeline_parallel_size 2 needs 2 times 4 CPUs"):
        assemble(config(4, 2, distributed_executor_backend="ray"))
    with pytest.raises(ConfigError, match="this process already uses Ray at 127"):
        assemble(config(2, 1, ray_address="127.0.0.1:1"))
    wait_until(lambda: not ranks(), 30)
