from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from skipjoin.server.api.stored import StoredResponse
from skipjoin.server.batches.context import BatchContext, as_api_error
from skipjoin.server.batches.files import EXPIRY_S
from skipjoin.server.batches.records import ResponseRow, StoreError

# Conversations are mostly text that repeats itself, and the fastest level halves it already.
_LEVEL = 1


class StoredResponses:
    def __init__(self, context: BatchContext) -> None:
        self._context = context

    async def add(self, owner: str, stored: StoredResponse, items: Collection[str]) -> None:
        body = await asyncio.to_thread(_packed, stored)
        async with _api_errors():
            store = self._context.store
            now = store.now()
            row = ResponseRow(
                id=stored.response["id"],
                owner=owner,
                size=len(body),
                created_at=now,
                expires_at=now + EXPIRY_S[1],
                body=body,
            )
            await store.responses.add(row, items, self._context.response_quota)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        async with _api_errors():
            row = await self._context.store.responses.get(owner, response_id)
        return None if row is None else await asyncio.to_thread(_unpacked, row.body)

    async def items(self, owner: str, ids: Collection[str]) -> Mapping[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        wanted = frozenset(ids)
        async with _api_errors():
            found_in = await self._context.store.responses.containing(owner, wanted)
        for response_id in found_in:
            if (stored := await self.get(owner, response_id)) is not None:
                found.update((item["id"], item) for item in stored.items if item["id"] in wanted)
        return found

    async def delete(self, owner: str, response_id: str) -> bool:
        async with _api_errors():
            return await self._context.store.responses.delete(owner, response_id)


def _packed(stored: StoredResponse) -> bytes:
    return zlib.compress(msgspec.json.encode(stored), _LEVEL)


def _unpacked(body: bytes) -> StoredResponse:
    return msgspec.json.decode(zlib.decompress(body), type=StoredResponse)


@asynccontextmanager
async def _api_errors() -> AsyncIterator[None]:
    try:
        yield
    except StoreError as error:
        raise as_api_error(error) from error
