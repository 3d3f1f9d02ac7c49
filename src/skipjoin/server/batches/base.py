"""What the parts of the store share: the database, the clock, and the name of this server."""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from skipjoin.server.batches.clock import SteadyClock
from skipjoin.server.batches.database import Database
from skipjoin.server.batches.records import BatchStatus, LineState
from skipjoin.server.batches.tables import batches, lines, servers

# Seconds for which a server holds its lines and batches without another sign of life.
LEASE_S = 30.0


class Base:
    """server: a name that no other server has, nor this one after its next start."""

    def __init__(self, database: Database, clock: SteadyClock) -> None:
        self._db = database
        self._clock = clock
        self.server = uuid.uuid4().hex

    def now(self) -> int:
        """Unix seconds. They never go back, whatever the clock does."""
        return int(self._clock.now())

    async def _alone(self, connection: AsyncConnection, owner: str) -> None:
        """Until the end of the transaction no other one adds to what the owner has."""
        if not self._db.is_sqlite:  # where there is one writer in any case
            await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(owner, 0))))

    async def _held(self, connection: AsyncConnection, batch_id: str, *statuses: BatchStatus) -> RowMapping | None:
        """A batch that this server holds in one of these states, locked until the end of the transaction."""
        query = sa.select(batches).where(
            batches.c.id == batch_id, batches.c.server == self.server, batches.c.status.in_(statuses)
        )
        return (await connection.execute(query.with_for_update())).mappings().one_or_none()

    async def _reclaim(self, connection: AsyncConnection) -> None:
        """Free what servers hold that are not in the table."""
        alive = sa.select(servers.c.id)
        free = {"server": None, "state": LineState.READY}
        await connection.execute(
            sa.update(lines).where(lines.c.server.is_not(None), lines.c.server.not_in(alive)).values(free)
        )
        await connection.execute(
            sa.update(batches).where(batches.c.server.is_not(None), batches.c.server.not_in(alive)).values(server=None)
        )
