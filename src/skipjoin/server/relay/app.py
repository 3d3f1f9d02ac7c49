from __future__ import annotations

from urllib.parse import unquote

from fastapi import FastAPI, Request, Response

from skipjoin.routes import ROUTES
from skipjoin.server.api.app import add_route
from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.pages import NamedServer, read_pages
from skipjoin.server.relay.upstream import Upstream


def add_routes(app: FastAPI, servers: list[Upstream]) -> None:
    app.state.pages = read_pages([NamedServer(one.url, f"/servers/{at}") for at, one in enumerate(servers)])
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
