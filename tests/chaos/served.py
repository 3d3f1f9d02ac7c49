from __future__ import annotations

import asyncio
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
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
    "--shutdown-timeout",
    "20",
    "--priority-tier",
    "all",
)
_COMMAND = (sys.executable, "-c", SERVE, "serve", "tally", *_OPTIONS)
# Seconds until a server is ready, has exited, has left no processes and files, and is idle.
START_S, END_S, GONE_S, IDLE_S = 90.0, 30.0, 15.0, 20.0
_DISK = "8m"

Metrics = dict[str, float]


class Place:
    """Folders shared by the servers of one run: batches, which the next server resumes, and temporary files."""

    def __init__(self, world: World) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="skipjoin-chaos-"))
        self.batches, self.temporary = self.root / "batches", _short_folder()
        self.batches.mkdir()
        self.disk = SmallDisk(self.batches, _DISK) if world.small_disk else None

    @property
    def enter(self) -> list[str]:
        return [] if self.disk is None else self.disk.enter

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()
        shutil.rmtree(self.root)
        shutil.rmtree(self.temporary)


def _short_folder() -> Path:
    """Create a folder with a short name, because Ray's socket paths in it are limited to 107 characters."""
    while True:
        with suppress(FileExistsError):
            folder = Path(tempfile.gettempdir(), secrets.token_urlsafe(2))
            folder.mkdir(mode=0o700)
            return folder


def lacks_mounts() -> str | None:
    """Return why small disks cannot be mounted, or None if they can."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            SmallDisk(Path(folder), _DISK).close()
        except OSError as error:
            return str(error)
    return None


class Launched:
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

    def log_tail(self) -> str:
        text = (self.place.root / "log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-40:])

    # -- processes ------------------------------------------------------------------------------------------------

    def engines(self) -> list[psutil.Process]:
        return self._named(lambda process: "engine_process" in " ".join(process.cmdline()))

    def ranks(self) -> list[psutil.Process]:
        return self._named(lambda process: "skipjoin.exec.ranks.rank_program" in process.cmdline())

    def replicas(self) -> list[psutil.Process]:
        """Return the replica actors, each the parent of an engine."""
        return [parent for engine in self.engines() if (parent := engine.parent()) is not None]

    def _named(self, is_one: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
        found = []
        for process in self.mark.processes():
            with suppress(psutil.Error):
                if is_one(process):
                    found.append((process.create_time(), process.pid, process))
        return [process for *_, process in sorted(found)]

    # -- exit -----------------------------------------------------------------------------------------------------

    async def wait(self, seconds: float = END_S) -> int:
        return await asyncio.to_thread(self.process.wait, seconds)

    async def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return await self.wait()

    def files(self) -> set[str]:
        return {path.name for path in self.place.temporary.iterdir()}

    async def leftovers(self, allowed: Callable[[str], bool] = lambda name: False) -> list[str]:
        """Return the processes and temporary files that remain after the server has exited."""
        end = time.monotonic() + GONE_S
        while (found := self._leftovers(allowed)) and time.monotonic() < end:
            await asyncio.sleep(0.1)
        return found

    def _leftovers(self, allowed: Callable[[str], bool]) -> list[str]:
        found = []
        for process in self.mark.processes():
            with suppress(psutil.Error):
                found.append(f"process {process.pid}: {' '.join(process.cmdline())[:100]}")
        return found + [f"file {name}" for name in sorted(self.files()) if not allowed(name)]

    def close(self) -> None:
        for process in [self.process, *self.mark.processes()]:
            with suppress(psutil.Error, OSError):
                process.kill()
        self.process.wait()
        self.log.close()
        self.process.stdout.close()


class Served(Launched):
    def __init__(
        self, place: Place, *options: str, pools: tuple[str, ...] = _POOLS, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(place, *options, pools=pools)
        self._headers = headers
        self.url = self._wait_ready()
        self.idle_usage: Mapping[str, int] | None = None

    def _wait_ready(self) -> str:
        for line in self.process.stdout:
            if line.startswith("Ready"):
                return line.split(" at ")[1].split()[0]
        raise AssertionError(f"the server did not start:\n{self.log_tail()}")

    async def get(self, path: str) -> tuple[int, Any]:
        """Return status and body (parsed JSON or text) of a GET request; the status is 0 without an answer."""
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
        status, text = await self.get("/metrics")
        assert status == 200, f"/metrics answers {status}"
        return {
            sample.name.removeprefix("skipjoin:")
            + "".join(f"/{value}" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }

    def usage(self) -> dict[str, int]:
        """Return the numbers of processes and of open descriptors of the API process and the engines.

        Each of these has a program that checks grammars, which counts before the first grammar starts it, too.
        """
        processes, engines = self.mark.processes(), self.engines()
        checkers = sum(map(_checks_grammars, processes))
        count = len(processes) - checkers + max(checkers, 1 + len(engines))
        found = {"processes": count, "api descriptors": self.api.num_fds()}
        for number, engine in enumerate(engines):
            found[f"engine {number} descriptors"] = engine.num_fds()
        return found


def _checks_grammars(process: psutil.Process) -> bool:
    try:
        return "skipjoin.model.grammar_program" in process.cmdline()
    except psutil.Error:  # It has exited.
        return False


@contextmanager
def serving(*options: str, keys: str = "", operator: str = "", pools: tuple[str, ...] = _POOLS) -> Iterator[Served]:
    """Run a server of its own, with the text of a key file and the operator's key if it needs keys."""
    with closing(Place(World("alone"))) as place:
        if keys:
            file = place.root / "keys"
            file.touch(0o600)
            file.write_text(keys)
            options = (*options, "--api-key-file", str(file))
        headers = {"Authorization": f"Bearer {operator}"} if operator else None
        with closing(Served(place, *options, pools=pools, headers=headers)) as served:
            yield served
