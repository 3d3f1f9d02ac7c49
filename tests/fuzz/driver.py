from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
import psutil

from chaos import invariants
from chaos.catalog import SIZE, entry
from chaos.clients import Clients
from chaos.plan import Ask
from chaos.served import Served, serving
from chaos.soak import Memory, growth, resident_bytes
from fuzz.case import CANARY, CHAT, KEYS, OPERATOR
from fuzz.plan import Round
from fuzz.stories import delete_files, story
from fuzz.talk import HANG_S, play
from support.pace import slowness

# Maximum number of concurrent connections.
_CONCURRENCY = 24
# Maximum growth of a process in a round, in which bodies of 4 MiB are parsed concurrently.
PEAK_MIB = 120.0
# Maximum growth of an idle process over all rounds except the first ones, by the slope.
LEAK_MIB = 48.0
_MIN_POINTS = 6
_SAMPLE_S = 0.05
# Seconds between two requests of the canary.
_PAUSE_S = 0.1
_MIB = 1 << 20
# Number of characters of the log to show around an error, enough for a traceback.
_SHOWN = 6000
_ALARMS = re.compile(r"Traceback|\bERROR\b|\bCRITICAL\b|Exception in|never retrieved|never awaited")
# An entry of the catalog with a long greedy answer.
_CANARY = next(number for number in range(SIZE) if entry(number).path == CHAT and entry(number).max_tokens > 100)


@dataclass
class Watch:
    """Measurements of a server's processes during a round.

    Attributes:
        peak: Maximum growth in MiB by process.
        stall_s: Longest stall of the API process's event loop: the response time or the CPU time used, whichever is
            less, divided by the slowness of the machine.
    """

    peak: dict[str, float] = field(default_factory=dict)
    stall_s: float = 0.0


class Fuzzer:
    def __init__(self, served: Served) -> None:
        self.served = served
        address = urlsplit(served.url)
        self._host, self._port = str(address.hostname), int(address.port or 0)
        self._processes = {"api": served.api, "engine": served.engines()[0]}
        self._notes: dict[str, list[Memory]] = {name: [] for name in self._processes}
        self._begin = time.monotonic()
        self._read_characters = 0  # of the log
        self._expected = ""
        self.cases = self.canary_answers = 0
        self.stall_s = 0.0
        self._peak: dict[str, float] = {}

    def __str__(self) -> str:
        peaks = ", ".join(f"{name} +{peak:.0f} MiB at most" for name, peak in self._peak.items())
        stall = f"longest stall {1000 * self.stall_s:.0f} ms"
        return f"{self.cases} cases, {self.canary_answers} answers of the canary, {stall}, {peaks}"

    async def run(self, this: Round) -> list[str]:
        if not self._expected:
            self._expected = await self._canary_text()
        before, alone = await self.served.metrics(), self._anonymous()
        watch, found = Watch(), []
        done = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            watchers = [group.create_task(self._watch_memory(watch, alone)), group.create_task(self._watch_loop(watch))]
            canary = group.create_task(self._canary(done))
            found += await self._play_all(this)
            done.set()
            found += await canary
            for task in watchers:
                task.cancel()
        self.stall_s = max(self.stall_s, watch.stall_s)
        self._peak |= {name: max(peak, self._peak.get(name, 0.0)) for name, peak in watch.peak.items()}
        found += [f"{text}: {this.replay()}" for text in await self._after(watch, before)]
        return found

    async def _play_all(self, this: Round) -> list[str]:
        gate = asyncio.Semaphore(_CONCURRENCY)

        async def run_one(index: int, subject: object, work: Callable[[], Awaitable[list[str]]]) -> list[str]:
            async with gate:
                try:
                    found = await work()
                except (OSError, aiohttp.ClientError, TimeoutError, ValueError) as error:
                    found = [f"{type(error).__name__}: {error}"]
            return [f"{failure}\n    in {subject}\n    to run it again: {this.replay(index)}" for failure in found]

        cases, stories = this.cases(), this.stories()
        self.cases += len(cases) + len(stories)
        found = await asyncio.gather(
            *(run_one(index, "a story", lambda draw=draw: story(self.served.url, draw)) for index, draw in stories),
            *(run_one(index, case, lambda case=case: play(case, self._host, self._port)) for index, case in cases),
        )
        return list(itertools.chain.from_iterable(found))

    # -- after a round --------------------------------------------------------------------------------------------

    async def _after(self, watch: Watch, before: dict[str, float]) -> list[str]:
        if (code := self.served.process.poll()) is not None:
            return [f"the server exited with code {code}:\n{self.served.log_tail()}"]
        if self.served.engines() != [self._processes["engine"]]:
            return [f"the engine was replaced: {self.served.engines()}"]
        found = await delete_files(self.served.url)
        found += await invariants.idle(self.served)
        found += [f"file {path.name} remains" for path in (self.served.place.batches / "files").iterdir()]
        if leaked := invariants.grown(before, await self.served.metrics(), "kv_blocks_recovered_total"):
            found.append(f"{leaked:g} KV blocks leaked")
        for name, peak in watch.peak.items():
            if peak > PEAK_MIB:
                found.append(f"memory of process {name} grew by {peak:.0f} MiB in the round, at most {PEAK_MIB:g}")
        return found + self._leaks() + self._alarms()

    def _anonymous(self) -> dict[str, float]:
        """Return the resident memory of each process in MiB, without file-backed pages."""
        found = {}
        for name, process in self._processes.items():
            with suppress(psutil.Error):
                resident, files = resident_bytes(process)
                found[name] = (resident - files) / _MIB
        return found

    def _leaks(self) -> list[str]:
        """Record the memory of the idle processes, and describe those that grow."""
        found = []
        for name, held in self._anonymous().items():
            some = self._notes[name]
            some.append(Memory(time.monotonic() - self._begin, self.cases, held, held))
            if len(some) >= _MIN_POINTS and (grown := growth(some)[0]) > LEAK_MIB:
                held_mib = [round(memory.anonymous) for memory in some]
                found.append(f"memory of idle process {name} grew by {grown:.0f} MiB: {held_mib}")
        return found

    def _alarms(self) -> list[str]:
        """Return the first error in the log since the last round."""
        text = (self.served.place.root / "log").read_text(errors="replace")
        new, self._read_characters = text[self._read_characters :], len(text)
        alarm = alarm_of(new)
        return [] if alarm is None else [f"the log has an error:\n{alarm}"]

    # -- alongside ------------------------------------------------------------------------------------------------

    async def _watch_memory(self, watch: Watch, before: dict[str, float]) -> None:
        while True:
            for name, held in self._anonymous().items():
                watch.peak[name] = max(watch.peak.get(name, 0.0), held - before.get(name, held))
            await asyncio.sleep(_SAMPLE_S)

    async def _watch_loop(self, watch: Watch) -> None:
        """Poll /live and record the longest stall of the event loop."""
        slow = await asyncio.to_thread(slowness)
        async with aiohttp.ClientSession() as session:
            while True:
                begin, used = time.monotonic(), self._computed()
                with suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with session.get(f"{self.served.url}/live") as answer:
                        await answer.read()
                watch.stall_s = max(watch.stall_s, min(time.monotonic() - begin, self._computed() - used) / slow)
                await asyncio.sleep(_SAMPLE_S)

    def _computed(self) -> float:
        """Return the CPU time of the API process in seconds."""
        with suppress(psutil.Error):
            times = self.served.api.cpu_times()
            return times.user + times.system
        return 0.0

    async def _canary(self, done: asyncio.Event) -> list[str]:
        """Request the same text until the round is done, and return failures."""
        while True:
            begin = time.monotonic()
            try:
                async with asyncio.timeout(HANG_S):
                    text = await self._canary_text()
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                return [f"the canary failed after {time.monotonic() - begin:.1f} s: {type(error).__name__}: {error}"]
            if text != self._expected:
                return [f"the canary's text is {text!r} instead of {self._expected!r}"]
            self.canary_answers += 1
            if done.is_set():
                return []
            await asyncio.sleep(_PAUSE_S)

    async def _canary_text(self) -> str:
        """Return the canary's text."""
        ask = Ask(_CANARY, {"stream": True, "service_tier": "priority"}, "read", 0, 0.0)
        clients = Clients(self.served.url, {"Authorization": f"Bearer {CANARY}"})
        try:
            outcome = await clients.ask(ask)
        finally:
            await clients.close()
        if not outcome.is_complete or outcome.wrong:
            raise ValueError(str(outcome))
        return repr(outcome.choices)


def alarm_of(log: str) -> str | None:
    found = _ALARMS.search(log)
    return None if found is None else log[max(0, found.start() - _SHOWN) : found.end() + _SHOWN]


async def fuzz(rounds: Iterable[Round]) -> list[str]:
    keys = [*(key for key in KEYS if key != OPERATOR), "[operator=yes]", OPERATOR]
    with serving(keys="\n".join(keys), operator=OPERATOR) as served:
        fuzzer = Fuzzer(served)
        for this in rounds:
            begin = time.monotonic()
            found = await fuzzer.run(this)
            end = f"{len(found)} FAILURES" if found else "ok"
            print(f"round {this.number}: {end}, {time.monotonic() - begin:.1f} s; so far {fuzzer}", flush=True)
            if found:
                return found
        code = await served.stop()
        leftovers = [f"left behind: {leftover}" for leftover in await served.leftovers()]
        if code == 0:
            return leftovers
        return [f"after SIGTERM the server exited with code {code}", *leftovers, served.log_tail()]
