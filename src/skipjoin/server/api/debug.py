"""GET /debug/requests: every request that is not complete. There only with `--enable-debug-routes`."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Response

from skipjoin.server.api.replies import json_response
from skipjoin.server.api.service import Service

# An engine answers between two steps, which takes this long at most unless it hangs.
TIMEOUT_S = 5.0


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the debug routes."""

    @app.get("/debug/requests")
    async def show_requests() -> Response:
        """The state of each request: `engines.messages.RequestState`, with the answer and the replica it belongs to."""
        _ = service.info  # 503 while the server starts
        found = await service.client.describe(TIMEOUT_S)
        rows = [
            {"id": one.label, "choice": one.choice, "replica": one.replica, **msgspec.structs.asdict(one.state)}
            for one in found.requests
        ]
        return json_response({"requests": rows, "silent_replicas": found.silent})
