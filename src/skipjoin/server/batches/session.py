from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from skipjoin.server.batches.database import Database
from skipjoin.server.batches.records import BatchStatus, LineState
from skipjoin.server.batches.tables import batches, lines, servers

# Time for which a server holds its lines and batches without a renewal.
LEASE_S = 30.0


class SteadyClock:
    """Unix clock that follows the system clock forward but never back."""

    def __init__(self, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._offset = clock() - monotonic()

    def now(self) -> float:
        self.observe(self._clock())
        return self._offset + self._monotonic()

    def observe(self, seen: float) -> None:
        self._offset = max(self._offset, seen - self._monotonic())


class Session:
    def __init__(self, database: Database, clock: SteadyClock) -> None:
        self.db = database
        self.clock = clock
        self.server = uuid.uuid4().hex

    def now(self) -> int:
        return int(self.clock.now())

    async def alone(self, connection: AsyncConnection, owner: str) -> None:
        """Lock the owner's quota until the end of the transaction."""
        if not self.db.is_sqlite:  # SQLite has only one writer
            await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(owner, 0))))

    async def held(self, connection: AsyncConnection, batch_id: str, *statuses: BatchStatus) -> RowMapping | None:
        query = sa.select(batches).where(
            batches.c.id == batch_id, batches.c.server == self.server, batches.c.status.in_(statuses)
        )
        return (await connection.execute(query.with_for_update())).mappings().one_or_none()

    async def reclaim(self, connection: AsyncConnection) -> None:
        alive = sa.select(servers.c.id)
        free = {"server": None, "state": LineState.READY}
        await connection.execute(
            sa.update(lines).where(lines.c.server.is_not(None), lines.c.server.not_in(alive)).values(free)
        )
        await connection.execute(
            sa.update(batches).where(batches.c.server.is_not(None), batches.c.server.not_in(alive)).values(server=None)
        )
