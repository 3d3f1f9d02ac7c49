from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.convertors import Convertor, register_url_convertor

from skipjoin.routes import METRICS, ROUTES, Part, Route, resolved
from skipjoin.server.api import errors
from skipjoin.server.api.auth import AccessGuard
from skipjoin.server.api.browsers import SiteRules
from skipjoin.server.api.feed import ConsoleStreams
from skipjoin.server.api.generation import Endpoint
from skipjoin.server.api.pages import read_pages
from skipjoin.server.api.replies import answer
from skipjoin.server.api.service import Service
from skipjoin.version import VERSION


class _SeveralSegments(Convertor[str]):
    """Segments of a path with at least one character, unlike Starlette's `path`."""

    regex = ".+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("segments", _SeveralSegments())


class BatchRoutes(Protocol):
    is_enabled: bool

    def add_routes(self, app: FastAPI) -> None: ...


def build_app(
    service: Service, batches: BatchRoutes | None = None, streams: ConsoleStreams | None = None
) -> AccessGuard:
    config = service.config
    app = new_app()
    app.state.service = service
    add_routes(app, Part.API)
    if config.console:
        app.state.streams = streams or ConsoleStreams(service)
        app.state.pages = read_pages()
        add_routes(app, Part.CONSOLE)
    if batches is not None:
        batches.add_routes(app)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    has_batches = batches is not None and batches.is_enabled
    return AccessGuard(
        app,
        api_keys=config.api_keys,
        max_header_bytes=config.max_header_bytes,
        max_body_bytes=config.max_body_bytes,
        body_limits={
            route.key: route.body_limit(config)
            for route in ROUTES.values()
            if route.body_limit is not None and (has_batches or route.part is not Part.BATCHES)
        },
        rules=SiteRules.of(config),
        cors_origins=config.cors_origins,
        metrics_keys=config.metrics_keys,
        on_status=service.metrics.responded,
    )


def build_metrics_app(service: Service) -> AccessGuard:
    app, config = new_app(openapi_url=None), service.config
    app.state.service = service
    add_route(app, METRICS)
    return AccessGuard(
        app,
        api_keys=config.metrics_keys,
        max_header_bytes=config.max_header_bytes,
        max_body_bytes=config.max_body_bytes,
        rules=SiteRules.of(config),
    )


def new_app(**settings: Any) -> FastAPI:
    app = FastAPI(
        title="Skipjoin",
        version=VERSION,
        # The pages would load scripts from other sites, and a redirect would repeat the client's Host header.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        **settings,
    )
    app.state.bodies = {}  # request models by path
    errors.install(app)
    return app


def add_routes(app: FastAPI, part: Part) -> None:
    for route in ROUTES.values():
        if route.part is part:
            add_route(app, route)


def add_route(app: FastAPI, route: Route) -> None:
    named, body = resolved(route.handler), resolved(route.body)
    handler = named
    if isinstance(named, type) and issubclass(named, Endpoint):
        handler, body = _generation(named(app.state.service)), named.body_type
    app.add_api_route(
        route.path, handler, methods=[route.method], description=named.__doc__, include_in_schema=route.is_listed
    )
    # Probes such as `wget --spider` and agents ask for the head only. The connection leaves out the body.
    if route.method == "GET" and not route.is_endless:
        app.add_api_route(route.path, handler, methods=["HEAD"], include_in_schema=False)
    if body is not None:
        app.state.bodies[route.path] = body


def _generation(endpoint: Endpoint[Any]) -> Callable[[Request], Awaitable[Response]]:
    async def generate(request: Request) -> Response:
        return await answer(request, endpoint)

    generate.__name__ = type(endpoint).__name__.removesuffix("Endpoint").lower()
    return generate


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        bodies: dict[str, type[BaseModel]] = app.state.bodies
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
