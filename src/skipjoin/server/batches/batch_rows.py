from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from skipjoin.server.batches.database import Session, repeated
from skipjoin.server.batches.file_rows import ACTIVE, check_usage, page, seq_of, usage_of
from skipjoin.server.batches.records import (
    NO_QUOTA,
    UNLIMITED,
    BatchRow,
    BatchStatus,
    FileRow,
    LineError,
    LinePlace,
    LineState,
    Quota,
    QuotaExceeded,
    closed_line,
    is_id,
)
from skipjoin.server.batches.tables import batches, files, lines, results

# Rows per page of results, which are held in memory, and per deletion, which other transactions wait for.
_PAGE, _DELETION = 100, 2000
# Column with the time of a final state.
_ENDED_AT = {
    BatchStatus.COMPLETED: "completed_at",
    BatchStatus.EXPIRED: "expired_at",
    BatchStatus.CANCELLED: "cancelled_at",
}
_OPEN = (LineState.READY, LineState.RUNNING)
# States in which a batch is validated. A batch that is cancelled before its validation ends has no total yet.
_VALIDATED = (BatchStatus.VALIDATING, BatchStatus.CANCELLING)
_CANCELLED_EARLY = sa.and_(batches.c.status == BatchStatus.CANCELLING, batches.c.total == 0)
_IN_ERROR_FILE = (LineState.FAILED, LineState.EXPIRED, LineState.CANCELLED)


class BatchRows:
    def __init__(self, session: Session) -> None:
        self._session, self._db = session, session.db

    async def add(
        self, row: BatchRow, idempotency_key: str | None = None, *, max_active: int = UNLIMITED, quota: Quota = NO_QUOTA
    ) -> BatchRow:
        """Add a batch, or return the owner's earlier one with this idempotency key."""
        async with self._db.writing() as connection:
            await self._session.alone(connection, row.owner)
            if idempotency_key is not None:
                same = sa.and_(batches.c.owner == row.owner, batches.c.idempotency_key == idempotency_key)
                if earlier := await _one(connection, sa.select(batches).where(same)):
                    return earlier
            active = await _active_of(connection, row.owner)
            if active >= max_active:
                raise QuotaExceeded(f"this key has {active} batches that have not ended, and may have {max_active}")
            # At least a byte of output must fit.
            check_usage((await usage_of(connection, row.owner)).bytes + 1, quota.bytes, "bytes")
            values = asdict(row) | {"idempotency_key": idempotency_key}
            await connection.execute(sa.insert(batches), values)
        return row

    async def get(self, owner: str, batch_id: str) -> BatchRow | None:
        if not is_id(batch_id):
            return None
        async with self._db.reading() as connection:
            return await _one(connection, _of(owner, batch_id))

    async def page(self, owner: str, *, after: str | None = None, limit: int = 20) -> tuple[list[BatchRow], bool]:
        async with self._db.reading() as connection:
            last = await seq_of(connection, batches, owner, after)
            query = page(batches, batches.c.owner == owner, last, limit + 1)
            found = (await connection.execute(query)).mappings().all()
        return [_batch(row) for row in found[:limit]], len(found) > limit

    async def cancel(self, owner: str, batch_id: str) -> BatchRow | None:
        if not is_id(batch_id):
            return None
        stoppable = batches.c.status.in_([BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS])
        changes = {"status": BatchStatus.CANCELLING, "cancelling_at": self._session.now(), "server": None}
        async with self._db.writing() as connection:
            await connection.execute(
                sa.update(batches).where(batches.c.id == batch_id, batches.c.owner == owner, stoppable).values(changes)
            )
            return await _one(connection, _of(owner, batch_id))

    async def states(self) -> dict[str, int]:
        counts = sa.select(batches.c.status, sa.func.count()).group_by(batches.c.status)
        async with self._db.reading() as connection:
            return {BatchStatus(row[0]): row[1] for row in await connection.execute(counts)}

    # -- validation ----------------------------------------------------------------------------------------

    async def take_unvalidated(self, models: Collection[str] = (), *, runs: bool = True) -> BatchRow | None:
        """Hold and return the oldest batch to validate, without lines of an earlier validation.

        Without `runs`, return only cancelled batches, because the error file lists their lines.
        """
        is_new = sa.and_(batches.c.status == BatchStatus.VALIDATING, is_for(models), sa.true() if runs else sa.false())
        waiting = sa.select(batches).where(sa.or_(is_new, _CANCELLED_EARLY), self._is_free())
        query = waiting.order_by(batches.c.seq).limit(1).with_for_update(skip_locked=True)
        async with self._db.writing() as connection:
            found = await _one(connection, query)
            if found is not None:
                mine = sa.update(batches).where(batches.c.id == found.id).values(server=self._session.server)
                await connection.execute(mine)
                await connection.execute(sa.delete(lines).where(lines.c.batch_id == found.id))
            return found

    async def release(self, batch_id: str) -> None:
        held = sa.update(batches).where(batches.c.id == batch_id, batches.c.server == self._session.server)
        async with self._db.writing() as connection:
            await connection.execute(held.values(server=None))

    async def add_lines(self, batch_id: str, places: Sequence[LinePlace]) -> bool:
        async with self._db.writing() as connection:
            if await self._session.held(connection, batch_id, *_VALIDATED) is None:
                return False
            fresh = {"batch_id": batch_id, "state": LineState.READY, "attempt": 0}
            if places:
                await connection.execute(sa.insert(lines), [asdict(place) | fresh for place in places])
        return True

    async def begin(self, batch_id: str, total: int) -> bool:
        """Start a batch. A CANCELLING one becomes due instead."""
        begun = {"status": BatchStatus.IN_PROGRESS, "in_progress_at": self._session.now(), "total": total}
        return await self._end_validation(batch_id, begun, {"total": total})

    async def reject(self, batch_id: str, errors: Sequence[LineError]) -> bool:
        """Move a batch to FAILED, or from CANCELLING to CANCELLED."""
        listed = [asdict(error) for error in errors]
        failed = {"status": BatchStatus.FAILED, "failed_at": self._session.now(), "errors": listed}
        cancelled = {"status": BatchStatus.CANCELLED, "cancelled_at": self._session.now(), "errors": listed}
        is_mine = await self._end_validation(batch_id, failed, cancelled)
        if is_mine:
            await self._drop(batch_id)
        return is_mine

    async def _end_validation(self, batch_id: str, changes: dict[str, object], of_cancelled: dict[str, object]) -> bool:
        async with self._db.writing() as connection:
            batch = await self._session.held(connection, batch_id, *_VALIDATED)
            if batch is None:
                return False
            chosen = of_cancelled if batch["status"] == BatchStatus.CANCELLING else changes
            values = chosen | {"server": None}
            await connection.execute(sa.update(batches).where(batches.c.id == batch_id).values(values))
        return True

    # -- the end -------------------------------------------------------------------------------------------

    async def due(self) -> list[BatchRow]:
        status = batches.c.status
        ended = batches.c.completed + batches.c.failed >= batches.c.total
        over = sa.and_(status == BatchStatus.IN_PROGRESS, sa.or_(ended, batches.c.expires_at <= self._session.now()))
        ending = sa.and_(status.in_([BatchStatus.CANCELLING, BatchStatus.FINALIZING]), sa.not_(_CANCELLED_EARLY))
        query = sa.select(batches).where(self._is_free(), sa.or_(over, ending)).order_by(batches.c.seq)
        async with self._db.reading() as connection:
            return [_batch(row) for row in (await connection.execute(query)).mappings()]

    @repeated
    async def start_finalizing(self, batch_id: str) -> BatchStatus | None:
        """Hold a batch and return its final state; None if it is unfinished or held by another server."""
        ending = (BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)
        free = sa.and_(batches.c.id == batch_id, batches.c.status.in_(ending), self._is_free())
        async with self._db.writing() as connection:
            batch = await _one(connection, sa.select(batches).where(free).with_for_update())
            if batch is None or not batch.total or await _has_lines(connection, batch_id, *_OPEN):
                return None
            changes: dict[str, object] = {"server": self._session.server}
            if batch.status is not BatchStatus.CANCELLING:
                changes |= {
                    "status": BatchStatus.FINALIZING,
                    "finalizing_at": batch.finalizing_at or self._session.now(),
                }
            await connection.execute(sa.update(batches).where(batches.c.id == batch_id).values(changes))
            if batch.status is BatchStatus.CANCELLING:
                return BatchStatus.CANCELLED
            expired = await _has_lines(connection, batch_id, LineState.EXPIRED)
            return BatchStatus.EXPIRED if expired else BatchStatus.COMPLETED

    async def results(self, batch_id: str, *, failed: bool) -> AsyncGenerator[bytes, None]:
        states = _IN_ERROR_FILE if failed else (LineState.DONE,)
        columns = (lines.c.custom_id, lines.c.state, results.c.body)
        same = sa.and_(results.c.batch_id == lines.c.batch_id, results.c.number == lines.c.number)
        ended = (
            sa.select(*columns)
            .select_from(lines.outerjoin(results, same))
            .where(lines.c.batch_id == batch_id, lines.c.state.in_(states))
            .order_by(lines.c.number)
        )
        # Ranges of numbers use the primary key, even if PostgreSQL's statistics of the growing table are outdated.
        for start in range(1, await self._last_number(batch_id) + 1, _PAGE):
            numbers = lines.c.number.between(start, start + _PAGE - 1)
            async with self._db.reading() as connection:
                rows = (await connection.execute(ended.where(numbers))).all()
            for custom_id, state, body in rows:
                yield body if body is not None else closed_line(batch_id, custom_id, LineState(state))

    @repeated
    async def finalize(
        self, batch_id: str, status: BatchStatus, output: FileRow | None, error: FileRow | None
    ) -> BatchRow | None:
        """Add the files, end the batch and delete its lines and results.

        Return None if this server no longer holds the batch: its files must be deleted.
        """
        async with self._db.writing() as connection:
            if await self._session.held(connection, batch_id, BatchStatus.FINALIZING, BatchStatus.CANCELLING) is None:
                return None
            if written := [asdict(file) for file in (output, error) if file is not None]:
                await connection.execute(sa.insert(files), written)
            changes = {
                "status": status,
                _ENDED_AT[status]: self._session.now(),
                "output_file_id": output and output.id,
                "error_file_id": error and error.id,
                "result_bytes": 0,  # counted with the files from now on
                "server": None,
            }
            ended = sa.update(batches).where(batches.c.id == batch_id).values(changes).returning(batches)
            batch = _batch((await connection.execute(ended)).mappings().one())
        await self._drop(batch_id)
        return batch

    def _is_free(self) -> sa.ColumnElement[bool]:
        return sa.or_(batches.c.server.is_(None), batches.c.server == self._session.server)

    async def _drop(self, batch_id: str) -> None:
        for start in range(1, await self._last_number(batch_id) + 1, _DELETION):
            async with self._db.writing() as connection:
                for table in (results, lines):
                    numbers = table.c.number.between(start, start + _DELETION - 1)
                    await connection.execute(sa.delete(table).where(table.c.batch_id == batch_id, numbers))

    async def _last_number(self, batch_id: str) -> int:
        async with self._db.reading() as connection:
            last = sa.select(sa.func.max(lines.c.number)).where(lines.c.batch_id == batch_id)
            return int(await connection.scalar(last) or 0)

    async def drop_leftovers(self) -> None:
        final = sa.select(batches.c.id).where(batches.c.status.not_in(ACTIVE))
        async with self._db.reading() as connection:
            left = await connection.scalars(sa.select(lines.c.batch_id).where(lines.c.batch_id.in_(final)).distinct())
            ids = list(left)
        for batch_id in ids:
            await self._drop(batch_id)


def is_for(models: Collection[str]) -> sa.ColumnElement[bool]:
    return sa.or_(batches.c.model.is_(None), batches.c.model.in_(models)) if models else sa.true()


def _of(owner: str, batch_id: str) -> sa.Select[Any]:
    return sa.select(batches).where(batches.c.id == batch_id, batches.c.owner == owner)


async def _active_of(connection: AsyncConnection, owner: str) -> int:
    active = sa.select(sa.func.count()).where(batches.c.owner == owner, batches.c.status.in_(ACTIVE))
    return int(await connection.scalar(active) or 0)


async def _one(connection: AsyncConnection, query: sa.Select[Any]) -> BatchRow | None:
    found = (await connection.execute(query)).mappings().one_or_none()
    return None if found is None else _batch(found)


async def _has_lines(connection: AsyncConnection, batch_id: str, *states: LineState) -> bool:
    some = sa.select(lines.c.number).where(lines.c.batch_id == batch_id, lines.c.state.in_(states))
    return await connection.scalar(some.limit(1)) is not None


def _batch(row: RowMapping) -> BatchRow:
    values = {name: row[name] for name in BatchRow.__dataclass_fields__}
    errors = tuple(LineError(**error) for error in values["errors"])
    return BatchRow(**values | {"status": BatchStatus(values["status"]), "errors": errors})
