from __future__ import annotations

from collections.abc import AsyncGenerator

import aiohttp
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from yarl import URL

from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.pages import DATA_HEADERS
from skipjoin.system.unreachable import why_unreachable

_CONNECT_S = 10.0
# Headers of the browser that a server needs, and of the answer that the browser needs.
_ASKED = ("accept", "content-type")
_ANSWERED = ("content-type", "cache-control", "retry-after", "x-accel-buffering")
# All that a server of ours sends to the pages. Another type could be a page, which would run on the console's origin.
_TYPES = ("application/json", "text/event-stream")


class Upstream:
    """One server. With a key, requests have it in place of the browser's."""

    def __init__(self, session: aiohttp.ClientSession, url: str, api_key: str | None) -> None:
        self._session = session
        self.url = url
        self._api_key = api_key

    async def answer(self, request: Request, path: str) -> Response:
        """Pass a request on, and return the answer as a stream. `path` keeps its escapes."""
        query = f"?{request.url.query}" if request.url.query else ""
        headers = {name: request.headers[name] for name in _ASKED if name in request.headers}
        key = f"Bearer {self._api_key}" if self._api_key is not None else request.headers.get("authorization")
        if key is not None:
            headers["authorization"] = key
        try:
            response = await self._session.request(
                request.method,
                URL(f"{self.url}{path}{query}", encoded=True),
                headers=headers,
                data=await request.body() or None,
                allow_redirects=False,  # they would leak the key
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            text = f"{self.url} cannot be reached: {why_unreachable(error)}"
            raise ApiError(503, text, code="server_unreachable") from error
        if response.content_type not in _TYPES:
            response.close()
            raise ApiError(
                502,
                f"{self.url} sent {response.content_type[:100]} with status {response.status}, where a server sends "
                "JSON: is it a Skipjoin server?",
                code="not_a_server",
            )
        kept = DATA_HEADERS | {name: response.headers[name] for name in _ANSWERED if name in response.headers}
        return StreamingResponse(_pieces(response), response.status, kept)


def new_session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    return aiohttp.ClientSession(
        timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), connector=aiohttp.TCPConnector(limit=0)
    )


async def _pieces(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Yield the body. If the browser leaves early, the server notices the closed connection."""
    try:
        async for piece in response.content.iter_any():
            yield piece
    finally:
        response.close()
