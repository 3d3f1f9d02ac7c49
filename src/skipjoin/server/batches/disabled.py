from __future__ import annotations

from dataclasses import replace

from fastapi import FastAPI, Response

from skipjoin.routes import ROUTES, Part
from skipjoin.server.api.app import add_route
from skipjoin.server.api.errors import ApiError


class NoBatches:
    live_requests = 0
    is_enabled = False

    def __init__(self, why: str) -> None:
        self._why = why

    def add_routes(self, app: FastAPI) -> None:
        async def refuse() -> Response:
            raise ApiError(404, f"this server has no files and batches: {self._why}")

        for route in ROUTES.values():
            if route.part is Part.BATCHES:
                add_route(app, replace(route, handler=refuse, body=None, is_listed=False))

    async def open(self) -> None: ...

    async def close(self) -> None: ...
