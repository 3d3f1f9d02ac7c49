"""Faults that are injected under load, and the request outcomes that each allows.

These faults occur in operation: signals, resource limits and full disks. Failed and hung KV copies cannot be caused
from outside; `tests/exec/test_transfer.py` and `tests/core/kv/test_two_tiers.py` test them.
`tests/server/test_batch_store.py` tests jumps of the clock.
"""

from __future__ import annotations

import asyncio
import random
import resource
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from chaos.served import Launched, Served

# Seconds within which /health must report that the engine died.
NOTICE_S = 5.0
_STUTTER_S = 0.05


class Scene(NamedTuple):
    """Target of a fault."""

    served: Served
    draw: random.Random
    length_s: float


@dataclass(frozen=True)
class Fault:
    """Fault and its allowed consequences.

    Attributes:
        act: Injects the fault, and reverts a temporary one.
        ends: Exit codes with which the server may exit, or empty if it must survive.
        may_survive: Whether the server may survive although `ends` is not empty.
        errors: Error codes with which requests may end.
        cuts: Whether connections may be closed.
        loses_counts: Whether an engine may lose its latest counts.
        false_starts: Number of subsequent servers that are stopped while they start.
    """

    act: Callable[[Scene], Awaitable[None]]
    ends: frozenset[int] = frozenset()
    may_survive: bool = False
    errors: frozenset[str] = frozenset()
    cuts: bool = False
    loses_counts: bool = False
    false_starts: int = 0


# -- acts ---------------------------------------------------------------------------------------------------------


async def _nothing(scene: Scene) -> None:
    pass


async def _pause(scene: Scene, some: list[psutil.Process]) -> None:
    victim = scene.draw.choice(some)
    victim.suspend()
    try:
        await asyncio.sleep(scene.length_s)
    finally:
        victim.resume()


async def _stutter(scene: Scene) -> None:
    """Suspend the engine half of the time, so that steps and copies are slow."""
    end = time.monotonic() + scene.length_s
    while time.monotonic() < end:
        await _pause(scene._replace(length_s=_STUTTER_S), scene.served.engines())
        await asyncio.sleep(_STUTTER_S)


async def _kill_engine(scene: Scene) -> None:
    """Kill the only engine, check that /health reports it, and mostly skip the grace period of ten seconds."""
    served = scene.served
    scene.draw.choice(served.engines()).kill()
    begin = time.monotonic()
    while (await served.get("/health"))[0] != 503:
        assert time.monotonic() - begin < NOTICE_S, f"/health does not report the engine's death within {NOTICE_S:g} s"
        await asyncio.sleep(0.05)
    if scene.draw.random() < 0.8:
        await asyncio.sleep(0.5)
        served.process.terminate()


async def _kill(scene: Scene, some: list[psutil.Process]) -> None:
    scene.draw.choice(some).kill()


async def _terminate(scene: Scene) -> None:
    scene.served.process.terminate()


async def _few_descriptors(scene: Scene) -> None:
    api = scene.served.api
    before = api.rlimit(resource.RLIMIT_NOFILE)
    api.rlimit(resource.RLIMIT_NOFILE, (api.num_fds() + scene.draw.randint(0, 6), before[1]))
    try:
        await asyncio.sleep(scene.length_s)
    finally:
        api.rlimit(resource.RLIMIT_NOFILE, before)


async def _little_memory(scene: Scene) -> None:
    (engine,) = scene.served.engines()
    before = engine.rlimit(resource.RLIMIT_AS)
    engine.rlimit(resource.RLIMIT_AS, (engine.memory_info().vms + scene.draw.choice((0, 1 << 20)), before[1]))
    try:
        await asyncio.sleep(scene.length_s)
    finally:
        if engine.is_running():
            engine.rlimit(resource.RLIMIT_AS, before)


async def _full_disk(scene: Scene) -> None:
    disk = scene.served.place.disk
    try:
        disk.fill()
        await asyncio.sleep(scene.length_s)
    finally:
        disk.empty()


# -- interrupted starts -------------------------------------------------------------------------------------------

# Ways to stop a starting server, and its exit codes. A signal may arrive before its handler is installed.
_START_EXITS = {
    "kill api": frozenset({-signal.SIGKILL}),
    "terminate": frozenset({0, -signal.SIGTERM}),
    "kill engine": frozenset({1}),
}
# Maximum seconds before a start is interrupted. The built-in model without ranks starts faster.
_MAX_START_S = 6.0
_SOCKET = "skipjoin-engine-"


async def interrupt_start(launched: Launched, draw: random.Random, *, replaces_engines: bool) -> list[str]:
    """Stop a server during or soon after its start, and return what is wrong with its exit and leftovers.

    A killed server leaves the folder of a socket, which the next start removes unless SIGTERM ends it before that.

    Args:
        replaces_engines: Whether the server survives the death of an engine.
    """
    before = launched.files()
    how = draw.choice(sorted(_START_EXITS.keys() - ({"kill engine"} if replaces_engines else set())))
    await asyncio.sleep(draw.uniform(0, _MAX_START_S))
    if how == "kill engine":
        while not (engines := launched.engines()) and launched.process.poll() is None:
            await asyncio.sleep(0.02)
        for engine in engines:
            engine.kill()
    else:
        launched.process.send_signal(signal.SIGKILL if how == "kill api" else signal.SIGTERM)
    code = await launched.wait()
    found = [f"the server exited with code {code}"] if code not in _START_EXITS[how] else []

    def may_remain(name: str) -> bool:
        return name.startswith(_SOCKET) and (how == "kill api" or (code == -signal.SIGTERM and name in before))

    found += [f"left behind: {leftover}" for leftover in await launched.leftovers(may_remain)]
    return [f"{how}, while the server started: {problem}" for problem in found]


# -- the table ----------------------------------------------------------------------------------------------------

_DEAD = frozenset({"engine_dead", "shutting_down"})
_NO_REPLICA = frozenset({"no_replica"})
FAULTS: dict[str, Fault] = {
    "none": Fault(_nothing),
    "pause engine": Fault(lambda scene: _pause(scene, scene.served.engines())),
    "pause api": Fault(lambda scene: _pause(scene, [scene.served.api])),
    "pause rank": Fault(lambda scene: _pause(scene, scene.served.ranks())),
    "pause replica": Fault(lambda scene: _pause(scene, scene.served.replicas())),
    "stutter": Fault(_stutter),
    "kill engine": Fault(_kill_engine, ends=frozenset({1}), errors=_DEAD, cuts=True),
    "kill api": Fault(lambda scene: _kill(scene, [scene.served.api]), ends=frozenset({-signal.SIGKILL}), cuts=True),
    "kill rank": Fault(lambda scene: _kill(scene, scene.served.ranks())),
    "kill engine of a replica": Fault(
        lambda scene: _kill(scene, scene.served.engines()), errors=_NO_REPLICA, loses_counts=True
    ),
    "kill replica": Fault(lambda scene: _kill(scene, scene.served.replicas()), errors=_NO_REPLICA, loses_counts=True),
    "end starts": Fault(
        lambda scene: _kill(scene, [scene.served.api]), ends=frozenset({-signal.SIGKILL}), cuts=True, false_starts=3
    ),
    "terminate": Fault(_terminate, ends=frozenset({0}), errors=frozenset({"shutting_down"}), cuts=True),
    "few descriptors": Fault(_few_descriptors, cuts=True),
    "little memory": Fault(
        _little_memory, ends=frozenset({1}), may_survive=True, errors=_DEAD | {"request_failed"}, cuts=True
    ),
    "full disk": Fault(_full_disk),
}
