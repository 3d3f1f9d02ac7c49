"""Transactions on SQLite or PostgreSQL, their errors in the store's terms, and the migration of the tables."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from skipjoin.server.batches.disk import as_store_error, is_full, no_space
from skipjoin.server.batches.records import NoSpace, StoreDamaged, StoreError, StoreUnavailable
from skipjoin.version import install_command

if TYPE_CHECKING:
    from alembic.config import Config

DATABASE_FILE = "batches.sqlite3"
MIGRATIONS = Path(__file__).parent / "migrations"
# Seconds until a server that does not answer is given up: to connect, and for a statement. The largest statement
# touches the 50,000 lines of a batch.
_CONNECT_S, _STATEMENT_S = 5, 60
# PostgreSQL ends a transaction that its server does not go on with, so that a frozen server holds no locks.
_IDLE_MS = 10_000
# Waits for another process that reads the file, a backup for one.
_BUSY_MS = 5_000
# Any number, the same in all servers: one of them migrates.
_MIGRATION_LOCK = 5_217_044
_CONFLICTS = {"40P01", "40001"}  # SQLSTATE of a deadlock and of a serialization failure
_FULL = {"53100"}
# SQLite's words for calls of the system that fail, on a full disk too, and for a file that is none of its own.
_FAILED_CALLS = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_ATTEMPTS = 5

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Conflict(StoreUnavailable):
    """Two transactions of servers waited for each other, and this one was ended; it can be repeated."""


def repeated(method: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Run a transaction again that another one was preferred to."""

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
    """One engine. path: of SQLite's file; None: PostgreSQL."""

    def __init__(self, engine: AsyncEngine, path: Path | None) -> None:
        self._engine = engine
        self._path = path
        self._identity: tuple[int, int] | None = None
        self._failing: set[str] = set()  # of reading and writing: on a full disk the one goes on
        # SQLite has one writer at a time: those of this process wait here, not in threads.
        self._writer = asyncio.Lock()

    @classmethod
    async def open(cls, url: str | None, folder: Path) -> Database:
        """Connect and migrate. Raises `StoreError`."""
        try:
            database = cls.on_sqlite(folder / DATABASE_FILE) if url is None else cls.on_postgres(url)
        except OSError as error:
            raise as_store_error(error, folder) from error
        try:
            await database.migrate()
        except BaseException:
            await database.close()
            raise
        return database

    @classmethod
    def on_sqlite(cls, path: Path) -> Database:
        """The file is created where there is none, for this user alone, whatever the folder allows. Raises OSError."""
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        # Transactions are begun by `_begin`, not by the driver.
        url = URL.create("sqlite+aiosqlite", database=str(path))
        engine = create_async_engine(url, connect_args={"isolation_level": None})
        sa.event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        sa.event.listen(engine.sync_engine, "begin", _begin)
        return cls(engine, path)

    @classmethod
    def on_postgres(cls, text: str) -> Database:
        """text: a URL. Raises `StoreError` for one that is none, or without the driver."""
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
            raise StoreError(f"batch_db needs {error.name}: {install_command('postgres')}") from error
        return cls(engine, None)

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a file of this process alone."""
        return self._path is not None

    @property
    def clock(self) -> sa.ColumnElement[Any]:
        """Unix seconds by the database's clock."""
        return sa.literal(0.0) if self.is_sqlite else sa.extract("epoch", sa.func.clock_timestamp())

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that changes nothing."""
        with self._watched("reading"):
            self._check_file()
            async with self._engine.connect() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """A transaction, committed at the end of the block unless it raises."""
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
        """Bring the tables to this version's state. Raises `StoreError` where a newer version wrote them."""
        from alembic.util import CommandError  # noqa: PLC0415 (servers without batches do without)

        try:
            async with self.writing() as connection:
                if not self.is_sqlite:
                    await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
                await connection.run_sync(_upgrade)
        except CommandError as error:
            raise StoreError(f"the batches' database is of a newer version of Skipjoin: {error}") from error
        if self._path is not None:
            self._identity = _identity(self._path)

    async def empty_log(self) -> None:
        """Give the space of SQLite's log back to the disk; what it has is moved to the database. Raises as `writing`
        where that needs space, too."""
        with self._watched("emptying the log"):
            async with self._writer, self._engine.connect() as connection:
                driver = (await connection.get_raw_connection()).driver_connection
                assert driver is not None
                # Outside of a transaction, which SQLAlchemy would begin.
                await (await driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")).close()

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    @contextmanager
    def _watched(self, kind: str) -> Iterator[None]:
        """The first of several failures goes to the log with its cause, which clients are not told."""
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
        """A file that was moved or deleted can still be written, and all of that would be lost."""
        if self._identity is not None and self._path is not None and _identity(self._path) != self._identity:
            raise StoreUnavailable(f"the batches' database {self._path.name} is not in its folder any more")


def _upgrade(connection: sa.Connection) -> None:
    from alembic import command  # noqa: PLC0415 (as above)

    config = alembic_config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def alembic_config() -> Config:
    """Alembic's settings: where the scripts are. The connection is to be added to its attributes."""
    from alembic.config import Config  # noqa: PLC0415 (as above)

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _prepare_sqlite(connection: Any, _: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    # A commit is on the disk when it returns, after a power failure, too; readers do not wait for the writer.
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
    if "sslmode" in url.query:  # as libpq calls it
        mode = url.query["sslmode"]
        url = url.difference_update_query(["sslmode"]).update_query_dict({"ssl": mode})
    return url.set(drivername="postgresql+asyncpg")


@contextmanager
def _errors(path: Path | None) -> Iterator[None]:
    """Raises what a database raises in the store's terms. A statement that is wrong raises as it does."""
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
    kind = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF  # the rest says more of it
    if kind == sqlite3.SQLITE_FULL or (kind in _FAILED_CALLS and is_full(path.parent)):
        return no_space(path.parent)
    if kind in _DAMAGED:
        return StoreDamaged(
            f"the batches' database {path} is damaged ({error.orig}): stop the server, and restore the folder "
            f"{path.parent} from a copy, or move it away to begin without files and batches"
        )
    return StoreUnavailable("the batches' database cannot be reached")
