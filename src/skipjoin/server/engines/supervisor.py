"""Supervision of replicas, which are Ray actors.

Ray does not restart them: it notices no hung engine, and an unreachable machine late.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from skipjoin.exec.ranks.cluster import ClusterError, import_ray
from skipjoin.exec.ranks.nodes import Node, excluding, known_nodes, silent
from skipjoin.server.engines.engine_program import THREAD_WAITING, describe_end
from skipjoin.server.engines.heartbeat import HEARTBEAT_INTERVAL_S, HeartbeatReader, describe_hang, end_hung
from skipjoin.server.engines.messages import Setup
from skipjoin.system.container import oom_kills

logger = logging.getLogger(__name__)
# Interval of health checks.
CHECK_S = HEARTBEAT_INTERVAL_S
# Time without an answer after which to check repeatedly that the replica's node is reachable.
_LATE_S = 5.0
# Time without an answer after which to replace a replica on a reachable node, which may only be busy.
_ANSWER_S = 60.0
# Interval of warnings that no node has room for a replica.
_PLACE_S = 30.0
# Consecutive failed starts after which `check` reports them, and the server exits if it has no engine.
_MAX_FAILURES = 3
# Exponential backoff after failed starts: the first and the maximum delay.
_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 30.0


class EngineReplica:
    """Parent of an engine. Call `place`, `start` and then `check_health`, all from one thread."""

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


class Needs(NamedTuple):
    """Resources of one replica. With `ranks`, these have the GPUs and a CPU each, otherwise the engine."""

    cpus: int
    device: str
    ranks: int = 0

    @property
    def all_cpus(self) -> int:
        return 1 + self.ranks if self.ranks else self.cpus

    @property
    def own_cpus(self) -> int:
        return 1 if self.ranks else self.cpus


class _Slot:
    """Wanted replica. Its actor has one pending call: `place`, then `start`, then `check_health`."""

    def __init__(self) -> None:
        self.actor: Any = None
        self.node: Node | None = None  # known after `place`
        self.is_running = False  # True after `start`
        self.call: Any = None
        self.waited_s = 0.0  # for the answer to `call`
        self.rest_s = 0.0  # until the next start
        self.watched_s = 0.0  # since the last warning or reachability check

    def ask(self, call: Any) -> None:
        self.call, self.waited_s, self.watched_s = call, 0.0, 0.0


class ReplicaSupervisor:
    """Keeps replicas running. All methods block and must be called from one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slots: list[_Slot] = []
        self._failures = 0  # consecutive failed starts
        self._reason = ""  # of the last failed start

    def deploy(self, command: tuple[str, ...], setup: bytes, *, replicas: int, needs: Needs) -> None:
        ray = import_ray()
        gpus = check_room(replicas, needs, [node.has for node in known_nodes()])
        self._needs = needs
        self._arguments = (command, setup)
        # Spread, because a failed machine takes all its replicas with it.
        self._kind = ray.remote(num_cpus=needs.own_cpus, num_gpus=gpus, scheduling_strategy="SPREAD")(EngineReplica)
        self._checked_at = self._clock()
        self._slots = [_Slot() for _ in range(replicas)]
        for slot in self._slots:
            self._start(slot)

    def check(self) -> str | None:
        """Replace failed replicas. Return why none can start. Call every `CHECK_S`."""
        now = self._clock()
        # Time in which this process itself did not run does not count.
        passed_s = min(now - self._checked_at, 2 * CHECK_S)
        self._checked_at = now
        try:
            for slot in self._slots:
                self._check(slot, passed_s)
        except Exception as error:  # Ray's errors have no common class
            return f"Ray does not answer: {type(error).__name__}"
        if self._failures < _MAX_FAILURES:
            return None
        return f"{self._failures} starts in a row failed, the last one: {self._reason}"

    def close(self) -> None:
        for slot in self._slots:
            self._end(slot)

    # -- one replica --------------------------------------------------------------------------------------

    def _start(self, slot: _Slot) -> None:
        labels = excluding(silent(known_nodes()))  # otherwise Ray may place it on an unreachable node
        slot.actor = self._kind.options(label_selector=labels or None).remote()
        slot.ask(slot.actor.place.remote())

    def _check(self, slot: _Slot, passed_s: float) -> None:
        ray = import_ray()
        if slot.actor is None:
            slot.rest_s -= passed_s
            if slot.rest_s <= 0:
                self._start(slot)
        elif ray.wait([slot.call], timeout=0)[0]:
            try:
                self._go_on(slot, ray.get(slot.call))
            except ray.exceptions.RayTaskError as failed:
                self._replace(slot, str(failed.cause))
            except ray.exceptions.RayError as gone:
                logger.debug("a replica's process was lost", exc_info=gone)
                self._replace(slot, "its process, or its machine, has exited")
        else:
            self._wait(slot, passed_s)

    def _go_on(self, slot: _Slot, answer: Any) -> None:
        if slot.node is None:
            slot.node = next((node for node in known_nodes() if node.name == answer), None)
            if slot.node is None:
                self._replace(slot, "its machine was lost")
            else:
                slot.ask(slot.actor.start.remote(*self._arguments))
            return
        if not slot.is_running:
            slot.is_running, self._failures = True, 0
        slot.ask(slot.actor.check_health.remote())

    def _wait(self, slot: _Slot, passed_s: float) -> None:
        slot.waited_s += passed_s
        slot.watched_s += passed_s
        if slot.node is None:
            if slot.watched_s >= _PLACE_S:
                slot.watched_s = 0.0
                logger.warning("no node of the cluster has %d free CPUs for a replica", self._needs.own_cpus)
        elif slot.is_running and slot.waited_s >= _ANSWER_S:
            self._replace(slot, f"its process did not answer for {_ANSWER_S:g} s")
        elif slot.watched_s >= _LATE_S:
            slot.watched_s = 0.0
            if silent([slot.node]):
                self._replace(slot, f"node {slot.node.ip} cannot be reached")

    def _replace(self, slot: _Slot, reason: str) -> None:
        if slot.is_running:
            slot.rest_s = 0.0
            logger.warning("a replica ended (%s); another is started", reason)
        else:
            slot.rest_s = min(_FIRST_DELAY_S * 2**self._failures, _MAX_DELAY_S)
            self._failures += 1
            self._reason = reason
            logger.warning("a replica did not start (%s); the next try is in %g s", reason, slot.rest_s)
        self._end(slot)

    def _end(self, slot: _Slot) -> None:
        if slot.actor is not None:
            with suppress(Exception):  # the actor or the cluster may be gone
                import_ray().kill(slot.actor)
        slot.actor, slot.node, slot.is_running, slot.call = None, None, False, None


def check_room(replicas: int, needs: Needs, nodes: Sequence[Mapping[str, float]]) -> int:
    wants_gpus = needs.device == "cuda" or (needs.device == "auto" and any(node.get("GPU", 0) >= 1 for node in nodes))
    each = {"CPU": needs.all_cpus} | ({"GPU": needs.ranks or 1} if wants_gpus else {})
    if needs.ranks:  # ranks may be on other nodes than the engine
        places: Sequence[Mapping[str, float]] = [{name: sum(node.get(name, 0) for node in nodes) for name in each}]
    else:
        places = nodes
    room = sum(min(int(place.get(name, 0) // much) for name, much in each.items()) for place in places)
    if replicas > room:
        takes = " and ".join(f"{much} {name}" for name, much in each.items())
        have = "; ".join(", ".join(f"{node.get(name, 0):g} {name}" for name in each) for node in nodes)
        raise ClusterError(
            f"replicas must be at most {room}: each takes {takes}, and the cluster's nodes have {have}; got {replicas}"
        )
    return int(wants_gpus and not needs.ranks)
