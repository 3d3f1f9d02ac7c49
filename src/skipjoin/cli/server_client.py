from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp
import msgspec

from skipjoin.system.unreachable import why_unreachable

# Timeouts to connect and between chunks of a response. Uploads and downloads have no total timeout.
_CONNECT_S, _READ_S = 10.0, 120.0
_LONGEST_QUOTE = 500
# Statuses of servers that start or shut down, and of proxies.
_UNREACHABLE = (502, 503, 504)


class ServerClientError(Exception):
    """Error of an unreachable or refusing server. It may be available again later if `is_lost`."""

    def __init__(self, text: str, *, is_lost: bool = False) -> None:
        super().__init__(text)
        self.is_lost = is_lost


class ServerClient:
    def __init__(self, url: str, api_key: str | None) -> None:
        self._base = url
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S),
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def json(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        async with self._answer(method, path, **body) as response:
            text = await response.read()
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ServerClientError(f"{self._base} answers with something else than a JSON object") from error

    @asynccontextmanager
    async def _answer(self, method: str, path: str, **body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a successful response. Redirects are errors, because they would leak the API key."""
        try:
            async with self._session.request(method, self._base + path, allow_redirects=False, **body) as response:
                if response.status != 200:
                    text = f"{self._base}: {_refusal(response, await response.read())}"
                    raise ServerClientError(text, is_lost=response.status in _UNREACHABLE)
                yield response
        except TimeoutError as error:
            raise ServerClientError(f"{self._base} does not answer", is_lost=True) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            why = why_unreachable(error)
            text = f"{self._base} cannot be reached: {why}; skipjoin serve starts a server, --url names one"
            raise ServerClientError(text, is_lost=True) from error

    async def events(self, path: str, method: str = "GET", **body: Any) -> AsyncIterator[tuple[str, str]]:
        async with self._answer(method, path, **body) as response:
            rest = b""
            # Not by lines, which aiohttp bounds: a snapshot is one line of some hundred kilobytes.
            async for piece in response.content.iter_any():
                *complete, rest = (rest + piece).split(b"\n\n")
                for event in complete:
                    yield _parse(event.decode())


def _parse(event: str) -> tuple[str, str]:
    name, data = "message", ""
    for line in event.splitlines():
        field, _, value = line.partition(":")
        if field == "event":
            name = value.strip()
        elif field == "data":
            data += value.removeprefix(" ")
    return name, data


def _refusal(response: aiohttp.ClientResponse, body: bytes) -> str:
    status = response.status
    try:
        remedy = "; here --api-key or OPENAI_API_KEY gives it" if status == 401 else ""
        return f"{msgspec.json.decode(body)['error']['message']}{remedy} (HTTP status {status})"
    except (msgspec.DecodeError, KeyError, TypeError):
        if response.content_type == "text/html":
            return f"HTTP status {status} with a page, where a server sends JSON: is it a Skipjoin server?"
        return f"HTTP status {status}: {body[:_LONGEST_QUOTE].decode(errors='replace')!r}"
