"""Ray cluster of several nodes on this machine, run by a process of its own to isolate it from the tests.

    python ray_nodes.py FOLDER

Reads one command per line of standard input and writes one JSON object per line of standard output.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from ray._raylet import Config

from skipjoin.exec.ranks.cluster import _without_unused_processes

# The head node has no CPUs, so that it can be neither used nor lost.
_HEAD_IP = "127.0.0.10"
_STORE_BYTES = 80 << 20
_END_S = 20.0
_MAX_ERROR_CHARS = 2000  # characters, enough for the end of a traceback


class Nodes:
    """Client of the cluster's process."""

    def __init__(self, folder: Path, *, has_token: bool = True) -> None:
        # Ray reads the token once per process, and this one may have used a cluster before.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")  # Ray may have been imported before there was a token
        self.cpus: dict[str, int] = {}
        # Ray writes the cluster's address into its default folder, but creates that folder only for its own sessions.
        (folder / "ray").mkdir(parents=True)
        self._words = folder / "stderr"
        with self._words.open("w") as words:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                text=True,
                env={
                    **os.environ,
                    **({} if has_token else {"RAY_AUTH_MODE": "disabled"}),
                    "RAY_USAGE_STATS_ENABLED": "0",
                    "RAY_TMPDIR": str(folder),
                },
            )
        try:
            self.address: str = self._answer()["address"]
        except BaseException:
            self.close()
            raise

    def add(self, cpus: int) -> str:
        name: str = self._ask({"add": cpus})["name"]
        self.cpus[name] = cpus
        return name

    def lose(self, name: str) -> None:
        self._ask({"lose": name})
        del self.cpus[name]

    def have(self, *cpus: int) -> None:
        """Add and remove nodes until exactly nodes with these numbers of CPUs remain."""
        wanted = list(cpus)
        for name, has in list(self.cpus.items()):
            if has in wanted:
                wanted.remove(has)
            else:
                self.lose(name)
        for more in wanted:
            self.add(more)

    def processes(self, name: str = "") -> list[psutil.Process]:
        children = psutil.Process(self._process.pid).children(recursive=True)
        return [child for child in children if child.is_running() and name in child.name()]

    def close(self) -> None:
        everything = self.processes()
        with suppress(BrokenPipeError):  # the process may exit before it reads the command
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        _, left = psutil.wait_procs(everything, timeout=_END_S / 2)
        for process in left:
            process.kill()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        with suppress(BrokenPipeError):  # the missing answer is the better error
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        assert line, f"the cluster's process exited:\n{self._words.read_text(errors='replace')[-_MAX_ERROR_CHARS:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def nodes(*, has_token: bool = True) -> Iterator[Nodes]:
    # The name is short because sockets lie in the folder.
    with tempfile.TemporaryDirectory(prefix="sj-nodes-", ignore_cleanup_errors=True) as folder:
        started = Nodes(Path(folder), has_token=has_token)
        try:
            yield started
        finally:
            started.close()


def _serve(folder: str) -> None:
    """Run the cluster's process until its standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep libraries' output apart from answers
    from ray.cluster_utils import Cluster  # noqa: PLC0415 (prints on import)

    shared = {"object_store_memory": _STORE_BYTES, "include_dashboard": False, "temp_dir": folder}
    with _without_unused_processes():
        cluster = Cluster(initialize_head=True, head_node_args={**shared, "num_cpus": 0, "node_ip_address": _HEAD_IP})
    print(json.dumps({"address": cluster.address}), file=out, flush=True)
    started: dict[str, Any] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if "add" in command:
            ip = f"127.0.0.{11 + len(started)}"
            node = cluster.add_node(num_cpus=command["add"], node_ip_address=ip, **shared)
            started[node.node_id] = node
            answer = {"name": node.node_id}
        else:
            lost = started[command["lose"]]
            (raylet,) = lost.all_processes["raylet"]
            # The ranks would notice by themselves, but only some tokens later.
            children = psutil.Process(raylet.process.pid).children(recursive=True)
            cluster.remove_node(lost, allow_graceful=False)
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            answer = {}
        print(json.dumps(answer), file=out, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    _serve(sys.argv[1])
