from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from skipjoin.server.batches import records
from skipjoin.server.batches.database import Session
from skipjoin.server.batches.disk import Reserve
from skipjoin.server.batches.tables import batches, files


class FileRows:
    def __init__(self, session: Session, reserve: Reserve) -> None:
        self._session, self._db, self._reserve = session, session.db, reserve

    async def add(self, row: records.FileRow, quota: records.Quota = records.NO_QUOTA) -> None:
        async with self._db.writing() as connection:
            await self._session.alone(connection, row.owner)
            used = await usage_of(connection, row.owner)
            check_usage(used.bytes + row.bytes, quota.bytes, "bytes")
            check_usage(used.files + 1, quota.count, "files")
            await connection.execute(sa.insert(files), asdict(row))

    async def get(self, owner: str, file_id: str) -> records.FileRow | None:
        if not records.is_id(file_id):
            return None
        async with self._db.reading() as connection:
            query = sa.select(files).where(files.c.id == file_id, self._is_visible(owner))
            found = (await connection.execute(query)).mappings().one_or_none()
        return None if found is None else _file(found)

    async def page(
        self,
        owner: str,
        *,
        purpose: str | None = None,
        after: str | None = None,
        limit: int = 10_000,
        order: str = "desc",
    ) -> tuple[list[records.FileRow], bool]:
        """Return files in order of creation, and whether there are more.

        After a deleted file, the first page follows, so that clients may delete page by page.
        """
        shown = self._is_visible(owner)
        if purpose is not None:
            shown = sa.and_(shown, files.c.purpose == purpose)
        found: list[records.FileRow] = []
        async with self._db.reading() as connection:
            last = await seq_of(connection, files, owner, after)
            # In steps, because 10,000 rows would block the event loop.
            while (count := min(limit + 1 - len(found), _STEP)) > 0:
                rows = (await connection.execute(page(files, shown, last, count, order))).mappings().all()
                found += [_file(row) for row in rows]
                if len(rows) < count:
                    break
                last = rows[-1]["seq"]
        return found[:limit], len(found) > limit

    async def delete(self, owner: str, file_id: str) -> records.FileRow | None:
        if not records.is_id(file_id):
            return None
        try:
            return await self._delete(owner, file_id)
        except records.NoSpace:
            if not self._reserve.release():
                raise
        return await self._delete(owner, file_id)

    async def _delete(self, owner: str, file_id: str) -> records.FileRow | None:
        query = sa.update(files).where(files.c.id == file_id, self._is_visible(owner))
        async with self._db.writing() as connection:
            deleted = await connection.execute(query.values(deleted_at=self._session.now()).returning(files))
            found = deleted.mappings().one_or_none()
        return None if found is None else _file(found)

    async def usage_of(self, owner: str) -> records.OwnerUsage:
        async with self._db.reading() as connection:
            return await usage_of(connection, owner)

    async def removable(self) -> list[str]:
        reading = sa.select(batches.c.input_file_id).where(batches.c.status.in_(ACTIVE))
        gone = sa.or_(files.c.deleted_at.is_not(None), files.c.expires_at <= self._session.now())
        async with self._db.reading() as connection:
            found = await connection.scalars(sa.select(files.c.id).where(gone, files.c.id.not_in(reading)))
            return list(found)

    async def forget(self, ids: Sequence[str]) -> None:
        async with self._db.writing() as connection:
            for start in range(0, len(ids), 1000):
                await connection.execute(sa.delete(files).where(files.c.id.in_(ids[start : start + 1000])))

    async def known(self) -> set[str]:
        async with self._db.reading() as connection:
            return set(await connection.scalars(sa.select(files.c.id)))

    def _is_visible(self, owner: str) -> sa.ColumnElement[bool]:
        lasts = sa.or_(files.c.expires_at.is_(None), files.c.expires_at > self._session.now())
        return sa.and_(files.c.owner == owner, files.c.deleted_at.is_(None), lasts)


_STEP = 500
# States of unfinished batches.
ACTIVE = [status for status in records.BatchStatus if not status.is_final]


async def seq_of(connection: AsyncConnection, table: sa.Table, owner: str, row_id: str | None) -> int | None:
    if row_id is None or not records.is_id(row_id):
        return None
    query = sa.select(table.c.seq).where(table.c.id == row_id, table.c.owner == owner)
    found: int | None = await connection.scalar(query)
    return found


def page(
    table: sa.Table, shown: sa.ColumnElement[bool], last: int | None, count: int, order: str = "desc"
) -> sa.Select[Any]:
    seq, query = table.c.seq, sa.select(table).where(shown)
    if last is not None:
        query = query.where(seq > last if order == "asc" else seq < last)
    return query.order_by(seq if order == "asc" else seq.desc()).limit(count)


def check_usage(used: int, most: int, unit: str) -> None:
    if used > most:
        raise records.QuotaExceeded(
            f"this key would have {used} {unit} with the outputs of its batches, and may have {most}: delete files"
        )


async def usage_of(connection: AsyncConnection, owner: str) -> records.OwnerUsage:
    own = sa.select(sa.func.sum(files.c.bytes), sa.func.count()).where(files.c.owner == owner)
    size, count = (await connection.execute(own)).one()
    results = sa.select(sa.func.sum(batches.c.result_bytes)).where(batches.c.owner == owner)
    return records.OwnerUsage(int(size or 0) + int(await connection.scalar(results) or 0), count)


def _file(row: RowMapping) -> records.FileRow:
    return records.FileRow(**{name: row[name] for name in records.FileRow.__dataclass_fields__})
