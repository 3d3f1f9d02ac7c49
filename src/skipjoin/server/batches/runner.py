from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace

from skipjoin.routes import ROUTES, resolved
from skipjoin.server.api.errors import ApiError, deadline_exceeded, from_engine
from skipjoin.server.api.limits import Admission
from skipjoin.server.api.protocol import MAX_N, MAX_PROMPTS
from skipjoin.server.api.service import Phase, Service
from skipjoin.server.batches.blobs import Blobs
from skipjoin.server.batches.lines import LineJob, ended, over_quota, prepare
from skipjoin.server.batches.records import BlobMissing, Line, StoreError
from skipjoin.server.batches.result_writer import ResultWriter
from skipjoin.server.batches.store import Store
from skipjoin.server.engines.errors import EngineDeadError, EngineError, NoReplicaError

LineKey = tuple[str, int, int]  # `Line.key`

# Interval of polls of the store while it has no lines. `wake` shortens it.
_IDLE_S = 1.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 5.0
# Pause between the starts of two lines. Each start takes up to 1 ms, and dozens start together. Without the pause, an
# HTTP request would wait for a line in each of the several loop iterations until its prompt is at the engine.
_REST_S = 0.002
# Engine crashes after which a line fails, and after which it runs alone, so that other lines are not blamed with it.
MAX_LOST, SUSPECT_LOST = 10, 3
# Statuses after which a line is retried.
_RETRIED = (429, 503)
_log = logging.getLogger(__name__)


def max_sequences_per_line(max_queued_requests: int) -> int:
    return min(MAX_N * MAX_PROMPTS, max_queued_requests)


def is_folder_gone(blobs: Blobs, file_id: str) -> bool:
    return not blobs.path(file_id).parent.is_dir()


class Runner:
    """Executor of lines, which keeps between 3/4 of `most` and `most` sequences at the engine.

    A line returns to the store if the queue is full, the server accepts no requests, or its engine crashes. After
    `SUSPECT_LOST` crashes it runs alone, and after `MAX_LOST` it fails.
    """

    def __init__(self, service: Service, store: Store, blobs: Blobs, results: ResultWriter, *, most: int) -> None:
        config = service.config
        self._service, self._store, self._blobs, self._results = service, store, blobs, results
        self._most = most
        self._max_tokens = config.max_queued_tokens
        # A line starts while the counts are below the limits, and with this margin it always fits.
        self._queue = Admission(
            most + max_sequences_per_line(config.max_queued_requests), 2 * config.max_queued_tokens, service.metrics
        )
        self._endpoints = {
            route.path: resolved(route.handler)(service) for route in ROUTES.values() if route.in_batches
        }
        self._held: deque[Line] = deque()  # taken but not started
        self._live: dict[LineKey, Line] = {}  # taken and not finished
        self._tasks: dict[LineKey, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._is_closing = False
        self._look_at = self._resume_at = 0.0  # loop times of the next poll and of the end of a backoff
        self._retry_s = _FIRST_RETRY_S

    @property
    def live(self) -> Collection[LineKey]:
        return self._live.keys()

    def wake(self) -> None:
        self._look_at = 0.0
        self._changed.set()

    async def run(self) -> None:
        while not self._is_closing:
            self._changed.clear()
            if self._wants_lines():
                await self._take()
            if not await self._begin_some():
                await self._wait()
        await self._return_all()  # lines that were taken during `close`

    async def drop(self, keys: Collection[LineKey]) -> None:
        for key in keys:
            self._live.pop(key, None)
        self._held = deque(line for line in self._held if line.key in self._live)
        tasks = [task for key in keys if (task := self._tasks.get(key)) is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def drop_batch(self, batch_id: str) -> None:
        await self.drop([key for key in self._live if key[0] == batch_id])

    async def close(self) -> None:
        self._is_closing = True
        self._changed.set()
        await self._return_all()

    async def _return_all(self) -> None:
        lines = list(self._live.values())
        await self.drop([line.key for line in lines])
        for line in lines:
            self._results.put_back(line)

    # -- taking lines -------------------------------------------------------------------------------------------

    def _is_open(self) -> bool:
        service, client = self._service, self._service.client
        return (
            service.phase is Phase.OPEN
            and client.alive > 0
            and not (client.dead or self._results.is_failing or self._is_closing)
            and asyncio.get_running_loop().time() >= self._resume_at
        )

    def _wants_lines(self) -> bool:
        room = self._most - self._queue.requests
        is_time = asyncio.get_running_loop().time() >= self._look_at
        # Take lines in groups, because each take is a transaction.
        return not self._held and is_time and room >= max(1, self._most // 4) and self._is_open()

    async def _take(self) -> None:
        wanted = self._most - self._queue.requests
        lines: list[Line] = []
        try:
            lines = await self._store.lines.take(wanted, self._service.names)
        except StoreError as error:
            self._back_off(f"no lines can be taken: {error}")
        except Exception:  # nothing may end the runner
            _log.exception("lines of batches could not be taken")
            self._back_off("no lines can be taken")
        if len(lines) < wanted:
            self._look_at = asyncio.get_running_loop().time() + _IDLE_S
        max_bytes = self._service.config.batch_max_bytes_per_key
        full = await self._owners_at(max_bytes, {line.owner for line in lines})
        for line in lines:
            if line.owner in full:
                self._results.finish(over_quota(line, max_bytes))
            else:
                self._live[line.key] = line
                self._held.append(line)

    async def _owners_at(self, max_bytes: int, owners: Collection[str]) -> set[str]:
        """Return no owners while the store fails, as `ResultWriter` checks again."""
        with suppress(StoreError):
            return {owner for owner in owners if (await self._store.files.usage_of(owner)).bytes >= max_bytes}
        return set()

    async def _begin_some(self) -> bool:
        begun = False
        queue = self._queue
        while (
            self._held
            and queue.requests < self._most
            and queue.tokens < self._max_tokens
            and self._may_join(self._held[0])
            and self._is_open()
        ):
            await self._begin(self._held.popleft())
            await asyncio.sleep(_REST_S)
            begun = True
        return begun

    def _may_join(self, line: Line) -> bool:
        running = [self._live[key] for key in self._tasks if key in self._live]
        return not self._tasks or max(other.lost for other in (line, *running)) < SUSPECT_LOST

    async def _wait(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), _IDLE_S)

    # -- one line -----------------------------------------------------------------------------------------------

    async def _begin(self, line: Line) -> None:
        try:
            ready = await self._prepare(line)
        except Exception as error:
            if self._live.pop(line.key, None) is not None:
                self._failed(line, error)
            return
        if line.key not in self._live:  # dropped meanwhile
            ready.job.close()
            return
        task = self._tasks[line.key] = asyncio.create_task(self._run(line, ready))
        # A callback, because a task that is cancelled immediately never runs its own clean-up.
        task.add_done_callback(lambda task: self._over(line, ready))

    async def _prepare(self, line: Line) -> LineJob:
        left_s = line.expires_at - self._store.now()
        if left_s <= 0:
            raise deadline_exceeded()
        data = await self._read(line)
        return await prepare(self._endpoints[line.endpoint], line, data, left_s, self._queue)

    async def _read(self, line: Line) -> bytes:
        try:
            return await self._blobs.read_at(line.input_file_id, line.offset, line.length)
        except BlobMissing:
            if is_folder_gone(self._blobs, line.input_file_id):
                raise
            raise ApiError(500, "the batch's input file is gone", code="input_file_gone") from None

    async def _run(self, line: Line, ready: LineJob) -> None:
        try:
            await self._generate(line, ready)
            self._retry_s = _FIRST_RETRY_S
        except (EngineDeadError, NoReplicaError) as error:
            if line.key in self._live:
                self._lost(replace(line, lost=line.lost + 1), error)
        except Exception as error:
            if line.key in self._live:
                self._failed(line, error, has_own_deadline=ready.has_own_deadline)

    def _over(self, line: Line, ready: LineJob) -> None:
        ready.job.close()
        self._live.pop(line.key, None)
        self._tasks.pop(line.key, None)
        self._changed.set()

    async def _generate(self, line: Line, ready: LineJob) -> None:
        async with self._endpoints[line.endpoint].run(ready.job) as run:
            try:
                body = await run.whole()
            finally:
                usage = run.usage()
                self._service.metrics.count("batch_generation_tokens_total", n=usage.completion_tokens)
        self._results.finish(ended(line, 200, body, usage))

    # -- lines that fail ----------------------------------------------------------------------------------------

    def _failed(self, line: Line, error: Exception, *, has_own_deadline: bool = False) -> None:
        answer = _answer(error)
        if answer is None or answer.status in _RETRIED:
            self._put_back(line, str(error if answer is None else answer))
        elif answer.code != "deadline_exceeded" or has_own_deadline:
            self._results.finish(ended(line, answer.status, answer.body()))
        elif self._store.now() < line.expires_at:  # the clock was set back since the start
            self._put_back(line, str(error))

    def _lost(self, line: Line, error: EngineError) -> None:
        if line.lost < MAX_LOST:
            self._failed(line, error)
            return
        why = f"the engine ended {line.lost} times while it ran this request, which is not tried again"
        self._results.finish(ended(line, 500, ApiError(500, why, code="engine_lost").body()))

    def _put_back(self, line: Line, why: str) -> None:
        self._results.put_back(line)
        self._service.metrics.count("batch_lines_requeued_total")
        self._back_off(f"a line is tried again: {why}")

    def _back_off(self, why: str) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._resume_at:
            return
        if self._retry_s == _FIRST_RETRY_S:
            _log.warning("batches wait: %s", why)
        self._resume_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)


def _answer(error: Exception) -> ApiError | None:
    if isinstance(error, StoreError):
        return None
    if isinstance(error, EngineError):
        return from_engine(error)
    if isinstance(error, ApiError):
        return error
    # The text of an unexpected exception may contain secrets, so it is only logged.
    _log.error("a line of a batch failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")
