from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from skipjoin.server.api.errors import bad_request
from skipjoin.server.api.fields import Body
from skipjoin.server.batches.records import BatchRow, BatchStatus, LineError

# OpenAI's bounds of metadata and of the expiry of output files.
_MAX_KEYS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512
_SHORTEST_S, _LONGEST_S = 3600, 30 * 86400
_MAX_WINDOW_S = 7 * 86400
_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_WINDOW = re.compile(r"([0-9]{1,6})([smh])")

MetadataKey = Annotated[str, Field(max_length=_LONGEST_KEY)]
MetadataValue = Annotated[str, Field(max_length=_LONGEST_VALUE)]


class ExpiresAfter(Body):
    """Expiry of output and error files, counted from their creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=_SHORTEST_S, le=_LONGEST_S)]


class BatchRequest(Body):
    """Body of POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=_LONGEST_VALUE)]
    endpoint: Annotated[str, Field(max_length=_LONGEST_VALUE)]
    completion_window: Annotated[str, Field(max_length=_LONGEST_KEY)]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=_MAX_KEYS)] | None = None
    output_expires_after: ExpiresAfter | None = None


def window_s(text: str) -> int:
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 1 <= seconds <= _MAX_WINDOW_S:
        raise bad_request(
            f"completion_window must be such as 24h, 90m or 20s, from 1s to 168h, got {text!r}",
            "completion_window",
        )
    return seconds


class ErrorList(msgspec.Struct, frozen=True):
    data: tuple[LineError, ...]
    object: str = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    """Numbers of lines. Expired and cancelled lines count neither as completed nor as failed."""

    total: int
    completed: int
    failed: int


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    output_tokens_details: OutputDetails = OutputDetails()


class BatchObject(msgspec.Struct, frozen=True):
    id: str
    endpoint: str
    model: str | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    metadata: dict[str, str] | None
    errors: ErrorList | None
    request_counts: RequestCounts
    usage: BatchUsage
    object: str = "batch"


class BatchList(msgspec.Struct, frozen=True):
    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


# Fields that row and object have in common.
_SAME = tuple(name for name in BatchObject.__struct_fields__ if name in BatchRow.__dataclass_fields__)
_CHANGED = ("metadata", "errors")


def batch_object(row: BatchRow) -> BatchObject:
    same = {name: getattr(row, name) for name in _SAME if name not in _CHANGED}
    tokens = row.prompt_tokens, row.completion_tokens
    return BatchObject(
        **same,
        metadata=None if row.metadata is None else dict(row.metadata),
        errors=ErrorList(row.errors) if row.errors else None,
        request_counts=RequestCounts(row.total, row.completed, row.failed),
        usage=BatchUsage(*tokens, sum(tokens), InputDetails(row.cached_tokens)),
    )


def batch_list(rows: list[BatchRow], has_more: bool) -> BatchList:
    first, last = (rows[0].id, rows[-1].id) if rows else (None, None)
    return BatchList([batch_object(row) for row in rows], has_more, first, last)
