"""The engine process from the API process's side: its start, its private socket, its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from skipjoin.config import EngineConfig
from skipjoin.server.engines.channel import Channel
from skipjoin.server.engines.engine_client import ConnectedEngine, EngineClient
from skipjoin.server.engines.engine_program import ENGINE_COMMAND, THREAD_WAITING, describe_end
from skipjoin.server.engines.messages import EngineFailed, FromEngine, LoadProgress, Ready, Setup, Shutdown, ToEngine

logger = logging.getLogger(__name__)

# Seconds that an engine has to end on request, before it is killed.
STOP_S = 5.0


class EngineStartError(RuntimeError):
    """The engine did not start. The text says why."""


class EngineHandle:
    """One engine process, a child of this one. client: sends it requests.

    command: its program. on_progress: called while it starts with the name of the stage, and the share that is done.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        on_progress: Callable[[str, float], None] = lambda what, share: None,
    ) -> None:
        self.client = client
        self.died = asyncio.Event()
        self._command = command
        self._on_progress = on_progress
        # Only this user may open the socket's folder.
        self._folder = tempfile.TemporaryDirectory(prefix="skipjoin-")
        self._context = zmq.Context()
        self._channel: Channel | None = None
        self._replica: ConnectedEngine | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._failure: str | None = None

    @property
    def pid(self) -> int | None:
        """The engine's process id; None before the start."""
        return None if self._process is None else self._process.pid

    async def start(self, config: EngineConfig) -> Ready:
        """Start the process and wait until it takes requests. Raises `EngineStartError`."""
        loop = asyncio.get_running_loop()
        endpoint = f"ipc://{Path(self._folder.name) / 'engine'}"
        zmq_socket = self._context.socket(zmq.PAIR)
        zmq_socket.set_hwm(0)  # messages in transit are bounded by the queue's limits
        zmq_socket.bind(endpoint)
        self._channel = Channel(zmq_socket, self._receive)
        self._ready = loop.create_future()
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            env={**THREAD_WAITING, **os.environ},
            stdout=2,  # libraries print for the operator
            # Outside of the terminal's group, so that Ctrl-C does not end it before its requests are complete.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        setup = Setup(config, endpoint, os.getpid())
        self._process.stdin.write(msgspec.json.encode(setup))
        self._process.stdin.write_eof()
        self._watcher = asyncio.create_task(self._watch(self._process))
        return await self._ready

    async def stop(self) -> None:
        """End the process, by force if it does not end on request, and release its resources."""
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
        if self._channel is not None:
            self._channel.close()
        self._context.term()
        self._folder.cleanup()

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)

    def _send(self, message: ToEngine) -> None:
        assert self._channel is not None
        self._channel.send(message)  # `_watch` handles an engine that has ended

    def _receive(self, message: FromEngine) -> None:
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

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the process to end, and fail what depends on it."""
        code = await process.wait()
        assert self._channel is not None
        self._channel.read()  # its last messages
        self.client.died()
        self.died.set()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineStartError(self._failure or describe_end(code)))
        elif self._failure is not None:
            logger.error("the engine failed: %s", self._failure)
