"""Engines that fork from their server, whose parent has imported them; see forked_servers.py."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import simulated_engine

from skipjoin.server.engines.engine_program import ENGINE_COMMAND
from support.forks import fork

PROGRAM = "simulated_engine.py"


class _Pipe:
    """Stands in for the `stdin` of an `asyncio.subprocess.Process`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes) -> None:
        assert os.write(self._descriptor, data) == len(data)

    def write_eof(self) -> None:
        os.close(self._descriptor)


class ForkedEngine:
    """Stands in for the `asyncio.subprocess.Process` of an engine."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], keeps: Sequence[int]) -> None:
        def run() -> int:
            if is_of_model(command):
                from skipjoin.server.engines import engine_process  # noqa: PLC0415 (in servers that have torch)

                return engine_process.serve_engine(engine_process.load_engine)
            sys.argv[:] = command[1:]
            return simulated_engine.main()

        theirs, own = os.pipe()
        self.pid = fork("engine", environment, {theirs: 0, 2: 1, **{kept: kept for kept in keeps}}, run)
        os.close(theirs)
        self.stdin = _Pipe(own)
        self.returncode: int | None = None
        self._done, self._exit = asyncio.Event(), os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(self._exit, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._exit)
        os.close(self._exit)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._done.set()

    async def wait(self) -> int | None:
        await self._done.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


def is_of_model(command: Sequence[str]) -> bool:
    return (*command,) == ENGINE_COMMAND and "torch" in sys.modules


def fork_engines() -> None:
    """Let this process fork engines that it has imported, because that takes most of their start."""
    create = asyncio.create_subprocess_exec

    async def created(*command: str, **options: Any) -> Any:
        if is_of_model(command) or (len(command) > 1 and Path(command[1]).name == PROGRAM):
            return ForkedEngine(command, options["env"], options["pass_fds"])
        return await create(*command, **options)

    asyncio.create_subprocess_exec = created
