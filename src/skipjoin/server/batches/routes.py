from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from pydantic import Field

from skipjoin.routes import ROUTES
from skipjoin.server.api.browsers import json_body
from skipjoin.server.api.errors import ApiError, bad_request
from skipjoin.server.api.fields import Body, Integer
from skipjoin.server.api.replies import json_response, limit_of, listed, service_of
from skipjoin.server.api.service import Service
from skipjoin.server.batches.context import context_of
from skipjoin.server.batches.files import find
from skipjoin.server.batches.records import INPUT, BatchRow, FileRow, new_batch_id

# OpenAI's bounds of metadata and of the expiry of output files.
_MAX_KEYS, _LONGEST_NAME, _LONGEST_VALUE = 16, 64, 512
_SHORTEST_S, _LONGEST_S = 3600, 30 * 86400
_MAX_WINDOW_S = 7 * 86400
_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_WINDOW = re.compile(r"([0-9]{1,6})([smh])")

MetadataKey = Annotated[str, Field(max_length=_LONGEST_NAME)]
MetadataValue = Annotated[str, Field(max_length=_LONGEST_VALUE)]


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Integer(_SHORTEST_S, _LONGEST_S)]


class BatchRequest(Body):
    """Body of POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=_LONGEST_VALUE)]
    endpoint: Annotated[str, Field(max_length=_LONGEST_VALUE)]
    completion_window: Annotated[str, Field(max_length=_LONGEST_NAME)]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=_MAX_KEYS)] | None = None
    output_expires_after: ExpiresAfter | None = None


def window_s(text: str) -> int:
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 1 <= seconds <= _MAX_WINDOW_S:
        raise bad_request(
            f"completion_window must be such as 24h, 90m or 20s, from 1s to 168h, got {text!r}", "completion_window"
        )
    return seconds


# Fields that row and object have in common.
_SAME = (
    *("id", "endpoint", "model", "input_file_id", "completion_window", "status", "output_file_id", "error_file_id"),
    *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at", "metadata"),
)


def batch_object(row: BatchRow) -> dict[str, Any]:
    """Expired and cancelled lines count neither as completed nor as failed."""
    tokens = row.prompt_tokens, row.completion_tokens
    return {
        **{name: getattr(row, name) for name in _SAME},
        "errors": {"object": "list", "data": row.errors} if row.errors else None,
        "request_counts": {"total": row.total, "completed": row.completed, "failed": row.failed},
        "usage": {
            "input_tokens": tokens[0],
            "output_tokens": tokens[1],
            "total_tokens": sum(tokens),
            "input_tokens_details": {"cached_tokens": row.cached_tokens},
            "output_tokens_details": {"reasoning_tokens": 0},  # not counted separately
        },
        "object": "batch",
    }


_PAGE, _MAX_PAGE = 20, 100
_LONGEST_KEY = 255
# Fields of the body that a repeated request must not change, and the row's fields.
_ASKED = {
    **{name: name for name in ("input_file_id", "endpoint", "completion_window", "metadata")},
    "output_expires_after": "output_expires_after_s",
}


async def create_batch(request: Request) -> Response:
    """Create a batch that runs the requests of an uploaded file."""
    context, service = context_of(request), service_of(request)
    store = context.store
    body = await service.parse(await json_body(request), BatchRequest)
    row = _new_batch(body, await find(store, request, body.input_file_id, "input_file_id"), service, store.now())
    made = await store.batches.add(
        row, _idempotency_key(request), max_active=context.config.batch_max_active_per_key, quota=context.file_quota
    )
    _check_same(row, made)
    context.wake()
    return json_response(batch_object(made))


async def list_batches(request: Request) -> Response:
    """List the batches of this API key, newest first."""
    store, owner, query = context_of(request).store, request.state.owner, request.query_params
    after, limit = query.get("after"), limit_of(query, most=_MAX_PAGE, default=_PAGE)
    if after is not None:
        _found(await store.batches.get(owner, after), after, "after")
    found, has_more = await store.batches.page(owner, after=after, limit=limit)
    return json_response(listed(list(map(batch_object, found)), has_more))


async def show_batch(request: Request, batch_id: str) -> Response:
    """Show a batch."""
    found = await context_of(request).store.batches.get(request.state.owner, batch_id)
    return json_response(batch_object(_found(found, batch_id)))


async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Cancel a batch. Finished lines become its output. A finished batch does not change."""
    context = context_of(request)
    row = _found(await context.store.batches.cancel(request.state.owner, batch_id), batch_id)
    context.wake()
    return json_response(batch_object(row))


def _new_batch(body: BatchRequest, file: FileRow, service: Service, now: int) -> BatchRow:
    paths = [route.path for route in ROUTES.values() if route.in_batches]
    if body.endpoint not in paths:
        raise bad_request(f"endpoint must be {' or '.join(paths)}, got {body.endpoint!r}", "endpoint")
    seconds = window_s(body.completion_window)
    if file.purpose != INPUT:
        raise bad_request(f"input_file_id must be a file of purpose {INPUT}, got {file.purpose}", "input_file_id")
    _ = service.info
    kept = body.output_expires_after
    return BatchRow(
        id=new_batch_id(),
        owner=file.owner,
        endpoint=body.endpoint,
        model=service.name,
        completion_window=body.completion_window,
        input_file_id=file.id,
        created_at=now,
        expires_at=now + seconds,
        metadata=body.metadata,
        output_expires_after_s=None if kept is None else kept.seconds,
    )


def _check_same(asked: BatchRow, made: BatchRow) -> None:
    """Raise 400 if the idempotency key belongs to a different batch. Clients would retry after a 409."""
    for name, field in _ASKED.items():
        if getattr(asked, field) != getattr(made, field):
            raise bad_request(
                f"Idempotency-Key was used for {made.id}, which has another {name}; use a new key for another batch",
                "Idempotency-Key",
                "idempotency_key_reused",
            )


def _found(row: BatchRow | None, batch_id: str, param: str | None = None) -> BatchRow:
    if row is None:
        raise ApiError(404, f"there is no batch {batch_id[:64]!r}", param=param)
    return row


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not (0 < len(key) <= _LONGEST_KEY and key.isprintable()):
        raise bad_request(f"Idempotency-Key must be 1 to {_LONGEST_KEY} printable characters", "Idempotency-Key")
    return key
