from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from skipjoin.server.batches.lines import over_quota
from skipjoin.server.batches.records import Line, LineResult, LineState, StoreError
from skipjoin.server.batches.store import Store
from skipjoin.server.metrics import Metrics

# Delay of writes. A shorter delay means more transactions, a longer one more lines to generate again after a crash.
GROUP_S = 0.1
# Maximum lines of one transaction, because routes wait for SQLite's only writer.
_MAX_LINES = 256
_FIRST_RETRY_S, _LAST_RETRY_S = 0.25, 5.0
_log = logging.getLogger(__name__)


class ResultWriter:
    """Group commit of finished and requeued lines, which are retried while the store fails.

    A response over the owner's `max_bytes` becomes an error.
    """

    def __init__(self, store: Store, metrics: Metrics, *, max_bytes: int) -> None:
        self._store = store
        self._metrics = metrics
        self._max_bytes = max_bytes
        self.on_written: Callable[[], None] = lambda: None
        self._results: list[LineResult] = []
        self._returned: list[Line] = []
        self._there = asyncio.Event()
        self._writing = asyncio.Lock()
        self._is_closing = False
        self.is_failing = False

    def finish(self, result: LineResult) -> None:
        self._results.append(result)
        self._there.set()

    def put_back(self, line: Line) -> None:
        self._returned.append(line)
        self._there.set()

    def close(self) -> None:
        self._is_closing = True
        self._there.set()

    async def run(self) -> None:
        """Write lines until `close`. Call `flush` afterwards."""
        retry_s = _FIRST_RETRY_S
        while not self._is_closing:
            await self._there.wait()
            self._there.clear()
            await asyncio.sleep(0 if self._is_closing else GROUP_S)
            try:
                await self.flush()
                retry_s = _FIRST_RETRY_S
            except Exception:  # logged by `flush`, and nothing may end this loop
                self._there.set()
                await asyncio.sleep(0 if self._is_closing else retry_s)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)

    async def flush(self) -> None:
        """If this raises, unwritten lines stay queued."""
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
        if is_any:  # otherwise the finalizer, which flushes too, would keep waking itself while it fails
            self.on_written()

    async def _within_quotas(self, results: list[LineResult]) -> list[LineResult]:
        used = {
            owner: (await self._store.files.usage_of(owner)).bytes
            for owner in {result.line.owner for result in results}
        }
        fitting = []
        for result in results:
            owner, kept = result.line.owner, result
            if result.state is LineState.DONE and used[owner] + result.bytes > self._max_bytes:
                error = over_quota(result.line, self._max_bytes)
                kept = replace(result, state=error.state, body=error.body)  # keep the usage
            fitting.append(kept)
            used[owner] += kept.bytes
        return fitting

    async def _write_some(self) -> None:
        results, returned = self._results[:_MAX_LINES], self._returned[:_MAX_LINES]
        if results:
            fitting = await self._within_quotas(results)
            await self._store.lines.finish(fitting)
            del self._results[: len(results)]
            for result in fitting:
                self._metrics.count("batch_lines_ended_total", result.state)
        if returned:
            await self._store.lines.put_back(returned)
            del self._returned[: len(returned)]
