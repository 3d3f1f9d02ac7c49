"""Batches in JSON, as OpenAI's clients read them, and the body that makes one."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from skipjoin.server.api.errors import bad_request
from skipjoin.server.api.protocol import Body
from skipjoin.server.batches.records import BatchRow, BatchStatus, LineError

# OpenAI's bounds of metadata, and of the time that an output is kept.
_MOST_KEYS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512
_SHORTEST_S, _LONGEST_S = 3600, 30 * 86400
_MOST_WINDOW_S = 7 * 86400
_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_WINDOW = re.compile(r"([0-9]{1,6})([smh])")

MetadataKey = Annotated[str, Field(max_length=_LONGEST_KEY)]
MetadataValue = Annotated[str, Field(max_length=_LONGEST_VALUE)]


class ExpiresAfter(Body):
    """How long output and error file are kept, from the time that they are written."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=_SHORTEST_S, le=_LONGEST_S)]


class BatchRequest(Body):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=_LONGEST_VALUE)]
    endpoint: Annotated[str, Field(max_length=_LONGEST_VALUE)]
    completion_window: Annotated[str, Field(max_length=_LONGEST_KEY)]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=_MOST_KEYS)] | None = None
    output_expires_after: ExpiresAfter | None = None


def window_s(text: str) -> int:
    """Seconds of a completion window, such as 24h, 90m or 20s. Raises 400."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 1 <= seconds <= _MOST_WINDOW_S:
        raise bad_request(
            f"completion_window must be such as 24h, 90m or 20s, from 1s to 168h, got {text!r}",
            "completion_window",
        )
    return seconds


class ErrorList(msgspec.Struct, frozen=True):
    """Why a batch was refused."""

    data: tuple[LineError, ...]
    object: str = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    """Lines of a batch. failed: those whose request was answered with an error; lines that expired or were cancelled
    are in neither count."""

    total: int
    completed: int
    failed: int


class InputDetails(msgspec.Struct, frozen=True):
    """cached_tokens: tokens of the prompts whose KV was there when they first ran."""

    cached_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """reasoning_tokens: they are not told apart."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, frozen=True):
    """Tokens of the lines that have ended."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails = InputDetails()
    output_tokens_details: OutputDetails = OutputDetails()


class BatchObject(msgspec.Struct, frozen=True):
    """A batch. Times are Unix seconds."""

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
    """A page of batches. first_id, last_id: of the page; null where it is empty."""

    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


# The fields that row and object have in common.
_SAME = tuple(name for name in BatchObject.__struct_fields__ if name in BatchRow.__dataclass_fields__)
_CHANGED = ("metadata", "errors")


def batch_object(row: BatchRow) -> BatchObject:
    """A batch as clients see it."""
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
    """A page."""
    first, last = (rows[0].id, rows[-1].id) if rows else (None, None)
    return BatchList([batch_object(row) for row in rows], has_more, first, last)
