"""`Commits`: the ends of lines on their way to the store, many in one transaction."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from skipjoin.server.batches.lines import over_quota
from skipjoin.server.batches.records import Line, LineResult, LineState, StoreError
from skipjoin.server.batches.store import Store
from skipjoin.server.metrics import Metrics

# Seconds from the end of a line until it is written: the fewer, the more transactions; the more, the more lines are
# generated again after a crash.
GROUP_S = 0.1
# Lines of one transaction: SQLite has one writer, which routes wait for.
_MOST_LINES = 256
_FIRST_RETRY_S, _LAST_RETRY_S = 0.25, 5.0
_log = logging.getLogger(__name__)


class Commits:
    """Writes the ends of lines, and lines that are to be taken again, within `GROUP_S` seconds.

    While the store fails they are kept, and written once it works again: writing one twice changes nothing.
    on_written: called when some were. most_bytes: of an owner's files. An answer that does not fit is an error that
    says so.
    """

    def __init__(self, store: Store, metrics: Metrics, *, most_bytes: int) -> None:
        self._store = store
        self._metrics = metrics
        self._most_bytes = most_bytes
        self.on_written: Callable[[], None] = lambda: None
        self._results: list[LineResult] = []
        self._returned: list[Line] = []
        self._there = asyncio.Event()
        self._writing = asyncio.Lock()
        self._is_closing = False
        self.is_failing = False

    def finish(self, result: LineResult) -> None:
        """Write the end of a line soon."""
        self._results.append(result)
        self._there.set()

    def put_back(self, line: Line) -> None:
        """Have a line taken again, soon."""
        self._returned.append(line)
        self._there.set()

    def close(self) -> None:
        """Let `run` end."""
        self._is_closing = True
        self._there.set()

    async def run(self) -> None:
        """Write until `close`; after that `flush` writes the rest."""
        retry_s = _FIRST_RETRY_S
        while not self._is_closing:
            await self._there.wait()
            self._there.clear()
            await asyncio.sleep(0 if self._is_closing else GROUP_S)
            try:
                await self.flush()
                retry_s = _FIRST_RETRY_S
            except Exception:  # told by `flush`; nothing may end this loop
                self._there.set()
                await asyncio.sleep(0 if self._is_closing else retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)

    async def flush(self) -> None:
        """Write all that there is now. Raises `StoreError`; what could not be written is kept."""
        async with self._writing:
            is_any = bool(self._results or self._returned)
            try:
                while self._results or self._returned:
                    await self._write_some()
            except Exception as error:
                if not self.is_failing:
                    bug = None if isinstance(error, StoreError) else error
                    _log.warning("ends of batch lines wait to be written: %s", error, exc_info=bug)
                self.is_failing = True
                raise
            if self.is_failing:
                _log.warning("ends of batch lines are written again")
            self.is_failing = False
        if is_any:  # what ends batches flushes, too: it would wake itself again and again while it fails
            self.on_written()

    async def _within_quotas(self, results: list[LineResult]) -> list[LineResult]:
        used = {owner: (await self._store.usage_of(owner)).bytes for owner in {result.line.owner for result in results}}
        fitting = []
        for result in results:
            owner, kept = result.line.owner, result
            if result.state is LineState.DONE and used[owner] + result.bytes > self._most_bytes:
                error = over_quota(result.line, self._most_bytes)
                kept = replace(result, state=error.state, body=error.body)  # its tokens were generated
            fitting.append(kept)
            used[owner] += kept.bytes
        return fitting

    async def _write_some(self) -> None:
        results, returned = self._results[:_MOST_LINES], self._returned[:_MOST_LINES]
        if results:
            fitting = await self._within_quotas(results)
            await self._store.finish(fitting)
            del self._results[: len(results)]
            for result in fitting:
                self._metrics.batch_ended(result.state)
        if returned:
            await self._store.put_back(returned)
            del self._returned[: len(returned)]
