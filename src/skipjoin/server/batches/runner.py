"""`Runner`: takes lines from the store, runs them as best-effort requests, and tells `Commits` how they ended."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace

from skipjoin.server.api.app import ENDPOINTS
from skipjoin.server.api.errors import ApiError, deadline_exceeded, from_engine
from skipjoin.server.api.limits import Admission
from skipjoin.server.api.protocol import MAX_N, MAX_PROMPTS
from skipjoin.server.api.service import Phase, Service
from skipjoin.server.batches.blobs import Blobs
from skipjoin.server.batches.commits import Commits
from skipjoin.server.batches.lines import LineJob, ended, over_quota, prepare
from skipjoin.server.batches.records import BlobMissing, Line, StoreError
from skipjoin.server.batches.store import Store
from skipjoin.server.engines.errors import EngineDeadError, EngineError, NoReplicaError

LineKey = tuple[str, int, int]  # `Line.key`

# Seconds between two looks for lines where there were none; `wake` shortens them.
_IDLE_S = 1.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 5.0
# Seconds between two lines that begin. Each takes up to a millisecond of the loop, and dozens begin together: a request
# over HTTP takes several turns of the loop until its prompt is at the engine, and would wait for a line in each.
_REST_S = 0.002
# A line that runs as so many engines end is the one that ends them; from fewer on it runs alone, since the lines beside
# it would be held guilty with it.
MOST_LOST, SUSPECT_LOST = 10, 3
# Answers after which a line is tried again.
_RETRIED = (429, 503)
_log = logging.getLogger(__name__)


def most_of_a_line(max_queued_requests: int) -> int:
    """The most sequences of one line: over HTTP a request may not have more either."""
    return min(MAX_N * MAX_PROMPTS, max_queued_requests)


def is_folder_gone(blobs: Blobs, file_id: str) -> bool:
    """Whether a file is not there since the whole folder is not, which may come back."""
    return not blobs.path(file_id).parent.is_dir()


class Runner:
    """Keeps the engine supplied with lines: between three quarters of `most` and `most` sequences wait or run there,
    as long as there are lines.

    Lines have a queue of their own, so that those of requests over HTTP hold as if there were no batches. A line that
    meets a full queue, a server that takes no work or the end of an engine goes back to the store. After `SUSPECT_LOST`
    engines that ended with it it runs alone, and after `MOST_LOST` it gets an error.
    """

    def __init__(self, service: Service, store: Store, blobs: Blobs, commits: Commits, *, most: int) -> None:
        config = service.config
        self._service, self._store, self._blobs, self._commits = service, store, blobs, commits
        self._most = most
        self._most_tokens = config.max_queued_tokens
        # A line is begun below the limits; with this much above them it always fits.
        self._queue = Admission(
            most + most_of_a_line(config.max_queued_requests), 2 * config.max_queued_tokens, service.metrics
        )
        self._endpoints = {kind.path: kind(service) for kind in ENDPOINTS}
        self._held: deque[Line] = deque()  # taken and not begun
        self._live: dict[LineKey, Line] = {}  # taken: those that are held, prepared and run
        self._tasks: dict[LineKey, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._is_closing = False
        self._look_at = self._resume_at = 0.0  # seconds of the loop: when to ask for lines, when to begin some
        self._retry_s = _FIRST_RETRY_S

    @property
    def live(self) -> Collection[LineKey]:
        """The lines that this server has taken and that have not ended."""
        return self._live.keys()

    def wake(self) -> None:
        """There may be lines."""
        self._look_at = 0.0
        self._changed.set()

    async def run(self) -> None:
        """Run lines until `close`."""
        while not self._is_closing:
            self._changed.clear()
            if self._wants_lines():
                await self._take()
            if not await self._begin_some():
                await self._wait()
        await self._return_all()  # what was taken while it was closed

    async def drop(self, keys: Collection[LineKey]) -> None:
        """Stop lines, and forget them."""
        for key in keys:
            self._live.pop(key, None)
        self._held = deque(line for line in self._held if line.key in self._live)
        tasks = [task for key in keys if (task := self._tasks.get(key)) is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def drop_batch(self, batch_id: str) -> None:
        """Stop the lines of a batch, and forget them."""
        await self.drop([key for key in self._live if key[0] == batch_id])

    async def close(self) -> None:
        """Take no more lines, and have those that have not ended taken again."""
        self._is_closing = True
        self._changed.set()
        await self._return_all()

    async def _return_all(self) -> None:
        lines = list(self._live.values())
        await self.drop([line.key for line in lines])
        for line in lines:
            self._commits.put_back(line)

    # -- taking lines -------------------------------------------------------------------------------------------

    def _is_open(self) -> bool:
        service, client = self._service, self._service.client
        return (
            service.phase is Phase.OPEN
            and client.alive > 0
            and not (client.dead or self._commits.is_failing or self._is_closing)
            and asyncio.get_running_loop().time() >= self._resume_at
        )

    def _wants_lines(self) -> bool:
        room = self._most - self._queue.requests
        is_time = asyncio.get_running_loop().time() >= self._look_at
        # In groups, for a transaction each.
        return not self._held and is_time and room >= max(1, self._most // 4) and self._is_open()

    async def _take(self) -> None:
        wanted = self._most - self._queue.requests
        lines: list[Line] = []
        try:
            lines = await self._store.take_lines(wanted, self._service.name)
        except StoreError as error:
            self._back_off(f"no lines can be taken: {error}")
        except Exception:  # nothing may end the runner
            _log.exception("lines of batches could not be taken")
            self._back_off("no lines can be taken")
        if len(lines) < wanted:
            self._look_at = asyncio.get_running_loop().time() + _IDLE_S
        most_bytes = self._service.config.batch_max_bytes_per_key
        full = await self._owners_at(most_bytes, {line.owner for line in lines})
        for line in lines:
            if line.owner in full:
                self._commits.finish(over_quota(line, most_bytes))
            else:
                self._live[line.key] = line
                self._held.append(line)

    async def _owners_at(self, most_bytes: int, owners: Collection[str]) -> set[str]:
        """Those of the owners that have as many bytes. While the store fails, none: `Commits` looks again."""
        with suppress(StoreError):
            return {owner for owner in owners if (await self._store.usage_of(owner)).bytes >= most_bytes}
        return set()

    async def _begin_some(self) -> bool:
        """Begin lines as long as there is room; whether there was one. Requests over HTTP go on between two lines."""
        begun = False
        queue = self._queue
        while (
            self._held
            and queue.requests < self._most
            and queue.tokens < self._most_tokens
            and self._may_join(self._held[0])
            and self._is_open()
        ):
            await self._begin(self._held.popleft())
            await asyncio.sleep(_REST_S)
            begun = True
        return begun

    def _may_join(self, line: Line) -> bool:
        """Whether a line may run beside those that do."""
        running = [self._live[key] for key in self._tasks if key in self._live]
        return not self._tasks or max(one.lost for one in (line, *running)) < SUSPECT_LOST

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
        # Not in the task itself: one that is cancelled at once never runs.
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
                self._service.metrics.batch_tokens(usage.completion_tokens)
        self._commits.finish(ended(line, 200, body, usage))

    # -- lines that fail ----------------------------------------------------------------------------------------

    def _failed(self, line: Line, error: Exception, *, has_own_deadline: bool = False) -> None:
        """Write an answer that is an error, or have the line taken again. One whose window is over is left to the
        expiry of its batch."""
        answer = _answer(error)
        if answer is None or answer.status in _RETRIED:
            self._put_back(line, str(error))
        elif answer.code != "deadline_exceeded" or has_own_deadline:
            self._commits.finish(ended(line, answer.status, answer.body()))
        elif self._store.now() < line.expires_at:  # the clock was set back since it began
            self._put_back(line, str(error))

    def _lost(self, line: Line, error: EngineError) -> None:
        """The engine has ended with the line in it."""
        if line.lost < MOST_LOST:
            self._failed(line, error)
            return
        why = f"the engine ended {line.lost} times while it ran this request, which is not tried again"
        self._commits.finish(ended(line, 500, ApiError(500, why, code="engine_lost").body()))

    def _put_back(self, line: Line, why: str) -> None:
        self._commits.put_back(line)
        self._service.metrics.batch_requeued()
        self._back_off(f"a line is tried again: {why}")

    def _back_off(self, why: str) -> None:
        """Begin no lines for a while, which gets longer as long as no line succeeds."""
        now = asyncio.get_running_loop().time()
        if now < self._resume_at:
            return
        if self._retry_s == _FIRST_RETRY_S:
            _log.warning("batches wait: %s", why)
        self._resume_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)


def _answer(error: Exception) -> ApiError | None:
    """What HTTP would answer; None: the store has failed."""
    if isinstance(error, StoreError):
        return None
    if isinstance(error, EngineError):
        return from_engine(error)
    if isinstance(error, ApiError):
        return error
    # The text of an unforeseen exception may hold anything: the log gets it, the error file does not.
    _log.error("a line of a batch failed", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")
