"""The engine process as the API process holds it: started, talked to over a private socket, ended."""

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

# What an engine may take to end when told to, before it is killed.
STOP_S = 5.0


class EngineStartError(RuntimeError):
    """The engine did not come up. The text says why."""


class EngineHandle:
    """One engine process, a child of this one. client: the way to use it.

    command: what to run. on_progress: called while it starts with what is being done and the share done.
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
        # Only this user may enter the socket's folder.
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
        """The engine's process id, once it was started."""
        return None if self._process is None else self._process.pid

    async def start(self, config: EngineConfig) -> Ready:
        """Start the process and wait until it takes requests. Raises `EngineStartError`."""
        loop = asyncio.get_running_loop()
        endpoint = f"ipc://{Path(self._folder.name) / 'engine'}"
        zmq_socket = self._context.socket(zmq.PAIR)
        zmq_socket.set_hwm(0)  # what is on its way is bounded by the queue's limits
        zmq_socket.bind(endpoint)
        self._channel = Channel(zmq_socket, self._receive)
        self._ready = loop.create_future()
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            env={**THREAD_WAITING, **os.environ},
            stdout=2,  # what libraries print is for the operator
            # Out of the terminal's group, so that Ctrl-C does not end it before its requests are done.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        setup = Setup(config, endpoint, os.getpid())
        self._process.stdin.write(msgspec.json.encode(setup))
        self._process.stdin.write_eof()
        self._watcher = asyncio.create_task(self._watch(self._process))
        return await self._ready

    async def stop(self) -> None:
        """End the process, at once if it does not end when told to, and release what belongs to it."""
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
        """End the process now, with whatever it does."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)

    def _send(self, message: ToEngine) -> None:
        assert self._channel is not None
        self._channel.send(message)  # what an engine that is gone does not take, `_watch` sees to

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
        """Wait for the process to end, and tell everybody."""
        code = await process.wait()
        assert self._channel is not None
        self._channel.read()  # its last words
        self.client.died()
        self.died.set()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineStartError(self._failure or describe_end(code)))
        elif self._failure is not None:
            logger.error("the engine failed: %s", self._failure)
