"""`skipjoin serve` of the built-in model with a small KV pool: its processes, its state, and what it leaves."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from chaos.catalog import LONGEST_OUTPUT, LONGEST_PROMPT
from chaos.plan import World
from support.leftovers import Mark
from support.small_disk import SmallDisk

SERVE = "import sys; from skipjoin.cli import app; sys.argv[0] = 'skipjoin'; app()"
# 48 and 31 blocks of 16 tokens: two of the longest requests, or about eight of the others.
_POOLS = ("--kv-cache-gib", "0.003", "--swap-space", "0.002", "--max-model-len", str(LONGEST_PROMPT + LONGEST_OUTPUT))
_OPTIONS = (
    "--port",
    "0",
    "--threads",
    "1",
    "--profile",
    "off",
    "--enable-debug-routes",
    "--shutdown-timeout",
    "20",
    "--priority-tier",
    "all",
)
_COMMAND = (sys.executable, "-c", SERVE, "serve", "tally", *_OPTIONS)
# Seconds: to start, to end after what ends it, until all that belongs to it is gone, until it is idle.
START_S, END_S, GONE_S, IDLE_S = 90.0, 30.0, 15.0, 20.0
_DISK = "8m"

Metrics = dict[str, float]


class Place:
    """Folders of the servers of one run: their batches, which the next server takes over, and what is temporary. With
    a small disk the batches are on `disk`."""

    def __init__(self, world: World) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="skipjoin-chaos-"))
        self.batches, self.temporary = self.root / "batches", _short_folder()
        self.batches.mkdir()
        self.disk = SmallDisk(self.batches, _DISK) if world.small_disk else None

    @property
    def enter(self) -> list[str]:
        """The beginning of a command that sees the disk."""
        return [] if self.disk is None else self.disk.enter

    def close(self) -> None:
        """Remove everything."""
        if self.disk is not None:
            self.disk.close()
        shutil.rmtree(self.root)
        shutil.rmtree(self.temporary)


def _short_folder() -> Path:
    """A new folder with a short name: Ray puts sockets deep into it, whose paths have at most 107 characters."""
    while True:
        with suppress(FileExistsError):
            folder = Path(tempfile.gettempdir(), secrets.token_urlsafe(2))
            folder.mkdir(mode=0o700)
            return folder


def lacks_mounts() -> str | None:
    """Why there can be no small disk here; None if there can."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            SmallDisk(Path(folder), _DISK).close()
        except OSError as error:
            return str(error)
    return None


class Launched:
    """A server that was started, ready or not."""

    def __init__(self, place: Place, *options: str, pools: tuple[str, ...] = _POOLS) -> None:
        self.place = place
        self.mark = Mark()
        environment = {**self.mark.environment, "TMPDIR": str(place.temporary), "OMP_NUM_THREADS": "1"}
        environment["SKIPJOIN_FORECAST_DIR"] = str(place.root / "forecasts")
        self.log = (place.root / "log").open("a+b")
        self.process = subprocess.Popen(
            [*place.enter, *_COMMAND, *pools, "--batch-dir", str(place.batches), *options],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
        )
        self.api = psutil.Process(self.process.pid)

    def told(self) -> str:
        """The end of what it wrote."""
        text = (self.place.root / "log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-40:])

    # -- processes ------------------------------------------------------------------------------------------------

    def engines(self) -> list[psutil.Process]:
        """Engine processes, oldest first."""
        return self._named(lambda process: "engine_process" in " ".join(process.cmdline()))

    def ranks(self) -> list[psutil.Process]:
        """Ranks that Ray has placed."""
        return self._named(lambda process: "RankActor" in process.name())

    def replicas(self) -> list[psutil.Process]:
        """The actors that keep an engine each."""
        return [parent for engine in self.engines() if (parent := engine.parent()) is not None]

    def _named(self, is_one: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
        found = []
        for process in self.mark.processes():
            with suppress(psutil.Error):
                if is_one(process):
                    found.append((process.create_time(), process.pid, process))
        return [process for *_, process in sorted(found)]

    # -- its end --------------------------------------------------------------------------------------------------

    async def ended(self, seconds: float = END_S) -> int:
        """Its exit code, once it has ended."""
        return await asyncio.to_thread(self.process.wait, seconds)

    async def stop(self) -> int:
        """End it in order; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return await self.ended()

    def files(self) -> set[str]:
        """Return the names of the temporary files."""
        return {path.name for path in self.place.temporary.iterdir()}

    async def left(self, allowed: Callable[[str], bool] = lambda name: False) -> list[str]:
        """Return the processes and temporary files that remain after the server has exited.

        Args:
            allowed: Returns whether a file of this name may remain.
        """
        end = time.monotonic() + GONE_S
        while (found := self._left(allowed)) and time.monotonic() < end:
            await asyncio.sleep(0.1)
        return found

    def _left(self, allowed: Callable[[str], bool]) -> list[str]:
        found = []
        for process in self.mark.processes():
            with suppress(psutil.Error):
                found.append(f"process {process.pid}: {' '.join(process.cmdline())[:100]}")
        return found + [f"file {name}" for name in sorted(self.files()) if not allowed(name)]

    def close(self) -> None:
        """End whatever runs of it."""
        for process in [self.process, *self.mark.processes()]:
            with suppress(psutil.Error, OSError):
                process.kill()
        self.process.wait()
        self.log.close()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Served(Launched):
    """A server that runs. headers: of all requests of `get`, such as a key."""

    def __init__(
        self, place: Place, *options: str, pools: tuple[str, ...] = _POOLS, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(place, *options, pools=pools)
        self._headers = headers
        self.url = self._wait_ready()
        self.resting: Mapping[str, int] | None = None  # what it has open when it is idle

    def _wait_ready(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("Ready"):
                return line.split(" at ")[1].split()[0]
        raise AssertionError(f"the server did not start:\n{self.told()}")

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and body of a GET; the body as a text where it is no JSON. Status 0: no answer."""
        timeout = aiohttp.ClientTimeout(total=10)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(self.url + path, headers=self._headers) as answer,
            ):
                is_json = "json" in answer.headers.get("content-type", "")
                return answer.status, await (answer.json() if is_json else answer.text())
        except (aiohttp.ClientError, OSError, TimeoutError):
            return 0, None

    async def metrics(self) -> Metrics:
        """Samples of /metrics, by name and labels."""
        status, text = await self.get("/metrics")
        assert status == 200, f"/metrics answers {status}"
        return {
            sample.name.removeprefix("skipjoin:")
            + "".join(f"/{value}" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }

    def held(self) -> dict[str, int]:
        """What the API process and the engines have open, and how many processes there are."""
        found = {"processes": len(self.mark.processes()), "api descriptors": self.api.num_fds()}
        for number, engine in enumerate(self.engines()):
            found[f"engine {number} descriptors"] = engine.num_fds()
        return found


@contextmanager
def reference_server() -> Iterator[Served]:
    """An idle server with room for everything, whose answers others are compared with."""
    place = Place(World("reference"))
    try:
        served = Served(place, "--recipe", "fcfs", pools=("--kv-cache-gib", "0.05", "--swap-space", "0"))
        try:
            yield served
        finally:
            served.close()
    finally:
        place.close()


def signal_all(processes: list[psutil.Process], number: int) -> None:
    """Send a signal to those that still run."""
    for process in processes:
        with suppress(psutil.Error, OSError):
            os.kill(process.pid, number)
