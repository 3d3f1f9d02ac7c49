"""Application of a console: pages for each server, and a relay of their requests."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

from fastapi import FastAPI, Request, Response

from skipjoin.server.api import pages
from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.page_paths import NamedServer
from skipjoin.server.relay.upstream import Upstream

# What the pages ask of a server, by method; a name that ends with a slash stands for all paths below it.
RELAYED: Mapping[str, tuple[str, ...]] = {
    "GET": ("/debug/", "/v1/models", "/v1/batches"),
    "POST": ("/debug/replay", "/v1/chat/completions"),
}


def add_routes(app: FastAPI, servers: list[Upstream]) -> None:
    """Add the pages, and a path for each server."""
    pages.add_routes(app, [NamedServer(one.url, f"/servers/{at}") for at, one in enumerate(servers)])

    async def relay(server: int, path: str, request: Request) -> Response:
        path = request.scope["raw_path"].decode("ascii").split("/", 3)[3]  # with its escapes
        target = "/" + path
        if server >= len(servers) or not _is_relayed(request.method, target):
            raise ApiError(404, f"the console relays no {request.method} {target[:200]} to a server {server}")
        return await servers[server].answer(request, target)

    app.add_api_route("/servers/{server:int}/{path:path}", relay, methods=list(RELAYED), include_in_schema=False)


def _is_relayed(method: str, path: str) -> bool:
    decoded = unquote(path)
    return (
        ".." not in decoded
        and "//" not in decoded
        and any(path.startswith(one) if one.endswith("/") else path == one for one in RELAYED.get(method, ()))
    )
