from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from skipjoin.server.api.errors import bad_request
from skipjoin.server.api.fields import Body
from skipjoin.server.batches.records import BatchRow

# OpenAI's bounds of metadata and of the expiry of output files.
_MAX_KEYS, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512
_SHORTEST_S, _LONGEST_S = 3600, 30 * 86400
_MAX_WINDOW_S = 7 * 86400
_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_WINDOW = re.compile(r"([0-9]{1,6})([smh])")

MetadataKey = Annotated[str, Field(max_length=_LONGEST_KEY)]
MetadataValue = Annotated[str, Field(max_length=_LONGEST_VALUE)]


class ExpiresAfter(Body):
    """Expiry of output and error files."""

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


# Fields that row and object have in common.
_SAME = (
    *("id", "endpoint", "model", "input_file_id", "completion_window", "status", "output_file_id", "error_file_id"),
    *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
    *("cancelling_at", "cancelled_at", "metadata"),
)


def batch_object(row: BatchRow) -> dict[str, Any]:
    """Return OpenAI's object of a batch. Expired and cancelled lines count neither as completed nor as failed."""
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
