from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncGenerator, Mapping
from urllib.parse import unquote

import aiohttp
import uvloop
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from yarl import URL

from skipjoin.config import ServerConfig
from skipjoin.config.access import is_loopback
from skipjoin.routes import ROUTES
from skipjoin.server import logs
from skipjoin.server.api.app import add_route, new_app
from skipjoin.server.api.auth import AccessGuard
from skipjoin.server.api.browsers import SiteRules
from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.http import HttpServer
from skipjoin.server.api.pages import DATA_HEADERS, read_pages
from skipjoin.server.listeners import connection_limits, open_listeners, url_of
from skipjoin.system.unreachable import why_unreachable

_CONNECT_S = 10.0
# Headers of the browser that a server needs, and of the answer that the browser needs.
_ASKED = ("accept", "content-type")
_ANSWERED = ("content-type", "cache-control", "retry-after", "x-accel-buffering")
# All that a server of ours sends to the pages. Another type could be a page, which would run on the console's origin.
_TYPES = ("application/json", "text/event-stream")


class Upstream:
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
    """If the browser leaves early, the server notices the closed connection."""
    try:
        async for piece in response.content.iter_any():
            yield piece
    finally:
        response.close()


def run_console(config: ServerConfig, servers: Mapping[str, str | None]) -> None:
    """Serve the console until a signal ends it.

    `servers` has keys by URL, for browsers of this machine only. Others send their own.
    """
    logs.configure("warning", "text")
    (listener,) = open_listeners(config)
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, listener, servers))


async def _serve(config: ServerConfig, listener: socket.socket, servers: Mapping[str, str | None]) -> None:
    uses_keys = is_loopback(listener.getsockname()[0])
    async with new_session() as session:
        app = new_app(openapi_url=None)
        add_routes(app, [Upstream(session, url, key if uses_keys else None) for url, key in servers.items()])
        guard = AccessGuard(
            app,
            api_keys=(),
            max_header_bytes=config.max_header_bytes,
            max_body_bytes=config.max_body_bytes,
            rules=SiteRules.of(config),
        )
        http = HttpServer(guard, connection_limits(config))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, _stop, http)
        logs.announce(f"Console: {url_of(listener)}/console, chat: {url_of(listener)}/ (Ctrl-C ends it)")
        if not uses_keys and any(servers.values()):
            logs.announce("Browsers of other machines must enter a key of their own, so those given here are not used.")
        await http.serve(sockets=[listener])


def _stop(http: HttpServer) -> None:
    http.should_exit = http.force_exit = True


def add_routes(app: FastAPI, servers: list[Upstream]) -> None:
    app.state.pages = read_pages([{"name": server.url, "path": f"/servers/{at}"} for at, server in enumerate(servers)])
    for path in app.state.pages:
        add_route(app, ROUTES["GET", path])

    async def relay(server: int, path: str, request: Request) -> Response:
        path = request.scope["raw_path"].decode("ascii").split("/", 3)[3]  # with its escapes
        target = "/" + path
        if server >= len(servers) or not _is_relayed(request.method, target):
            raise ApiError(404, f"the console relays no {request.method} {target[:200]} to a server {server}")
        return await servers[server].answer(request, target)

    app.add_api_route("/servers/{server:int}/{path:path}", relay, methods=["GET", "POST"], include_in_schema=False)


def _is_relayed(method: str, path: str) -> bool:
    decoded = unquote(path)
    relayed = (route for route in ROUTES.values() if route.is_relayed and route.method == method)
    return ".." not in decoded and "//" not in decoded and any(route.pattern.fullmatch(path) for route in relayed)
