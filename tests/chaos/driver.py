"""Runs rounds: a server, a load with a batch, a fault in the middle, and the checks."""

from __future__ import annotations

import asyncio
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import psutil

from chaos import batches, checks
from chaos.catalog import entry
from chaos.clients import Clients, Outcome
from chaos.faults import FAULTS, Fault, Scene, end_a_start
from chaos.plan import WORLDS, Round, World
from chaos.served import START_S, Launched, Place, Served, lacks_mounts, reference_server

_T = TypeVar("_T")

# Seconds for a round's requests and its fault.
_ROUND_S = 120.0
# Metrics that tell whether a load was heavy enough to matter.
_COUNTED = ("num_preemptions_total", "recomputed_tokens_total", "swap_in_bytes_total", "batch_lines_ended_total")


def possible_worlds(say: Callable[[str], None] = print) -> tuple[World, ...]:
    """Those that this machine can have. say: gets why others are left out."""
    try:
        import ray  # noqa: F401, PLC0415 (optional)

        no_ray = None
    except ImportError:
        no_ray = "Ray is not installed"
    no_mounts = lacks_mounts()
    found = []
    for world in WORLDS:
        lack = (no_ray if world.needs_ray else None) or (no_mounts if world.small_disk else None)
        if lack is None:
            found.append(world)
        else:
            say(f"without the world {world.name!r}: {lack}")
    return tuple(found)


class References:
    """Answers of an idle server, which are asked for once. wanted: an entry's number -> its choices."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.known: dict[int, dict[int, tuple[str, str]]] = {}

    async def learn(self, numbers: set[int]) -> None:
        """Ask for those that are not known, one after the other."""
        async with aiohttp.ClientSession() as session:
            for number in sorted(numbers - self.known.keys()):
                asked = entry(number)
                async with session.post(self._served.url + asked.path, json=asked.body) as answer:
                    outcome = checks.as_outcome(number, await answer.json())
                assert outcome.is_complete, f"the reference of entry {number} failed: {outcome}"
                self.known[number] = {
                    index: (choice.text, choice.reason or "") for index, choice in outcome.choices.items()
                }


@dataclass
class Play:
    """What a round has brought. batch: the id of its batch, if the server took it."""

    outcomes: list[Outcome] = field(default_factory=list)
    batch: str | None = None


class Driver:
    """Runs rounds one after another, on one server of a block's world as long as that lives.

    seen: how requests ended, and what the servers counted of preemption, by name.
    """

    def __init__(self, references: References) -> None:
        self.seen: Counter[str] = Counter()
        self._references = references
        self._place: Place | None = None
        self._served: Served | None = None
        self._block = -1

    async def run(self, this: Round) -> list[str]:
        """What does not hold in this round."""
        found = await self.leave() if this.block != self._block else []
        self._block = this.block
        await self._references.learn({ask.number for ask in this.asks} | set(this.lines))
        try:
            return found + await self._run(this)
        except Exception:  # a bug of a check, or of the server: told with the round that has it
            return [*found, traceback.format_exc()]

    async def leave(self) -> list[str]:
        """End the server in order, if one runs; what it leaves."""
        found: list[str] = []
        if self._served is not None:
            if (code := await self._served.stop()) != 0:
                found.append(f"told to end, the server ended with code {code}")
            found += [f"left behind: {one}" for one in await self._served.left()]
        self.close()
        return found

    def close(self) -> None:
        """End whatever runs, and remove the folders."""
        if self._served is not None:
            self._served.close()
        if self._place is not None:
            self._place.close()
        self._served = self._place = None
        self._block = -1

    def processes(self) -> dict[str, psutil.Process]:
        """Of the server that runs."""
        if self._served is None:
            return {}
        engines = {f"engine {number}": engine for number, engine in enumerate(self._served.engines())}
        return {"api": self._served.api, **engines}

    def told(self) -> str:
        """The end of what the server wrote."""
        return "" if self._served is None else self._served.told()

    # -- a round --------------------------------------------------------------------------------------------------

    async def _run(self, this: Round) -> list[str]:
        fault = FAULTS[this.fault]
        first = served = await self._ready(this)
        before = await served.metrics()
        play = await asyncio.wait_for(_play(served, this, fault), _ROUND_S)
        found = list(checks.answers(play.outcomes, self._references.known, fault))
        self.seen.update(outcome.end for outcome in play.outcomes)
        if await self._has_ended(served, fault):
            found += await self._bury(served, fault)
            found += await self._start_in_vain(this, fault)
            served = await self._ready(this)
        lines: list[Any] = []
        if play.batch is not None:
            lines = await batches.fetch(served, play.batch)
            found += checks.batch(this.lines, lines, self._references.known)
        found += await checks.rest(served)
        if served is first and not found:
            answered = [checks.as_outcome(this.lines[int(one["custom_id"])], one["response"]["body"]) for one in lines]
            after = await served.metrics()
            # The engine tells its counts from time to time: last when it has read that the last client has left.
            end = time.monotonic() + checks.IDLE_S
            while found := list(checks.metrics(before, after, play.outcomes, answered, fault)):
                if time.monotonic() > end:
                    break
                await asyncio.sleep(0.1)
                after = await served.metrics()
            self.seen.update({name: int(checks.grown(before, after, name)) for name in _COUNTED})
        return found

    async def _ready(self, this: Round) -> Served:
        """The server of the round's world, with all its engines."""
        if self._place is None:
            self._place = Place(this.world)
        if self._served is None:
            self._served = await asyncio.to_thread(Served, self._place, *_options(this))
        end = time.monotonic() + START_S
        while True:
            status, health = await self._served.get("/health")
            if status == 200 and health.get("replicas_alive") == health.get("replicas"):
                return self._served
            assert time.monotonic() < end, f"the server is not ready: {status} {health}"
            await asyncio.sleep(0.1)

    async def _start_in_vain(self, this: Round, fault: Fault) -> list[str]:
        """Start servers and end them while they start; what is wrong with their ends."""
        assert self._place is not None
        draw = random.Random(f"starts/{this.seed}/{this.number}")
        found = []
        for _ in range(fault.false_starts):
            launched = Launched(self._place, *_options(this))
            try:
                found += await end_a_start(launched, draw, replaces_engines=this.world.name == "replicas")
            finally:
                launched.close()
        return found

    @staticmethod
    async def _has_ended(served: Served, fault: Fault) -> bool:
        """Whether the server ends, or has ended."""
        if not fault.may_survive:
            return bool(fault.ends)
        return served.process.poll() is not None or (await served.get("/health"))[0] != 200

    async def _bury(self, served: Served, fault: Fault) -> list[str]:
        """What is wrong with the end of a server that was to end."""
        found = []
        if (code := await served.ended()) not in fault.ends:
            found.append(f"the server ended with code {code}")
        found += [f"left behind: {one}" for one in await served.left()]
        served.close()
        self._served = None
        return found


def _options(this: Round) -> tuple[str, ...]:
    """Of the command line of a round's server."""
    return *this.world.options, "--recipe", this.recipe


async def _play(served: Served, this: Round, fault: Fault) -> Play:
    """Run the load, and the fault in the middle of it."""
    play, clients = Play(), Clients(served.url)
    play.outcomes = clients.outcomes
    try:
        async with asyncio.TaskGroup() as group:
            for ask in this.asks:
                group.create_task(clients.ask(ask))
            for begin_s, data in this.rude:
                group.create_task(clients.be_rude(begin_s, data))
            handed_in = group.create_task(batches.submit(served, this.lines)) if this.lines else None
            group.create_task(_strike(served, this, fault, clients))
    finally:
        await clients.close()
    if handed_in is not None:
        play.batch = handed_in.result()
    return play


async def _strike(served: Served, this: Round, fault: Fault, clients: Clients) -> None:
    """Wait for the fault's moment, and let it happen."""
    late = time.monotonic() + this.late_s
    while clients.events < this.at and time.monotonic() < late:
        await asyncio.sleep(0.005)
    draw = random.Random(f"fault/{this.seed}/{this.number}")
    await fault.act(Scene(served, draw, this.length_s))


@asynccontextmanager
async def driver() -> AsyncIterator[Driver]:
    """A driver, and the idle server that it compares answers with."""
    with reference_server() as idle:
        found = Driver(References(idle))
        try:
            yield found
        finally:
            found.close()


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """As `asyncio.run`. SIGTERM ends the work's servers first, then the process."""

    async def until_told() -> _T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(until_told())
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


async def run_rounds(rounds: Iterable[Round], say: Callable[[str], None] = print) -> list[str]:
    """Run rounds until one of them finds something; what that is. say: gets a line for each."""
    async with driver() as found:
        for this in rounds:
            begin = time.monotonic()
            troubles = await found.run(this)
            say(f"{this}: {f'{len(troubles)} TROUBLES' if troubles else 'ok'}, {time.monotonic() - begin:.1f} s")
            if troubles:
                return [*troubles, f"to run it again: {this.replay}", found.told()]
        say(", ".join(f"{name} {count}" for name, count in sorted(found.seen.items())))
        return await found.leave()
