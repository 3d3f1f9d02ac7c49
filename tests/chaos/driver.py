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

from chaos import batches, invariants
from chaos.catalog import entry
from chaos.clients import Clients, Outcome
from chaos.faults import FAULTS, Fault, Scene, interrupt_start
from chaos.plan import WORLDS, Round, World
from chaos.served import START_S, Launched, Place, Served, lacks_mounts, serving

_T = TypeVar("_T")

# Maximum seconds for the requests and the fault of a round.
_ROUND_S = 120.0
# Metrics that show whether the load caused preemption.
_COUNTED = ("num_preemptions_total", "recomputed_tokens_total", "swap_in_bytes_total", "batch_lines_ended_total")


def possible_worlds() -> tuple[World, ...]:
    """Return the worlds that this machine supports, and report why others are skipped."""
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
            print(f"skipping world {world.name!r}: {lack}")
    return tuple(found)


class References:
    def __init__(self, served: Served) -> None:
        self._served = served
        self.known: dict[int, dict[int, tuple[str, str]]] = {}

    async def learn(self, numbers: set[int]) -> None:
        async with aiohttp.ClientSession() as session:
            for number in sorted(numbers - self.known.keys()):
                asked = entry(number)
                async with session.post(self._served.url + asked.path, json=asked.body) as answer:
                    outcome = invariants.as_outcome(number, await answer.json())
                assert outcome.is_complete, f"the reference of entry {number} failed: {outcome}"
                self.known[number] = {
                    index: (choice.text, choice.reason or "") for index, choice in outcome.choices.items()
                }


@dataclass
class Play:
    outcomes: list[Outcome] = field(default_factory=list)
    batch: str | None = None


class Driver:
    """Runs rounds one after another, with one server for each block while it lives."""

    def __init__(self, references: References) -> None:
        self.seen: Counter[str] = Counter()
        self._references = references
        self._place: Place | None = None
        self._served: Served | None = None
        self._block = -1

    async def run(self, this: Round) -> list[str]:
        found = await self.stop() if this.block != self._block else []
        self._block = this.block
        await self._references.learn({ask.number for ask in this.asks} | set(this.lines))
        try:
            return found + await self._run(this)
        except Exception:  # report a bug in the server or in a check with its round
            return [*found, traceback.format_exc()]

    async def stop(self) -> list[str]:
        """Stop the server, if one runs, and return what is wrong with its exit and leftovers."""
        found: list[str] = []
        if self._served is not None:
            if (code := await self._served.stop()) != 0:
                found.append(f"after SIGTERM the server exited with code {code}")
            found += [f"left behind: {leftover}" for leftover in await self._served.leftovers()]
        self.close()
        return found

    def close(self) -> None:
        if self._served is not None:
            self._served.close()
        if self._place is not None:
            self._place.close()
        self._served = self._place = None
        self._block = -1

    def processes(self) -> dict[str, psutil.Process]:
        if self._served is None:
            return {}
        engines = {f"engine {number}": engine for number, engine in enumerate(self._served.engines())}
        return {"api": self._served.api, **engines}

    def log_tail(self) -> str:
        return "" if self._served is None else self._served.log_tail()

    # -- a round --------------------------------------------------------------------------------------------------

    async def _run(self, this: Round) -> list[str]:
        fault = FAULTS[this.fault]
        first = served = await self._ready(this)
        before = await served.metrics()
        play = await asyncio.wait_for(_play(served, this, fault), _ROUND_S)
        found = list(invariants.answers(play.outcomes, self._references.known, fault))
        self.seen.update(outcome.end for outcome in play.outcomes)
        if await self._is_exiting(served, fault):
            found += await self._check_exit(served, fault)
            found += await self._interrupt_starts(this, fault)
            served = await self._ready(this)
        lines: list[Any] = []
        if play.batch is not None:
            lines = await batches.fetch(served, play.batch)
            found += invariants.batch(this.lines, lines, self._references.known)
        found += await invariants.idle(served)
        if served is first and not found:
            answered = [
                invariants.as_outcome(this.lines[int(line["custom_id"])], line["response"]["body"]) for line in lines
            ]
            after = await served.metrics()
            # The engine reports its counts periodically, and last after it has seen the last disconnect.
            end = time.monotonic() + invariants.IDLE_S
            while found := list(invariants.metrics(before, after, play.outcomes, answered, fault)):
                if time.monotonic() > end:
                    break
                await asyncio.sleep(0.1)
                after = await served.metrics()
            self.seen.update({name: int(invariants.grown(before, after, name)) for name in _COUNTED})
        return found

    async def _ready(self, this: Round) -> Served:
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

    async def _interrupt_starts(self, this: Round, fault: Fault) -> list[str]:
        """Stop servers while they start, and return what is wrong with their exits."""
        assert self._place is not None
        draw = random.Random(f"starts/{this.seed}/{this.number}")
        found = []
        for _ in range(fault.false_starts):
            launched = Launched(self._place, *_options(this))
            try:
                found += await interrupt_start(launched, draw, replaces_engines=this.world.name == "replicas")
            finally:
                launched.close()
        return found

    @staticmethod
    async def _is_exiting(served: Served, fault: Fault) -> bool:
        if not fault.may_survive:
            return bool(fault.ends)
        return served.process.poll() is not None or (await served.get("/health"))[0] != 200

    async def _check_exit(self, served: Served, fault: Fault) -> list[str]:
        """Wait until the server exits, and return what is wrong with its exit and leftovers."""
        found = []
        if (code := await served.wait()) not in fault.ends:
            found.append(f"the server exited with code {code}")
        found += [f"left behind: {leftover}" for leftover in await served.leftovers()]
        served.close()
        self._served = None
        return found


def _options(this: Round) -> tuple[str, ...]:
    return *this.world.options, "--recipe", this.recipe


async def _play(served: Served, this: Round, fault: Fault) -> Play:
    play, clients = Play(), Clients(served.url)
    play.outcomes = clients.outcomes
    try:
        async with asyncio.TaskGroup() as group:
            for ask in this.asks:
                group.create_task(clients.ask(ask))
            for begin_s, data in this.garbage:
                group.create_task(clients.send_garbage(begin_s, data))
            submitted = group.create_task(batches.submit(served, this.lines)) if this.lines else None
            group.create_task(_inject(served, this, fault, clients))
    finally:
        await clients.close()
    if submitted is not None:
        play.batch = submitted.result()
    return play


async def _inject(served: Served, this: Round, fault: Fault, clients: Clients) -> None:
    end = time.monotonic() + this.late_s
    while clients.events < this.at and time.monotonic() < end:
        await asyncio.sleep(0.005)
    draw = random.Random(f"fault/{this.seed}/{this.number}")
    await fault.act(Scene(served, draw, this.length_s))


@asynccontextmanager
async def driver() -> AsyncIterator[Driver]:
    # An idle server with a large KV pool gives the reference answers.
    with serving("--recipe", "fcfs", pools=("--kv-cache-gib", "0.05", "--swap-space", "0")) as reference:
        found = Driver(References(reference))
        try:
            yield found
        finally:
            found.close()


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine as `asyncio.run` does. SIGTERM cancels it, which stops its servers, and exits."""

    async def until_terminated() -> _T:
        task = asyncio.current_task()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(until_terminated())
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


async def run_rounds(rounds: Iterable[Round], after: Callable[[Round, Driver], object] | None = None) -> list[str]:
    """Run rounds until one of them fails, and return its failures. Report each round, and call `after` it."""
    async with driver() as found:
        for this in rounds:
            begin = time.monotonic()
            failures = await found.run(this)
            outcome = f"{len(failures)} FAILURES" if failures else "ok"
            print(f"{this}: {outcome}, {time.monotonic() - begin:.1f} s", flush=True)
            if failures:
                return [*failures, f"to run it again: {this.replay}", found.log_tail()]
            if after is not None:
                after(this, found)
        print(", ".join(f"{name} {count}" for name, count in sorted(found.seen.items())))
        return await found.stop()
