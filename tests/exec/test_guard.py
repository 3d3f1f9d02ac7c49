"""A process guard terminates what its process leaves behind, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.waiting import wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")

# Starts two orphans, one of which writes into the folder, and prints their ids.
PROGRAM = """
import pathlib, subprocess, sys
from skipjoin.exec.ranks.guard import ProcessGuard

def detach(log):
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60'], stdout=open(sys.argv[1], 'w')); print(p.pid)"
    made = subprocess.run([sys.executable, "-c", code, log], stdout=subprocess.PIPE, text=True, start_new_session=True)
    return made.stdout.strip()

folder = pathlib.Path(sys.argv[1])
guard = ProcessGuard(folder)
print(detach(str(folder / "log")), detach("/dev/null"), flush=True)
log = open(folder / "own", "w")
sys.stdin.readline()
guard.close()
print("the guarded process still runs", flush=True)
"""


# A module that replaces Ray.
STUB = """
import os, signal, sys, types
from unittest.mock import MagicMock
ray = sys.modules["ray"] = types.ModuleType("ray")
ray.is_initialized = lambda: False
for name in ("_raylet", "_private", "_private.ray_constants"):
    sys.modules[f"ray.{name}"] = MagicMock()
from skipjoin.exec.ranks.cluster import Cluster, ClusterError
"""
# Kills the process while Ray starts.
STARTS = f"""{STUB}
ray.init = lambda **settings: os.kill(os.getpid(), signal.SIGKILL)
Cluster.start(1)
"""
# Makes Ray fail to start a number of times with a given reason.
FAILS = f"""{STUB}
outcomes = [RuntimeError(sys.argv[2])] * int(sys.argv[1]) + [MagicMock(address_info=dict(address="127.0.0.1:1"))]
ray.init, ray.shutdown = MagicMock(side_effect=outcomes), MagicMock()
try:
    print(Cluster.start(1).address, ray.init.call_count, ray.shutdown.call_count)
except ClusterError as error:
    print(error, ray.init.call_count)
"""


def test_killing_the_process_while_ray_starts_leaves_no_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", STARTS], env=environment, check=False).returncode == -signal.SIGKILL
    wait_until(lambda: not list(tmp_path.iterdir()), 30)


@pytest.mark.parametrize(
    ("times", "why", "output"),
    [
        (2, "The current node timed out during startup. This may be", "127.0.0.1:1 3 2"),
        (
            3,
            "The current node timed out during startup. This may be",
            "does not start on this machine: The current node",
        ),
        (1, "no such file", "Ray does not start on this machine: no such file 1"),
    ],
)
def test_ray_start_is_retried_after_timeouts(tmp_path: Path, times: int, why: str, output: str) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", FAILS, str(times), why]
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert output in result.stdout


@pytest.mark.parametrize("is_killed", [True, False])
def test_orphans_that_write_into_the_folder_are_terminated_with_the_process(tmp_path: Path, is_killed: bool) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    inside, outside = (psutil.Process(int(number)) for number in parent.stdout.readline().split())
    guards = psutil.Process(parent.pid).children()
    try:
        assert len(guards) == 1
        assert inside.is_running()
        if is_killed:
            parent.kill()
        last, _ = parent.communicate("\n")
        assert last == ("" if is_killed else "the guarded process still runs\n")
        _, alive = psutil.wait_procs([*guards, inside], timeout=30)
        assert not alive
        assert not folder.exists()
        assert outside.is_running()
        assert outside.status() != psutil.STATUS_ZOMBIE
    finally:
        outside.kill()
