"""The actor that Ray Serve starts, checks and restarts: one engine process, and its answers to Serve."""

from __future__ import annotations

import os
import subprocess

import msgspec

from skipjoin.container import oom_kills
from skipjoin.server.engines.engine_program import ORPHANED, THREAD_WAITING, describe_end
from skipjoin.server.engines.messages import Setup
from skipjoin.server.engines.pulse import PulseReader, describe_hang, end_hung
from skipjoin.server.engines.supervisor import delete


class EngineReplica:
    """One replica. It is ready once its engine takes requests, and unhealthy once the engine has ended.

    The engine is its child and ends with it. Tokens do not pass through it: the engine has its own link to the API
    process. command: the program of the engine process. setup: a `Setup` as JSON, without the fields of this process.
    application: the name under which Serve runs it. Raises RuntimeError if the engine does not start.
    """

    def __init__(self, command: tuple[str, ...], setup: bytes, application: str) -> None:
        self._application = application
        self._oom_kills = oom_kills()
        self._pulse = PulseReader()
        notify = self._pulse.engine_fd
        mine = msgspec.structs.replace(msgspec.json.decode(setup, type=Setup), parent=os.getpid(), pulse_fd=notify)
        self._limits = mine.limits
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=2,  # into Ray's log of this process
            env={**THREAD_WAITING, **os.environ},
            pass_fds=(notify,),
        )
        self._pulse.started()
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(msgspec.json.encode(mine))
        if not self._pulse.wait():
            self._give_up(self._process.wait())

    def check_health(self) -> None:
        """Called by Serve, which starts another replica after some failures.

        Raises RuntimeError if the engine has ended, and kills one that hangs.
        """
        if self._pulse.silent_s() >= self._limits.hang_s and self._process.poll() is None:
            end_hung(self._process)
            raise RuntimeError(describe_hang(self._limits))
        if (code := self._process.poll()) is not None:
            self._give_up(code)

    def __del__(self) -> None:
        """Called by Serve before it ends this process."""
        self._process.kill()
        self._process.wait()
        self._pulse.close()

    def _give_up(self, code: int) -> None:
        if code == ORPHANED:
            # In a shared cluster Serve would go on to start engines for a server that has ended.
            delete(self._application)
        raise RuntimeError(describe_end(code, is_out_of_memory=oom_kills() > self._oom_kills))
