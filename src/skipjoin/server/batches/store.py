"""Durable store of files, batches, lines, results and responses in SQLite or PostgreSQL.

Running lines, and batches in validation or finalization, belong to a row in the table of servers: on PostgreSQL a lease
of `LEASE_S` by the database's clock, on SQLite the folder's lock. A result counts only for the current attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from skipjoin.server.batches.batch_rows import BatchRows
from skipjoin.server.batches.database import LEASE_S, Database, Session, SteadyClock, repeated
from skipjoin.server.batches.disk import FolderLock, Reserve, as_store_error
from skipjoin.server.batches.file_rows import FileRows
from skipjoin.server.batches.line_rows import LineRows
from skipjoin.server.batches.records import NoSpace, StoreError
from skipjoin.server.batches.response_rows import ResponseRows
from skipjoin.server.batches.tables import batches, files, folder, lines, responses, servers
from skipjoin.system.disk import why_not_written

FOLDER_FILE = "folder-id"


class Store:
    """Repositories of one server, and its lease. Each method is one transaction.

    All raise `StoreUnavailable` while the database is unreachable and `NoSpace` while its disk is full.
    """

    def __init__(self, database: Database, clock: SteadyClock, lock: FolderLock, reserve: Reserve) -> None:
        self._session = session = Session(database, clock)
        self._db = database
        self._lock = lock
        self._reserve = reserve
        self.files = FileRows(session, reserve)
        self.batches = BatchRows(session)
        self.lines = LineRows(session)
        self.responses = ResponseRows(session)

    @property
    def server(self) -> str:
        return self._session.server

    def now(self) -> int:
        return self._session.now()

    @classmethod
    async def open(cls, url: str | None, place: Path, *, clock: Callable[[], float] = time.time) -> Store:
        """Open and migrate the database: `url` (postgresql://...), or SQLite in the folder of the files.

        Servers with one `url` can share the folder.

        Raises:
            FolderLocked: If another server holds the folder.
        """
        lock, reserve = FolderLock(place, shared=url is not None), Reserve(place)
        try:
            try:
                store = await cls._opened(url, place, SteadyClock(clock), lock, reserve)
            except NoSpace:
                if not reserve.release():
                    raise
                store = await cls._opened(url, place, SteadyClock(clock), lock, reserve)
        except BaseException:
            lock.close()
            raise
        await store.fill_reserve()
        return store

    @classmethod
    async def _opened(
        cls, url: str | None, place: Path, clock: SteadyClock, lock: FolderLock, reserve: Reserve
    ) -> Store:
        database = await Database.open(url, place)
        store = cls(database, clock, lock, reserve)
        try:
            await store._start(place)
        except BaseException:
            await database.close()
            raise
        return store

    async def fill_reserve(self) -> None:
        if self._db.is_sqlite and not self._reserve.is_whole:
            with contextlib.suppress(StoreError):  # best effort
                await self._db.empty_log()
            await asyncio.to_thread(self._reserve.fill)

    async def _start(self, place: Path) -> None:
        async with self._db.writing() as connection:
            if self._db.is_sqlite:  # the lock excludes other servers
                await connection.execute(sa.delete(servers))
            else:
                await _claim(connection, place)
            for time_of in _TIMES:
                self._session.clock.observe(await connection.scalar(sa.select(sa.func.max(time_of))) or 0)
        await self._sign()
        await self.batches.drop_leftovers()

    async def close(self) -> None:
        try:
            # If the database is unreachable, this server's lease expires.
            with contextlib.suppress(StoreError):
                async with self._db.writing() as connection:
                    await connection.execute(sa.delete(servers).where(servers.c.id == self.server))
                    await self._session.reclaim(connection)
            await self._db.close()
        finally:
            self._lock.close()

    async def renew(self) -> frozenset[tuple[str, int, int]]:
        """Renew this server's lease, and return the keys of lines still held here; stop all others.

        Call it every few seconds.
        """
        if not self._db.is_sqlite:  # on SQLite the lock is the lease
            await self._sign()
        mine = sa.select(lines.c.batch_id, lines.c.number, lines.c.attempt).where(lines.c.server == self.server)
        async with self._db.reading() as connection:
            return frozenset((row.batch_id, row.number, row.attempt) for row in await connection.execute(mine))

    @repeated
    async def _sign(self) -> None:
        """Renew the lease, delete servers whose lease has expired, and free what they hold.

        A lease that ends more than two `LEASE_S` from now is from before the clock was set back.
        """
        async with self._db.writing() as connection:
            now = float(await connection.scalar(sa.select(self._db.clock)) or 0)
            self._session.clock.observe(now)
            until = now + LEASE_S
            own = sa.update(servers).where(servers.c.id == self.server).values(lease_until=until)
            if not (await connection.execute(own)).rowcount:
                await connection.execute(sa.insert(servers), {"id": self.server, "lease_until": until})
            void = sa.or_(servers.c.lease_until <= now, servers.c.lease_until > until + LEASE_S)
            await connection.execute(sa.delete(servers).where(void, servers.c.id != self.server))
            await self._session.reclaim(connection)


_TIMES = (
    files.c.created_at,
    batches.c.created_at,
    batches.c.in_progress_at,
    batches.c.finalizing_at,
    batches.c.completed_at,
    batches.c.expired_at,
    batches.c.cancelling_at,
    responses.c.created_at,
)


async def _claim(connection: AsyncConnection, place: Path) -> None:
    await connection.execute(sa.text("LOCK TABLE folder IN EXCLUSIVE MODE"))
    known = await connection.scalar(sa.select(folder.c.id))
    file = place / FOLDER_FILE
    try:
        found = file.read_text() if file.exists() else None
        if known is None:
            known = found or uuid.uuid4().hex
            await connection.execute(sa.insert(folder), {"id": known})
            file.write_text(known)
        elif found != known:
            raise StoreError(
                f"batch_dir {place} is not the folder of batch_db's files: servers on one database share one folder"
            )
    except OSError as error:
        if isinstance(full := as_store_error(error, place), NoSpace):
            raise full from error
        raise StoreError(f"the batches' folder {place} cannot be used: {why_not_written(error, place)}") from error
