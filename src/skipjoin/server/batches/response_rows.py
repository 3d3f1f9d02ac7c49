from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from skipjoin.server.batches.database import Session
from skipjoin.server.batches.records import Quota, QuotaExceeded, ResponseRow, is_id
from skipjoin.server.batches.tables import response_items, responses

# Rows that one query reads or deletes.
_STEP = 500
_FIELDS = tuple(ResponseRow.__dataclass_fields__)


class ResponseRows:
    """Beyond an owner's quota the oldest are deleted, because clients rarely delete them."""

    def __init__(self, session: Session) -> None:
        self._session, self._db = session, session.db

    async def add(self, row: ResponseRow, items: Collection[str], quota: Quota) -> None:
        """Add a response, which becomes the one that has `items`."""
        if row.size > quota.bytes:
            raise QuotaExceeded(f"this response has {row.size} bytes, and this key may store {quota.bytes}")
        known = [item for item in dict.fromkeys(items) if is_id(item)]
        async with self._db.writing() as connection:
            await self._session.alone(connection, row.owner)
            await self._make_room(connection, row, quota)
            await connection.execute(sa.insert(responses), asdict(row))
            for start in range(0, len(known), _STEP):
                ids = known[start : start + _STEP]
                moved = sa.delete(response_items).where(
                    response_items.c.owner == row.owner, response_items.c.id.in_(ids)
                )
                await connection.execute(moved)
                await connection.execute(
                    sa.insert(response_items), [{"owner": row.owner, "id": item, "response_id": row.id} for item in ids]
                )

    async def get(self, owner: str, response_id: str) -> ResponseRow | None:
        if not is_id(response_id):
            return None
        async with self._db.reading() as connection:
            query = sa.select(responses).where(responses.c.id == response_id, self._is_visible(owner))
            found = (await connection.execute(query)).mappings().one_or_none()
        return None if found is None else ResponseRow(**{name: found[name] for name in _FIELDS})

    async def containing(self, owner: str, items: Collection[str]) -> list[str]:
        known, found = list(filter(is_id, items)), dict[str, None]()
        async with self._db.reading() as connection:
            for start in range(0, len(known), _STEP):
                query = sa.select(response_items.c.response_id).where(
                    response_items.c.owner == owner, response_items.c.id.in_(known[start : start + _STEP])
                )
                found.update(dict.fromkeys(await connection.scalars(query)))
        return list(found)

    async def delete(self, owner: str, response_id: str) -> bool:
        if not is_id(response_id):
            return False
        async with self._db.writing() as connection:
            query = sa.select(responses.c.id).where(responses.c.id == response_id, self._is_visible(owner))
            found = list(await connection.scalars(query))
            await _delete(connection, found)
        return bool(found)

    async def sweep(self) -> None:
        while True:
            async with self._db.reading() as connection:
                query = sa.select(responses.c.id).where(responses.c.expires_at <= self._session.now()).limit(_STEP)
                expired = list(await connection.scalars(query))
            if not expired:
                return
            async with self._db.writing() as connection:
                await _delete(connection, expired)

    async def _make_room(self, connection: AsyncConnection, row: ResponseRow, quota: Quota) -> None:
        own = responses.c.owner == row.owner
        query = sa.select(sa.func.sum(responses.c.size), sa.func.count()).where(own)
        size, count = (await connection.execute(query)).one()
        size = int(size or 0)
        while size + row.size > quota.bytes or count >= quota.count:
            oldest = sa.select(responses.c.id, responses.c.size).where(own).order_by(responses.c.seq).limit(_STEP)
            dropped = []
            for found in (await connection.execute(oldest)).all():
                if size + row.size <= quota.bytes and count < quota.count:
                    break
                dropped.append(found.id)
                size, count = size - found.size, count - 1
            await _delete(connection, dropped)

    def _is_visible(self, owner: str) -> sa.ColumnElement[bool]:
        return sa.and_(responses.c.owner == owner, responses.c.expires_at > self._session.now())


async def _delete(connection: AsyncConnection, ids: Collection[str]) -> None:
    await connection.execute(sa.delete(response_items).where(response_items.c.response_id.in_(ids)))
    await connection.execute(sa.delete(responses).where(responses.c.id.in_(ids)))
