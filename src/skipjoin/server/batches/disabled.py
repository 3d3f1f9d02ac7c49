"""Server without files and batches, because they are disabled or their packages are not installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from fastapi import FastAPI
from pydantic import BaseModel

from skipjoin.server.api.errors import ApiError

_METHODS = ("GET", "POST", "DELETE")
_PATHS = ("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}")


class NoBatches:
    """Answers requests for files and batches with 404 and the reason."""

    live_requests = 0
    is_enabled = False

    def __init__(self, why: str) -> None:
        self._why = why

    @property
    def body_limits(self) -> dict[tuple[str, str], int]:
        return {}

    def add_routes(self, app: FastAPI) -> Mapping[str, type[BaseModel]]:
        async def refuse() -> NoReturn:
            raise ApiError(404, f"this server has no files and batches: {self._why}")

        for path in _PATHS:
            app.add_api_route(path, refuse, methods=list(_METHODS), include_in_schema=False, response_model=None)
        return {}

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass
