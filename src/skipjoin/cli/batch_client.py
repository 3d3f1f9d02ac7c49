from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from skipjoin.cli.server_client import ServerClient
from skipjoin.options import ConfigError

_CHUNK_BYTES = 1 << 20


class BatchClient(ServerClient):
    async def upload(self, path: Path) -> str:
        try:
            with path.open("rb") as file:
                form = aiohttp.FormData()
                form.add_field("purpose", "batch")
                form.add_field("file", file, filename=path.name, content_type="application/jsonl")
                # With expect100, a server can refuse the file before it is sent.
                answer = await self.json("POST", "/v1/files", data=form, expect100=True)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from error
        return str(answer["id"])

    async def create(self, file_id: str, endpoint: str, window: str) -> dict[str, Any]:
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        return await self.json("POST", "/v1/batches", json=body)

    async def batch(self, batch_id: str) -> dict[str, Any]:
        return await self.json("GET", f"/v1/batches/{quote(batch_id, safe='')}")

    async def batches(self, limit: int) -> dict[str, Any]:
        return await self.json("GET", f"/v1/batches?limit={limit}")

    async def cancel(self, batch_id: str) -> dict[str, Any]:
        return await self.json("POST", f"/v1/batches/{quote(batch_id, safe='')}/cancel")

    async def content(self, file_id: str) -> AsyncIterator[bytes]:
        async with self._answer("GET", f"/v1/files/{file_id}/content") as response:
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                yield chunk
