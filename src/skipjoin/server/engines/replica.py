"""What Ray Serve starts, watches and starts again: one engine process, and the little around it that answers Serve."""

from __future__ import annotations

import os
import subprocess

import msgspec

from skipjoin.server.engines.engine_program import ORPHANED, THREAD_WAITING, describe_end
from skipjoin.server.engines.messages import Setup
from skipjoin.server.engines.supervisor import delete


class EngineReplica:
    """One replica. It is there once its engine takes requests, and sick once that has ended.

    The engine is its child and dies with it. No tokens come by here: the engine has its own link to the API process.
    command: the program that is the engine process. setup: a `Setup` as JSON, without what belongs to this process.
    application: the name under which Serve runs it. Raises RuntimeError if the engine does not start.
    """

    def __init__(self, command: tuple[str, ...], setup: bytes, application: str) -> None:
        self._application = application
        ready, told = os.pipe()
        mine = msgspec.structs.replace(msgspec.json.decode(setup, type=Setup), parent=os.getpid(), ready_fd=told)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=2,  # into Ray's log of this process
            env={**THREAD_WAITING, **os.environ},
            pass_fds=(told,),
        )
        os.close(told)
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(msgspec.json.encode(mine))
        with os.fdopen(ready, "rb") as news:
            is_ready = bool(news.read(1))
        if not is_ready:  # it has ended, and with it the pipe
            self._give_up(self._process.wait())

    def check_health(self) -> None:
        """Called by Serve, which starts another replica after some failures. Raises RuntimeError if the engine has
        ended."""
        if (code := self._process.poll()) is not None:
            self._give_up(code)

    def __del__(self) -> None:
        """Called by Serve before it ends this process."""
        self._process.kill()
        self._process.wait()

    def _give_up(self, code: int) -> None:
        if code == ORPHANED:
            # In a cluster that others use, too, Serve would start engines for nobody for ever.
            delete(self._application)
        raise RuntimeError(describe_end(code))
