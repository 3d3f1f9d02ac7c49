"""ASGI application with all routes behind the access guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from skipjoin.server.api import debug, errors, pages, status, tokens
from skipjoin.server.api.auth import AccessGuard
from skipjoin.server.api.browsers import SiteRules
from skipjoin.server.api.chat import ChatEndpoint
from skipjoin.server.api.completions import CompletionEndpoint
from skipjoin.server.api.console_streams import ConsoleStreams
from skipjoin.server.api.generation import Endpoint
from skipjoin.server.api.replies import answer
from skipjoin.server.api.service import Service
from skipjoin.version import VERSION

# Adds routes and returns the types of their bodies by path.
AddRoutes = Callable[[FastAPI], Mapping[str, type[BaseModel]]]
ENDPOINTS: tuple[type[Endpoint[Any]], ...] = (ChatEndpoint, CompletionEndpoint)


def build_app(
    service: Service,
    add_more: AddRoutes | None = None,
    body_limits: Mapping[tuple[str, str], int] | None = None,
    streams: ConsoleStreams | None = None,
) -> AccessGuard:
    """Return the application of a service. Its `.app` is the FastAPI object behind the guard.

    Args:
        body_limits: Maximum body sizes of routes with larger bodies, by method and path.
        streams: Streams for consoles, which the caller closes when the server stops.
    """
    config = service.config
    app = new_app()
    status.add_routes(app, service)
    for kind in ENDPOINTS:
        _add_endpoint(app, kind(service))
    tokens.add_routes(app, service)
    if config.console:
        debug.add_routes(app, service, streams or ConsoleStreams(service))
        pages.add_routes(app)
    bodies = {kind.path: kind.body_type for kind in ENDPOINTS} | tokens.BODIES
    if add_more is not None:
        bodies |= add_more(app)
    app.openapi = lambda: _openapi(app, bodies)  # type: ignore[method-assign]
    return AccessGuard(
        app,
        api_keys=config.api_keys,
        max_header_bytes=config.max_header_bytes,
        max_body_bytes=config.max_body_bytes,
        body_limits=body_limits,
        rules=SiteRules.of(config),
        cors_origins=config.cors_origins,
        metrics_keys=config.metrics_keys,
        on_status=service.metrics.responded,
    )


def build_metrics_app(service: Service) -> AccessGuard:
    app, config = new_app(openapi_url=None), service.config
    status.add_metrics(app, service)
    return AccessGuard(
        app,
        api_keys=config.metrics_keys,
        max_header_bytes=config.max_header_bytes,
        max_body_bytes=config.max_body_bytes,
        rules=SiteRules.of(config),
    )


def new_app(**settings: Any) -> FastAPI:
    """Return an application that answers errors in OpenAI's format."""
    app = FastAPI(
        title="Skipjoin",
        version=VERSION,
        # The pages would load scripts from other sites, and a redirect would repeat the client's Host header.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        **settings,
    )
    errors.install(app)
    return app


def _add_endpoint(app: FastAPI, endpoint: Endpoint[Any]) -> None:
    name = endpoint.path.removeprefix("/v1").strip("/").replace("/", "_")

    async def generate(request: Request) -> Response:
        return await answer(request, endpoint)

    app.add_api_route(endpoint.path, generate, methods=["POST"], name=name, description=endpoint.__doc__)


def _openapi(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
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
