from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from skipjoin.config import ConfigError
from skipjoin.routes import Part
from skipjoin.server.api.app import add_routes
from skipjoin.server.api.service import Service
from skipjoin.server.batches import files
from skipjoin.server.batches.blobs import Blobs
from skipjoin.server.batches.context import NO_SPACE_CODE, BatchContext, install
from skipjoin.server.batches.disk import batch_folder
from skipjoin.server.batches.phases import InputValidator, OutputFinalizer
from skipjoin.server.batches.records import FolderLocked, NoSpace, StoreError, StoreUnavailable
from skipjoin.server.batches.result_writer import ResultWriter
from skipjoin.server.batches.runner import Runner, max_sequences_per_line
from skipjoin.server.batches.store import Store
from skipjoin.server.batches.stored_responses import StoredResponses

# Maximum pause after consecutive failures.
_LONGEST_PAUSE_S = 5.0
_log = logging.getLogger(__name__)
# Intervals of the validation and finalization of batches, the renewal of leases, and the removal of files.
_LOOK_S, _RENEW_S, _SWEEP_S = 1.0, 2.0, 60.0
# An idle server renews its leases only at every n-th interval.
_IDLE_TURNS = 5
# Age from which unknown files are leftovers of a crash, if several servers write to the folder.
_OLD_S = 86400.0
# Interval of attempts to open the store.
_REOPEN_S = 5.0
# Time limit of each of the two steps of a shutdown.
_CLOSE_S = 5.0


class PeriodicTask:
    """Task that logs the first of consecutive failures, and pauses longer after each."""

    def __init__(self, name: str, work: Callable[[], Awaitable[None]], every_s: float) -> None:
        self._name = name
        self._work = work
        self._every_s = every_s
        self._woken = asyncio.Event()
        self._failures = 0

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        while True:
            self._woken.clear()
            await self._try()
            pause_s = max(self._every_s, min(2.0 ** min(self._failures, 9), _LONGEST_PAUSE_S))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), pause_s)

    async def _try(self) -> None:
        try:
            await self._work()
            self._failures = 0
        except StoreError as error:
            if not self._failures:
                _log.warning("batches: %s failed, and is tried again: %s", self._name, error)
            self._failures += 1
        except Exception:
            if not self._failures:
                _log.exception("batches: %s failed, and is tried again", self._name)
            self._failures += 1


class Batches:
    """Files and batches of a server, with at most `most` sequences in the engine."""

    is_enabled = True

    def __init__(self, service: Service, *, most: int) -> None:
        folder = batch_folder(service.config)
        assert folder is not None, "`NoBatches` is for servers without one"
        self.context = BatchContext(service.config)
        if service.config.store_responses:
            service.stored_responses = StoredResponses(self.context)
        self._folder = folder
        self._service = service
        self._most = most
        self._work: _Work | None = None
        self._opening: asyncio.Task[None] | None = None

    @property
    def live_requests(self) -> int:
        return self._most + max_sequences_per_line(self._service.config.max_queued_requests)

    def add_routes(self, app: FastAPI) -> None:
        install(app, self.context)
        add_routes(app, Part.BATCHES)

    async def open(self) -> None:
        """Open the store, or retry in the background if the disk is full or the database unreachable.

        Raises:
            ConfigError: If folder or database cannot be used.
        """
        folder = self._folder
        try:
            await self._open(folder)
        except (StoreError, OSError) as error:
            config = self._service.config
            is_named = config.batch_dir is not None or config.batch_db is not None
            if is_named and not isinstance(error, StoreUnavailable | NoSpace):
                raise ConfigError(f"files and batches cannot be kept: {error}") from error
            self.context.close(*_trouble(error))
            _log.warning("this server has no files and batches for now: %s", error)
            self._opening = asyncio.create_task(self._reopen(folder))

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        work, self._work = self._work, None
        if work is not None:
            self.context.close("the server is shutting down")
            await work.close()

    async def _reopen(self, folder: Path) -> None:
        while self._work is None:
            await asyncio.sleep(_REOPEN_S)
            try:
                await self._open(folder)
            except (StoreError, OSError) as error:
                self.context.close(*_trouble(error))
        _log.info("this server has files and batches now")

    async def _open(self, folder: Path) -> None:
        store = await Store.open(self._service.config.batch_db, folder)
        try:
            blobs = Blobs(folder)
            # On PostgreSQL another server may be writing files.
            shared = self._service.config.batch_db is not None
            await blobs.sweep(await store.files.known(), _OLD_S if shared else 0)
        except BaseException:
            await store.close()
            raise
        self._work = _Work(self._service, store, blobs, self._most)
        self.context.wake = self._work.wake
        self.context.open(store, blobs)


def _trouble(error: Exception) -> tuple[str, ...]:
    """Return message and code for clients. Other errors may contain secrets."""
    if isinstance(error, FolderLocked):
        return ("files and batches cannot be used now: another server has their folder",)
    if isinstance(error, NoSpace | StoreUnavailable):
        text = f"files and batches cannot be used now: {error}"
        return (text, NO_SPACE_CODE) if isinstance(error, NoSpace) else (text,)
    return ("files and batches cannot be used now; the server's log has the details",)


class _Work:
    def __init__(self, service: Service, store: Store, blobs: Blobs, most: int) -> None:
        self._store, self._blobs = store, blobs
        self._results = results = ResultWriter(store, service.metrics, max_bytes=service.config.batch_max_bytes_per_key)
        self._runner = runner = Runner(service, store, blobs, results, most=most)
        finalizer = OutputFinalizer(store, blobs, runner, results, service.metrics)
        finish = PeriodicTask("ending batches", finalizer.finish_due, _LOOK_S)
        results.on_written = lambda: None if runner.live else finish.wake()
        self._periodic_tasks = [
            finish,
            PeriodicTask("validation", InputValidator(service, store, blobs, runner).take_new, _LOOK_S),
            PeriodicTask("renewing leases", Leases(service, store, runner).renew, _RENEW_S),
            PeriodicTask("removing files", partial(files.sweep, store, blobs), _SWEEP_S),
        ]
        loops: list[Coroutine[Any, Any, None]] = [results.run(), runner.run()]
        self._tasks = [asyncio.create_task(loop) for loop in (*loops, *(task.run() for task in self._periodic_tasks))]

    def wake(self) -> None:
        for task in self._periodic_tasks:
            task.wake()

    async def close(self) -> None:
        """If the store does not answer in time, the next start frees the lines."""
        for step in (self._end, self._store.close):
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await step()
            except TimeoutError:
                _log.warning("the store of batches does not answer: lines that ran will run again")
            except StoreError as error:
                _log.warning("the store of batches could not be notified of the end: %s", error)
        for task in self._tasks:
            task.cancel()
        self._blobs.close()

    async def _end(self) -> None:
        for task in self._tasks[2:]:  # the periodic tasks
            task.cancel()
        await self._runner.close()
        self._results.close()
        await asyncio.wait(self._tasks)
        await self._results.flush()


@dataclass(slots=True)
class Leases:
    service: Service
    store: Store
    runner: Runner
    turn: int = 0

    async def renew(self) -> None:
        if self.runner.live or self.turn % _IDLE_TURNS == 0:
            before = set(self.runner.live)
            held = await self.store.renew()
            await self.runner.drop(before - held)
        self.turn += 1
        self.service.metrics.set_each("batch_lines", await self.store.lines.states())
        self.service.metrics.set_each("batches", await self.store.batches.states())
