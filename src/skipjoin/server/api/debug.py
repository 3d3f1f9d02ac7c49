"""GET /debug/requests, enabled by `--enable-debug-routes`."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request, Response

from skipjoin.server.api.auth import ANONYMOUS
from skipjoin.server.api.replies import json_response
from skipjoin.server.api.service import Service

# An engine answers between two steps, which do not take longer unless it hangs.
TIMEOUT_S = 5.0


def add_routes(app: FastAPI, service: Service) -> None:
    @app.get("/debug/requests")
    async def show_requests(request: Request) -> Response:
        """Return the state of each unfinished request (`engines.messages.RequestState`), its response and its replica.

        Keys without operator rights see only their own requests.
        """
        _ = service.info  # 503 while the server starts
        owner = request.state.owner
        sees_all = owner == ANONYMOUS or service.config.rights_of(owner).is_operator
        found = await service.client.describe(TIMEOUT_S)
        rows = [
            {"id": one.label, "choice": one.choice, "replica": one.replica, **msgspec.structs.asdict(one.state)}
            for one in found.requests
            if sees_all or one.owner == owner
        ]
        return json_response({"requests": rows, "silent_replicas": found.silent})
