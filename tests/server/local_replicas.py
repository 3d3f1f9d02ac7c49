"""Replica set without Ray: real engine processes over real links, and a supervisor that restarts them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import simulated_engine
from server_worlds import HERE

from skipjoin.config import EngineConfig, HangLimits
from skipjoin.server.engines import supervisor
from skipjoin.server.engines.engine_client import EngineClient
from skipjoin.server.engines.replicas import ReplicaSet
from skipjoin.server.engines.supervisor import EngineReplica, Needs
from skipjoin.server.metrics import Metrics
from support.forks import ForkedProgram, as_module


class ForkedEngine(ForkedProgram):
    NAME = "engine"

    def run(self, command: list[str], pass_fds: Sequence[int]) -> int:
        sys.argv[:] = command[1:]
        return simulated_engine.main()


class LocalSupervisor:
    """`ReplicaSupervisor` without Ray, in this process."""

    def __init__(self) -> None:
        self.replicas: list[EngineReplica] = []
        self.is_paused = False
        self.failures = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._stopping = threading.Event()

    def deploy(self, command: tuple[str, ...], setup: bytes, *, replicas: int, needs: Needs) -> None:
        self._arguments = (command, setup)
        self._count = replicas
        self._thread.start()

    def check(self) -> str | None:
        return f"{self.failures} starts in a row failed" if self.failures >= 3 else None

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        for replica in self.replicas:
            replica.close()

    def _watch(self) -> None:
        # One thread starts all engines, because each engine dies with the thread that started it.
        while not self._stopping.wait(0.02):
            if self.is_paused:
                continue
            for replica in list(self.replicas):
                with contextlib.suppress(RuntimeError):
                    replica.check_health()
                    continue
                self.replicas.remove(replica)
                replica.close()
            if len(self.replicas) < self._count:
                replica = EngineReplica()
                try:
                    replica.start(*self._arguments)
                    self.replicas.append(replica)
                    self.failures = 0
                except RuntimeError:  # the next iteration retries the start
                    replica.close()
                    self.failures += 1


class LocalCluster:
    ip = "127.0.0.1"

    def close(self) -> None:
        pass


class LocalReplicas(ReplicaSet):
    """`ReplicaSet` whose engines are child processes of this process."""

    def __init__(self, client: EngineClient, metrics: Metrics, command: tuple[str, ...]) -> None:
        super().__init__(client, command, lambda what, share: self.progress.append(what))
        self.progress: list[str] = []
        self.client = client
        self.metrics = metrics
        self.supervisor = LocalSupervisor()

    def _enter(self, needs: Needs) -> None:
        self._cluster = LocalCluster()  # type: ignore[assignment]
        self._supervisor = self.supervisor  # type: ignore[assignment]

    @property
    def engines(self) -> list[psutil.Process]:
        return sorted(filter(_is_engine, psutil.Process().children()), key=psutil.Process.create_time)


def _is_engine(child: psutil.Process) -> bool:
    try:
        return child.status() != psutil.STATUS_ZOMBIE and child.name() == ForkedEngine.NAME
    except psutil.NoSuchProcess:  # it may exit during the checks
        return False


@contextlib.asynccontextmanager
async def local_replicas(
    folder: Path, replicas: int, step_s: float = 0.002, hang_timeout_s: float = 30.0, **settings: Any
) -> AsyncIterator[LocalReplicas]:
    """Run simulated engines behind a client, and check on exit that all of them are gone.

    They fork from this process, because most of their start would be that of their imports.
    """
    command = (sys.executable, str(HERE / "simulated_engine.py"), str(folder), str(step_s), "4096", "512")
    metrics = Metrics()
    found = LocalReplicas(EngineClient(metrics, wanted=replicas, **settings), metrics, command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "subprocess", as_module(ForkedEngine))
        try:
            await found.start(EngineConfig(threads=1), HangLimits(hang_s=hang_timeout_s))
            yield found
        finally:
            engines = found.engines
            await found.stop()
            _, alive = psutil.wait_procs(engines, timeout=20)
            assert not alive
