"""`build_app` gives the ASGI application: every route, behind the access guard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from skipjoin.server.api import debug, errors, status, tokens
from skipjoin.server.api.auth import AccessGuard
from skipjoin.server.api.chat import ChatEndpoint
from skipjoin.server.api.completions import CompletionEndpoint
from skipjoin.server.api.generation import Endpoint
from skipjoin.server.api.replies import answer
from skipjoin.server.api.service import Service
from skipjoin.version import VERSION

ENDPOINTS: tuple[type[Endpoint[Any]], ...] = (ChatEndpoint, CompletionEndpoint)


def build_app(service: Service) -> AccessGuard:
    """The application around a service. `.app` of what is returned is the FastAPI object behind the guard."""
    config = service.config
    app = FastAPI(
        title="Skipjoin",
        version=VERSION,
        # The pages would load scripts from elsewhere; a redirect would repeat the client's Host header.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    errors.install(app)
    status.add_routes(app, service)
    for kind in ENDPOINTS:
        _add_endpoint(app, kind(service))
    tokens.add_routes(app, service)
    if config.enable_debug_routes:
        debug.add_routes(app, service)
    bodies = {kind.path: kind.body_type for kind in ENDPOINTS} | tokens.BODIES
    app.openapi = lambda: _openapi(app, bodies)  # type: ignore[method-assign]
    return AccessGuard(
        app,
        api_keys=config.api_keys,
        max_header_bytes=config.max_header_bytes,
        max_body_bytes=config.max_body_bytes,
    )


def _add_endpoint(app: FastAPI, endpoint: Endpoint[Any]) -> None:
    name = endpoint.path.removeprefix("/v1").strip("/").replace("/", "_")

    async def generate(request: Request) -> Response:
        return await answer(request, endpoint)

    app.add_api_route(endpoint.path, generate, methods=["POST"], name=name, description=endpoint.__doc__)


def _openapi(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """FastAPI's schema, with the bodies that the routes read themselves. bodies: by path."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        pairs = [(model, "validation") for model in bodies.values()]
        names, definitions = models_json_schema(pairs, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        components.update(definitions["$defs"])
        for path, model in bodies.items():
            content = {"application/json": {"schema": names[model, "validation"]}}
            schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        app.openapi_schema = schema
    return app.openapi_schema
