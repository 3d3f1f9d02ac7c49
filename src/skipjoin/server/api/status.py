"""GET routes for health, models, load, version and metrics."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from skipjoin.config.key_files import owner_of_key
from skipjoin.model.folder import model_id
from skipjoin.server.api.auth import METRICS_PATH
from skipjoin.server.api.errors import ApiError, unavailable
from skipjoin.server.api.replies import json_response
from skipjoin.server.api.responses import LoadAnswer, ModelCard, ModelList
from skipjoin.server.api.service import Phase, Service
from skipjoin.server.api.viewers import viewer_of
from skipjoin.version import VERSION


def add_routes(app: FastAPI, service: Service) -> None:
    _add_health(app, service)
    _add_models(app, service)
    add_metrics(app, service)

    @app.get("/version")
    async def show_version() -> Response:
        """Return the server's version."""
        return json_response({"version": VERSION})

    @app.get("/load")
    async def show_load(request: Request) -> Response:
        """Return the server's load."""
        service.check_alive()
        load, admission = service.client.load(), service.admission
        has_totals = viewer_of(service.config, request.state.owner).has_totals
        return json_response(
            LoadAnswer(
                server_load=admission.requests,
                running=load.running,
                waiting=load.waiting,
                queued_tokens=admission.tokens if has_totals else None,
                kv_cache_usage=load.usage if has_totals else None,
            )
        )


def add_metrics(app: FastAPI, service: Service) -> None:
    for_metrics = frozenset(owner_of_key(key.encode()) for key in service.config.metrics_keys)

    @app.get(METRICS_PATH)
    async def show_metrics(request: Request) -> Response:
        """Return the metrics in Prometheus's text format."""
        key = request.state.owner
        if key not in for_metrics and not viewer_of(service.config, key).has_totals:
            raise ApiError(
                403,
                "the metrics are of all keys: use one with operator=yes in --api-key-file, or one of --metrics-key",
                code="operator_only",
            )
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Return 200 while an engine is running."""
        service.check_alive()
        return json_response({"status": "ok", **service.count_replicas()})

    @app.get("/ready")
    async def ready() -> Response:
        """Return 200 while the server accepts requests."""
        service.check_alive()
        if service.phase is not Phase.OPEN:
            raise unavailable(f"the server is {service.phase.value}", "not_ready")
        return json_response({"status": "ready", **service.count_replicas()})

    @app.get("/live")
    async def live() -> Response:
        """Return 200 while this process responds."""
        return json_response({"status": "live"})


def _add_models(app: FastAPI, service: Service) -> None:
    def card() -> ModelCard:
        info = service.info
        own = model_id(info.model, info.folder)
        return ModelCard(id=service.name, created=service.created, max_model_len=info.max_model_len, root=own)

    @app.get("/v1/models")
    async def list_models() -> Response:
        """Return the served model in a list."""
        return json_response(ModelList([card()]))

    # Names can contain slashes.
    @app.get("/v1/models/{model:path}")
    async def show_model(model: str) -> Response:
        """Return the served model by name."""
        found = card()
        service.check_model(model)
        return json_response(found)
