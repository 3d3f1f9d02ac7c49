"""Loading and unloading of adapters by operators, with vLLM's names."""

from __future__ import annotations

import os
from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import Field, field_validator

from skipjoin.config.shared import MAX_ADAPTER_NAME, is_adapter_name
from skipjoin.server.api.auth import ANONYMOUS, viewer_of
from skipjoin.server.api.browsers import json_body
from skipjoin.server.api.errors import ApiError, bad_request
from skipjoin.server.api.fields import Body, Ignored, Off
from skipjoin.server.api.replies import json_response, service_of
from skipjoin.server.api.service import Service
from skipjoin.server.api.status import adapter_card

# Time that engines may take to load an adapter, which they do between two steps.
_LOAD_S = 120.0


class LoadAdapterRequest(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_NAME)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: Off = None

    @field_validator("lora_name")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if not is_adapter_name(value):
            raise ValueError("it must have printable characters, without blanks at its ends")
        return value


class UnloadAdapterRequest(Body):
    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_NAME)]
    lora_int_id: Ignored = None


async def load_adapter(request: Request) -> Response:
    """Load an adapter of the model, which requests choose by its name as their model."""
    service, body = await _order(request, LoadAdapterRequest)
    name, names = body.lora_name, service.adapters
    if name in service.names or not names.reserve(name):
        raise bad_request(
            f"lora_name {name!r} is taken: unload that adapter first, or choose another name", "lora_name"
        )
    try:
        adapter = names.new(name, os.path.abspath(body.lora_path))
        if error := await service.client.adapters.load(adapter, _LOAD_S):
            raise bad_request(error, "lora_path", code="adapter_not_loaded")
        service.add_adapter(adapter)
    finally:
        names.release(name)
    return json_response(adapter_card(service, adapter))


async def unload_adapter(request: Request) -> Response:
    """Unload an adapter once the requests that use it have finished; others are refused at once."""
    service, body = await _order(request, UnloadAdapterRequest)
    if service.adapters.find(body.lora_name) is None:
        raise ApiError(404, f"there is no adapter {body.lora_name!r}", code="adapter_not_found", param="lora_name")
    service.remove_adapter(body.lora_name)
    return json_response({"id": body.lora_name, "object": "model", "deleted": True})


async def _order(request: Request, kind: type[Any]) -> tuple[Service, Any]:
    service = service_of(request)
    service.check_open()
    config, owner = service.config, request.state.owner
    if viewer_of(config, owner).owner is not None:
        raise ApiError(403, "only a key with operator=yes may load and unload adapters", code="operator_only")
    if owner == ANONYMOUS and config.allow_no_key:
        raise ApiError(403, "adapters are loaded with API keys only where --allow-no-key is set", code="operator_only")
    return service, await service.parse(await json_body(request), kind)
