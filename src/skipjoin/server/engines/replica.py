from __future__ import annotations

import os
import subprocess

import msgspec

from skipjoin.exec.ranks.cluster import import_ray
from skipjoin.server.engines.engine_program import THREAD_WAITING, describe_end
from skipjoin.server.engines.heartbeat import HeartbeatReader, describe_hang, end_hung
from skipjoin.server.engines.messages import Setup
from skipjoin.system.container import oom_kills


class EngineReplica:
    """Parent of an engine, which has its own link to the API process.

    Call `place`, `start` and then `check_health`, all from one thread.
    """

    def place(self) -> str:
        node: str = import_ray().get_runtime_context().get_node_id()
        return node

    def start(self, command: tuple[str, ...], setup: bytes) -> None:
        self._oom_kills = oom_kills()
        self._heartbeat = HeartbeatReader()
        notify = self._heartbeat.engine_fd
        mine = msgspec.structs.replace(msgspec.json.decode(setup, type=Setup), parent=os.getpid(), heartbeat_fd=notify)
        self._limits = mine.limits
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=2,  # Ray's log of this process
            env={**THREAD_WAITING, **os.environ},
            pass_fds=(notify,),
        )
        self._heartbeat.started()
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(msgspec.json.encode(mine))
        if not self._heartbeat.wait():
            raise RuntimeError(self._describe_end(self._process.wait()))

    def check_health(self) -> None:
        """Kill the engine if it hangs, and raise if it has exited. Call every `HEARTBEAT_INTERVAL_S`."""
        if self._heartbeat.silent_s() >= self._limits.hang_s and self._process.poll() is None:
            end_hung(self._process)
            raise RuntimeError(describe_hang(self._limits))
        if (code := self._process.poll()) is not None:
            raise RuntimeError(self._describe_end(code))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._heartbeat.close()

    def _describe_end(self, code: int) -> str:
        return describe_end(code, is_out_of_memory=oom_kills() > self._oom_kills)
