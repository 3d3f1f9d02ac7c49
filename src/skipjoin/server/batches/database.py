from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import URL, RowMapping, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from skipjoin.server.batches.disk import as_store_error, is_full, no_space
from skipjoin.server.batches.records import BatchStatus, LineState, NoSpace, StoreDamaged, StoreError, StoreUnavailable
from skipjoin.server.batches.tables import batches, lines, metadata, servers
from skipjoin.version import needs

DATABASE_FILE = "batches.sqlite3"
MIGRATIONS = Path(__file__).parent / "migrations"
# Timeouts of connecting to PostgreSQL and of a statement. The largest statement touches the 50,000 lines of a batch.
_CONNECT_S, _STATEMENT_S = 5, 60
# PostgreSQL aborts a transaction that is idle for this long, so that a frozen server holds no locks.
_IDLE_MS = 10_000
# Timeout for another process that uses the file, such as a backup.
_BUSY_MS = 5_000
# Arbitrary key of the lock with which one server at a time migrates.
_MIGRATION_LOCK = 5_217_044
_CONFLICTS = {"40P01", "40001"}  # SQLSTATE of a deadlock and of a serialization failure
_FULL = {"53100"}
# SQLite's codes for failed system calls, also on a full disk, and for a damaged or foreign file.
_FAILED_CALLS = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_ATTEMPTS = 5

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Conflict(StoreUnavailable):
    pass


def repeated(method: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    @wraps(method)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(_ATTEMPTS - 1):
            try:
                return await method(*args, **kwargs)
            except Conflict:
                continue
        return await method(*args, **kwargs)

    return run


class Database:
    """Database connections of one server. `path` is SQLite's file."""

    def __init__(self, engine: AsyncEngine, path: Path | None) -> None:
        self._engine = engine
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._failing: set[str] = set()  # kinds of operations; on a full disk reading still works
        # SQLite allows one writer at a time. Writers of this process wait here, not in threads.
        self._writer = asyncio.Lock()

    @classmethod
    async def open(cls, url: str | None, folder: Path) -> Database:
        try:
            database = cls.on_sqlite(folder / DATABASE_FILE) if url is None else cls.on_postgres(url)
        except OSError as error:
            raise as_store_error(error, folder) from error
        database._failing.add("writing")  # not logged, because the caller reports it, and may try every few seconds
        try:
            await database.migrate()
        except BaseException:
            await database.close()
            raise
        return database

    @classmethod
    def on_sqlite(cls, path: Path) -> Database:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        # `_begin` begins transactions, not the driver.
        url = URL.create("sqlite+aiosqlite", database=str(path))
        engine = create_async_engine(url, connect_args={"isolation_level": None})
        sa.event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        sa.event.listen(engine.sync_engine, "begin", _begin)
        return cls(engine, path)

    @classmethod
    def on_postgres(cls, text: str) -> Database:
        try:
            url = _postgres_url(text)
            engine = create_async_engine(
                url,
                pool_pre_ping=True,
                connect_args={
                    "timeout": _CONNECT_S,
                    "command_timeout": _STATEMENT_S,
                    "server_settings": {"idle_in_transaction_session_timeout": str(_IDLE_MS)},
                },
            )
        except ModuleNotFoundError as error:
            raise StoreError(needs("batch_db", str(error.name), "postgres")) from error
        return cls(engine, None)

    @property
    def is_sqlite(self) -> bool:
        return self._path is not None

    @property
    def clock(self) -> sa.ColumnElement[Any]:
        return sa.literal(0.0) if self.is_sqlite else sa.extract("epoch", sa.func.clock_timestamp())

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        with self._watched("reading"):
            self._check_file()
            async with self._engine.connect() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        with self._watched("writing"):
            self._check_file()
            if not self.is_sqlite:
                async with self._engine.begin() as connection:
                    yield connection
                return
            async with self._writer, self._engine.connect() as connection:
                await connection.execution_options(is_writer=True)
                async with connection.begin():
                    yield connection

    async def migrate(self) -> None:
        from alembic.util import CommandError  # noqa: PLC0415 (servers without batches do without)

        try:
            async with self.writing() as connection:
                if not self.is_sqlite:
                    await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
                await connection.run_sync(_migrate)
        except CommandError as error:
            raise StoreError(
                f"the batches' database is of a newer version of Skipjoin: {error}; install that version, or restore "
                "a copy from before the upgrade (docs/upgrade.md)"
            ) from error
        if self._path is not None:
            self._identity = _identity(self._path)

    async def empty_log(self) -> None:
        with self._watched("emptying the log"):
            async with self._writer, self._engine.connect() as connection:
                driver = (await connection.get_raw_connection()).driver_connection
                assert driver is not None
                # SQLAlchemy would begin a transaction, in which there are no checkpoints.
                await (await driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")).close()

    async def close(self) -> None:
        await self._engine.dispose()

    @contextmanager
    def _watched(self, kind: str) -> Iterator[None]:
        """Log the first of consecutive failures with its cause, which clients do not see."""
        try:
            with _errors(self._path):
                yield
        except Conflict:
            raise
        except (StoreUnavailable, NoSpace) as error:
            if kind not in self._failing:
                _log.warning("%s: %s", error, getattr(error.__cause__, "orig", None) or error.__cause__)
            self._failing.add(kind)
            raise
        self._failing.discard(kind)

    def _check_file(self) -> None:
        if self._identity is not None and self._path is not None and _identity(self._path) != self._identity:
            raise StoreUnavailable(f"the batches' database {self._path.name} is not in its folder any more")


def _migrate(connection: sa.Connection) -> None:
    from alembic import command  # noqa: PLC0415 (as above)
    from alembic.config import Config  # noqa: PLC0415 (as above)

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    if sa.inspect(connection).has_table("alembic_version"):
        command.upgrade(config, "head")
    else:
        metadata.create_all(connection)
        command.stamp(config, "head")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _prepare_sqlite(connection: Any, _: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    # Commits are durable when they return, and readers do not wait for the writer.
    for setting in ("journal_mode=WAL", "synchronous=FULL", f"busy_timeout={_BUSY_MS}"):
        cursor.execute(f"PRAGMA {setting}")
    cursor.close()


def _begin(connection: sa.Connection) -> None:
    is_writer = connection.get_execution_options().get("is_writer")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writer else "BEGIN")


def _postgres_url(text: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise StoreError("batch_db must be like postgresql://user:password@host:5432/database") from None
    if url.drivername not in ("postgresql", "postgres", "postgresql+asyncpg"):
        raise StoreError(f"batch_db must be a URL that begins with postgresql://, got {url.drivername}://")
    if "sslmode" in url.query:  # libpq's name
        mode = url.query["sslmode"]
        url = url.difference_update_query(["sslmode"]).update_query_dict({"ssl": mode})
    return url.set(drivername="postgresql+asyncpg")


@contextmanager
def _errors(path: Path | None) -> Iterator[None]:
    """Convert database errors, except those of invalid statements."""
    try:
        yield
    except (IntegrityError, ProgrammingError):
        raise
    except DBAPIError as error:
        raise (_said_by_postgres(error) if path is None else _said_by_sqlite(error, path)) from error
    except (PoolTimeout, OSError) as error:
        raise StoreUnavailable("the batches' database cannot be reached") from error


def _said_by_postgres(error: DBAPIError) -> StoreError:
    state = getattr(error.orig, "sqlstate", None)
    if state in _FULL:
        return NoSpace("disk full: no space is left for the batches' database")
    if state in _CONFLICTS:
        return Conflict("the batches' database is busy")
    return StoreUnavailable("the batches' database cannot be reached")


def _said_by_sqlite(error: DBAPIError, path: Path) -> StoreError:
    kind = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF  # without the extended code
    if kind == sqlite3.SQLITE_FULL or (kind in _FAILED_CALLS and is_full(path.parent)):
        return no_space(path.parent)
    if kind in _DAMAGED:
        return StoreDamaged(
            f"the batches' database {path} is damaged ({error.orig}): stop the server, and restore the folder "
            f"{path.parent} from a copy, or move it away to begin without files and batches"
        )
    return StoreUnavailable("the batches' database cannot be reached")


# Time for which a server holds its lines and batches without a renewal.
LEASE_S = 30.0


class SteadyClock:
    """Unix clock that is never set back."""

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
        for table, more in ((lines, {"state": LineState.READY}), (batches, {})):
            lost = sa.and_(table.c.server.is_not(None), table.c.server.not_in(alive))
            await connection.execute(sa.update(table).where(lost).values({"server": None, **more}))
