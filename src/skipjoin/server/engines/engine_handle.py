from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable, Sequence

import msgspec
import zmq

from skipjoin.config import HANG_LIMITS, EngineConfig, HangLimits
from skipjoin.server.engines.connected_engine import ConnectedEngine
from skipjoin.server.engines.engine_client import EngineClient
from skipjoin.server.engines.engine_program import ENGINE_COMMAND, THREAD_WAITING, describe_end
from skipjoin.server.engines.heartbeat import (
    DUMP_S,
    HEARTBEAT_INTERVAL_S,
    HUNG_S,
    HeartbeatReader,
    ask_for_stacks,
    describe_hang,
)
from skipjoin.server.engines.link import Channel
from skipjoin.server.engines.messages import EngineFailed, FromEngine, LoadProgress, Ready, Setup, Shutdown, ToEngine
from skipjoin.system.container import oom_kills
from skipjoin.system.own_folder import OwnFolder

# Time for an engine to exit on request before it is killed.
STOP_S = 5.0


class EngineStartError(RuntimeError):
    pass


class EngineHandle:
    def __init__(
        self,
        client: EngineClient,
        command: Sequence[str] = ENGINE_COMMAND,
        on_progress: Callable[[str, float], None] = lambda what, share: None,
    ) -> None:
        self.client = client
        self.died = asyncio.Event()
        self.cause = ""
        self._oom_kills = oom_kills()
        self._command = command
        self._on_progress = on_progress
        # Holds the socket. It exists only from `start`, when the server handles signals, until the engine has
        # connected, so a server that is killed at another time leaves no folder.
        self._folder: OwnFolder | None = None
        self._context = zmq.Context()
        self._channel: Channel | None = None
        self._replica: ConnectedEngine | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._heartbeat_watcher: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._failure: str | None = None
        self._is_killed = False

    async def start(self, config: EngineConfig, limits: HangLimits = HANG_LIMITS) -> Ready:
        loop = asyncio.get_running_loop()
        # Only this user can open the folder.
        self._folder = OwnFolder("skipjoin-engine-")
        socket_path = self._folder.path / "engine"
        if len(os.fsencode(socket_path)) > zmq.IPC_PATH_MAX_LEN:
            raise EngineStartError(
                f"the path of the engine's socket, {socket_path}, exceeds {zmq.IPC_PATH_MAX_LEN} bytes, the limit of "
                "this system: set TMPDIR to a folder with a shorter path"
            )
        endpoint = f"ipc://{socket_path}"
        zmq_socket = self._context.socket(zmq.PAIR)
        zmq_socket.set_hwm(0)  # messages in transit are bounded by the queue's limits
        zmq_socket.bind(endpoint)
        self._channel = Channel(zmq_socket, self._receive)
        heartbeat = HeartbeatReader()
        self._ready = loop.create_future()
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            env={**THREAD_WAITING, **os.environ},
            stdout=2,  # what libraries print is for the operator
            # Outside the terminal's process group, so that Ctrl-C does not kill it before its requests finish.
            start_new_session=True,
            pass_fds=(heartbeat.engine_fd,),
        )
        assert self._process.stdin is not None
        setup = Setup(config, endpoint, os.getpid(), heartbeat.engine_fd, limits)
        heartbeat.started()
        self._process.stdin.write(msgspec.json.encode(setup))
        self._process.stdin.write_eof()
        if self._is_killed:  # while the process was being created, when there was nothing to kill
            self.kill()
        self._watcher = asyncio.create_task(self._watch(self._process))
        self._heartbeat_watcher = asyncio.create_task(self._watch_heartbeat(heartbeat, self._process, limits))
        return await self._ready

    async def stop(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            self._send(Shutdown())
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                self.kill()
                await process.wait()
        if self._watcher is not None:
            await self._watcher
        if self._heartbeat_watcher is not None:
            await self._heartbeat_watcher
        if self._channel is not None:
            self._channel.close()
        self._context.term()
        self._close_folder()

    def kill(self) -> None:
        """Kill the process immediately, or once it is created."""
        self._is_killed = True
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)

    def _close_folder(self) -> None:
        if self._folder is not None:
            self._folder.close()

    def _send(self, message: ToEngine) -> None:
        assert self._channel is not None
        self._channel.send(message)  # `_watch` handles an engine that has exited

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, LoadProgress | Ready):
            self._close_folder()
        if isinstance(message, LoadProgress):
            self._on_progress(message.what, message.share)
        elif isinstance(message, EngineFailed):
            self._failure = message.text
        elif isinstance(message, Ready):
            self._replica = self.client.join(message, self._send)
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message)
        elif self._replica is not None:
            self.client.receive(self._replica, message)

    async def _watch_heartbeat(
        self, heartbeat: HeartbeatReader, process: asyncio.subprocess.Process, limits: HangLimits
    ) -> None:
        while process.returncode is None:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            silent_s = 0.0 if self._replica is None else heartbeat.silent_s()  # it has no heartbeat before it is ready
            if self._replica is not None:
                self._replica.is_hung = silent_s >= min(HUNG_S, limits.hang_s)
            if silent_s >= limits.hang_s and process.returncode is None:
                self._failure = describe_hang(limits)
                ask_for_stacks(process.pid)
                await asyncio.sleep(DUMP_S)
                self.kill()
        heartbeat.close()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        assert self._channel is not None
        self._channel.read(math.inf)  # the last messages
        is_out_of_memory = oom_kills() > self._oom_kills
        self.cause = self._failure or describe_end(code, is_out_of_memory=is_out_of_memory)
        self.client.died()
        self.died.set()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineStartError(self.cause))
