from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp
import msgspec

# Timeouts to connect and between chunks of a response. Uploads and downloads have no total timeout.
_CONNECT_S, _READ_S = 10.0, 120.0
_CHUNK_BYTES = 1 << 20
_LONGEST_QUOTE = 500
# Statuses of servers that start or shut down, and of proxies.
_AWAY = (502, 503, 504)


class BatchClientError(Exception):
    """Error of an unreachable or refusing server. It may be available again later if `is_lost`."""

    def __init__(self, text: str, *, is_lost: bool = False) -> None:
        super().__init__(text)
        self.is_lost = is_lost


class BatchPage(NamedTuple):
    """Batches, newest first, and whether there are older ones."""

    batches: list[dict[str, Any]]
    has_more: bool


class BatchClient:
    """Client of one server, as an asynchronous context manager. `url` is without /v1."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._base = url
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S),
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def __aenter__(self) -> BatchClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def upload(self, path: Path) -> str:
        try:
            with path.open("rb") as file:
                form = aiohttp.FormData()
                form.add_field("purpose", "batch")
                form.add_field("file", file, filename=path.name, content_type="application/jsonl")
                # With expect100, a server can refuse the file before it is sent.
                answer = await self._json("POST", "/v1/files", data=form, expect100=True)
        except OSError as error:
            raise BatchClientError(f"{path}: {error.strerror or error}") from error
        return str(answer["id"])

    async def create(self, file_id: str, endpoint: str, window: str) -> dict[str, Any]:
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        return await self._json("POST", "/v1/batches", json=body)

    async def batch(self, batch_id: str) -> dict[str, Any]:
        return await self._json("GET", f"/v1/batches/{quote(batch_id, safe='')}")

    async def batches(self, limit: int) -> BatchPage:
        answer = await self._json("GET", f"/v1/batches?limit={limit}")
        return BatchPage(answer["data"], answer["has_more"])

    async def cancel(self, batch_id: str) -> dict[str, Any]:
        return await self._json("POST", f"/v1/batches/{quote(batch_id, safe='')}/cancel")

    async def content(self, file_id: str) -> AsyncIterator[bytes]:
        async with self._answer("GET", f"/v1/files/{file_id}/content") as response:
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                yield chunk

    async def _json(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        async with self._answer(method, path, **body) as response:
            text = await response.read()
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise BatchClientError(f"{self._base} answers with something else than a JSON object") from error

    @asynccontextmanager
    async def _answer(self, method: str, path: str, **body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a successful response. Redirects are errors, because they would leak the API key."""
        try:
            async with self._session.request(method, self._base + path, allow_redirects=False, **body) as response:
                if response.status != 200:
                    text = f"{self._base}: {_refusal(response.status, await response.read())}"
                    raise BatchClientError(text, is_lost=response.status in _AWAY)
                yield response
        except TimeoutError as error:
            raise BatchClientError(f"{self._base} does not answer", is_lost=True) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise BatchClientError(f"{self._base} cannot be reached: {_reason(error)}", is_lost=True) from error


def _reason(error: Exception) -> str:
    number = getattr(error, "errno", None)
    return os.strerror(number).lower() if number is not None else str(error) or type(error).__name__


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"{msgspec.json.decode(body)['error']['message']} (HTTP status {status})"
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"HTTP status {status}: {body[:_LONGEST_QUOTE].decode(errors='replace')!r}"
