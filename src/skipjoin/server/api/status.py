from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from skipjoin.adapters import Adapter
from skipjoin.config.key_files import owner_of_key
from skipjoin.model.folder import model_id
from skipjoin.server.api.auth import viewer_of
from skipjoin.server.api.errors import ApiError, unavailable
from skipjoin.server.api.replies import json_response, service_of
from skipjoin.server.api.service import Phase, Service
from skipjoin.version import VERSION


async def show_version() -> Response:
    """Return the server's version."""
    return json_response({"version": VERSION})


async def show_load(request: Request) -> Response:
    """Return the server's load."""
    service = service_of(request)
    service.check_alive()
    load, admission = service.client.load(), service.admission
    has_totals = viewer_of(service.config, request.state.owner).has_totals
    return json_response(
        {
            "server_load": admission.requests,
            "running": load.running,
            "waiting": load.waiting,
            "queued_tokens": admission.tokens if has_totals else None,
            "kv_cache_usage": load.usage if has_totals else None,
        }
    )


async def show_metrics(request: Request) -> Response:
    """Return the metrics in Prometheus's text format."""
    service, key = service_of(request), request.state.owner
    config = service.config
    is_for_metrics = key in {owner_of_key(known.encode()) for known in config.metrics_keys}
    if not (is_for_metrics or viewer_of(config, key).has_totals):
        raise ApiError(
            403,
            "the metrics are of all keys: use one with operator=yes in --api-key-file, or one of --metrics-key",
            code="operator_only",
        )
    return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")


async def health(request: Request) -> Response:
    """Return 200 while an engine is running."""
    service = service_of(request)
    service.check_alive()
    return json_response({"status": "ok", **service.count_replicas()})


async def ready(request: Request) -> Response:
    """Return 200 while the server accepts requests."""
    service = service_of(request)
    service.check_alive()
    if service.phase is not Phase.OPEN:
        raise unavailable(f"the server is {service.phase.value}", "not_ready")
    return json_response({"status": "ready", **service.count_replicas()})


async def live() -> Response:
    """Return 200 while this process responds."""
    return json_response({"status": "live"})


async def list_models(request: Request) -> Response:
    """Return the served model and its adapters in a list."""
    service = service_of(request)
    adapters = [adapter_card(service, adapter) for adapter in service.adapters.all]
    return json_response({"object": "list", "data": [_card(service), *adapters]})


async def show_model(request: Request, model: str) -> Response:
    """Return the served model or an adapter by name, which can contain slashes."""
    service = service_of(request)
    found = _card(service)
    adapter = service.check_model(model)
    return json_response(found if adapter is None else adapter_card(service, adapter))


def _card(service: Service) -> dict[str, Any]:
    info = service.info
    own = model_id(info.model, info.folder)
    card = {"object": "model", "owned_by": "skipjoin", "parent": None, "id": service.name, "created": service.created}
    return card | {"max_model_len": info.max_model_len, "root": own}


def adapter_card(service: Service, adapter: Adapter) -> dict[str, Any]:
    """Return the card of an adapter, without its folder."""
    return _card(service) | {"id": adapter.name, "root": adapter.name, "parent": service.name}
