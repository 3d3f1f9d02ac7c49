"""Data parallel engines behind one server, placed by Ray. Tokens do not pass through Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from skipjoin.config import HANG_LIMITS, EngineConfig, HangLimits
from skipjoin.exec.ranks.cluster import Cluster, ClusterError
from skipjoin.server.engines.connected_engine import ConnectedEngine
from skipjoin.server.engines.engine_client import EngineClient
from skipjoin.server.engines.engine_handle import EngineStartError
from skipjoin.server.engines.link import EngineLink, EngineListener
from skipjoin.server.engines.messages import EngineFailed, FromEngine, LoadProgress, Ready, Setup
from skipjoin.server.engines.supervisor import CHECK_S, Needs, ReplicaSupervisor
from skipjoin.system.container import usable_cpus

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class ReplicaSet:
    """`client.wanted` engines on the Ray cluster at `address`, or on this machine."""

    def __init__(
        self,
        client: EngineClient,
        command: Sequence[str],
        on_progress: Callable[[str, float], None],
        *,
        address: str | None = None,
    ) -> None:
        self.died = asyncio.Event()
        self.cause = ""
        self._client = client
        self._command = tuple(command)
        self._on_progress = on_progress
        self._address = address
        # All calls of Ray use this thread, because its processes exit with the thread that started them.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="skipjoin-ray")
        self._cluster: Cluster | None = None
        self._listener: EngineListener | None = None
        self._engines: set[_Engine] = set()
        self._started: asyncio.Future[Ready] | None = None
        self._supervisor: ReplicaSupervisor | None = None
        self._history: asyncio.Task[None] | None = None
        self._is_ending = False

    async def start(self, config: EngineConfig, limits: HangLimits = HANG_LIMITS) -> Ready:
        self._started = asyncio.get_running_loop().create_future()
        self._history = asyncio.create_task(self._live(config, limits))
        return await self._started

    async def stop(self) -> None:
        self._is_ending = True
        if self._history is not None:
            self._history.cancel()
            await asyncio.wait((self._history,))
        await self._in_thread(self._leave)
        self._thread.shutdown()
        if self._listener is not None:
            self._listener.close()

    def kill(self) -> None:
        self._is_ending = True
        self._fail_start("the server was stopped")

    # -- Ray, in its thread -------------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[..., ResultT], *args: Any) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args))

    def _enter(self, needs: Needs) -> None:
        if self._address is None:
            self._cluster = Cluster.start(needs.all_cpus * self._client.wanted)
        else:
            self._cluster = Cluster.join(self._address)
        self._supervisor = ReplicaSupervisor()

    def _deploy(self, setup: bytes, needs: Needs) -> None:
        assert self._supervisor is not None
        self._supervisor.deploy(self._command, setup, replicas=self._client.wanted, needs=needs)

    def _leave(self) -> None:
        if self._supervisor is not None:
            self._supervisor.close()
        if self._cluster is not None:
            self._cluster.close()

    # -- life ---------------------------------------------------------------------------------------------

    async def _live(self, config: EngineConfig, limits: HangLimits) -> None:
        try:
            config = self._divide(config)
            needs = Needs(config.threads or 1, config.device, config.ranks if config.is_distributed else 0)
            self._on_progress("starting Ray", 0.0)
            await self._in_thread(self._enter, needs)
            assert self._cluster is not None
            assert self._supervisor is not None
            self._listener = EngineListener(self._cluster.ip, self._admit)
            if config.is_distributed:  # its ranks run on the same cluster
                config = replace(config, ray_address=self._cluster.address)
            setup = msgspec.json.encode(Setup(config, self._listener.key, 0, limits=limits))
            await self._in_thread(self._deploy, setup, needs)
            self._on_progress("starting Ray", 1.0)
        except (ClusterError, OSError) as error:
            self._fail_start(str(error))
            return
        except Exception as error:
            logger.exception("the replicas were not started")
            self._fail_start(f"{type(error).__name__}: {error}")
            return
        while not self._is_ending:
            await asyncio.sleep(CHECK_S)
            reason = await self._in_thread(self._supervisor.check)
            if reason is not None and self._client.alive < self._client.wanted:
                self._fail_permanently(reason)

    def _divide(self, config: EngineConfig) -> EngineConfig:
        if config.threads is not None or self._address is not None:
            return config
        return replace(config, threads=max(1, usable_cpus() // (self._client.wanted * config.ranks)))

    def _fail_start(self, reason: str) -> None:
        if self._is_starting:
            assert self._started is not None
            self._started.set_exception(EngineStartError(reason))

    def _fail_permanently(self, reason: str) -> None:
        self._fail_start(reason)
        if self._client.alive == 0 and not self._is_ending:
            logger.error("no replica is left, and none will be restarted: %s", reason)
            self._is_ending = True
            self.cause = reason
            self._client.died()
            self.died.set()

    # -- engines ------------------------------------------------------------------------------------------

    @property
    def _is_starting(self) -> bool:
        return self._started is not None and not self._started.done()

    def _admit(self, link: EngineLink) -> None:
        taken = {engine.number for engine in self._engines}
        engine = _Engine(link, next(n for n in range(1, len(taken) + 2) if n not in taken))
        self._engines.add(engine)
        link.on_message, link.on_lost = partial(self._receive, engine), partial(self._lose, engine)

    def _receive(self, engine: _Engine, message: FromEngine) -> None:
        if isinstance(message, LoadProgress):
            if self._is_starting:
                self._on_progress(f"replica {engine.number}: {message.what}", message.share)
        elif isinstance(message, EngineFailed):
            engine.failure = message.text
        elif isinstance(message, Ready):
            engine.replica = self._client.join(message, engine.link.send)
            if not self._is_starting:
                logger.warning("replica %d is back", engine.number)
            elif self._client.alive == self._client.wanted:
                assert self._started is not None
                self._started.set_result(message)
        elif engine.replica is not None:
            self._client.receive(engine.replica, message)

    def _lose(self, engine: _Engine) -> None:
        self._engines.remove(engine)
        moved = self._client.lose(engine.replica) if engine.replica is not None else 0
        if self._is_ending:
            return
        if engine.failure is not None:
            self._fail_start(engine.failure)
        reason = engine.failure or "its process or its machine has exited"
        logger.warning("replica %d died (%s); %d of its requests continue on others", engine.number, reason, moved)


@dataclass(slots=True, eq=False)
class _Engine:
    link: EngineLink
    number: int
    replica: ConnectedEngine | None = None  # once it accepts requests
    failure: str | None = None
