from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Mapping
from urllib.parse import unquote

import uvloop
from fastapi import FastAPI, Request, Response

from skipjoin.config import ServerConfig
from skipjoin.config.access import is_loopback
from skipjoin.routes import ROUTES
from skipjoin.server import logs
from skipjoin.server.api.app import add_route, new_app
from skipjoin.server.api.auth import AccessGuard
from skipjoin.server.api.browsers import SiteRules
from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.http import HttpServer
from skipjoin.server.api.pages import read_pages
from skipjoin.server.listeners import connection_limits, open_listeners, url_of
from skipjoin.server.relay.upstream import Upstream, new_session


def run_console(config: ServerConfig, servers: Mapping[str, str | None]) -> None:
    """Serve the console until a signal ends it.

    Args:
        servers: Key by URL of the server, which only browsers of this machine use. Others send their own.
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
