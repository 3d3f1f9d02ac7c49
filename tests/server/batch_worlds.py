"""Batch stores for tests, on SQLite and PostgreSQL, with a settable clock and simulated server deaths."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa

from skipjoin.server.batches.records import BatchRow, LinePlace, new_batch_id
from skipjoin.server.batches.store import Store
from skipjoin.server.batches.tables import servers

OWNER = "a" * 64


@dataclass
class Clock:
    """Settable clock in Unix seconds, which starts later than the clock of any database."""

    seconds: float = 4e9

    def __call__(self) -> float:
        return self.seconds


@dataclass
class StoreLocation:
    """Location in which stores are opened."""

    folder: Path
    url: str | None
    clock: Clock = field(default_factory=Clock)

    async def open(self) -> Store:
        return await Store.open(self.url, self.folder, clock=self.clock)

    @asynccontextmanager
    async def opened(self, servers: int = 1) -> AsyncIterator[list[Store]]:
        """Open the stores of several servers, or one on SQLite.

        A caller that closes or kills a store replaces it in the list.
        """
        stores = [await self.open() for _ in range(servers if self.url else 1)]
        try:
            yield stores
        finally:
            for store in stores:
                await store.close()

    async def kill(self, store: Store) -> None:
        """Close a store without cleanup and expire its lease, as if its server had crashed."""
        if self.url:
            async with store._db.writing() as connection:
                await connection.execute(sa.update(servers).where(servers.c.id == store.server).values(lease_until=0.0))
        await store._db.close()
        store._lock.close()


class LoopWatch:
    """Measures the longest time for which this thread's event loop was blocked.

    It measures CPU time, so load on the machine does not count. Existing objects are frozen, as in a server, so the
    garbage collector does not scan them.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def __aenter__(self) -> LoopWatch:
        gc.collect()
        gc.freeze()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            begin = time.thread_time()
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, time.thread_time() - begin)


def places(numbers: Sequence[int]) -> list[LinePlace]:
    return [LinePlace(number, f"id-{number}", 100 * number, 99) for number in numbers]


async def add_batch(
    store: Store, *, owner: str = OWNER, lines: int = 3, window_s: int = 3600, **fields: object
) -> BatchRow:
    row = await store.batches.add(new_batch(store, owner=owner, window_s=window_s, **fields))
    assert await store.batches.take_unvalidated() == row
    assert await store.batches.add_lines(row.id, places(range(1, lines + 1)))
    assert await store.batches.begin(row.id, lines)
    return row


def new_batch(store: Store, *, owner: str = OWNER, window_s: int = 3600, **fields: object) -> BatchRow:
    now = store.now()
    return BatchRow(
        id=new_batch_id(),
        owner=owner,
        endpoint="/v1/completions",
        completion_window=f"{window_s}s",
        input_file_id="file-1",
        created_at=now,
        expires_at=now + window_s,
        **fields,
    )
