"""Lines of the error file for requests that did not run to their end."""

from __future__ import annotations

import hashlib

import msgspec

from skipjoin.server.batches.records import LineState

# OpenAI's words, which clients compare.
_ERRORS = {
    LineState.EXPIRED: {
        "code": "batch_expired",
        "message": "This request could not be executed before the completion window expired.",
    },
    LineState.CANCELLED: {
        "code": "batch_cancelled",
        "message": "This request was not executed because the batch was cancelled.",
    },
}


def request_id(batch_id: str, custom_id: str) -> str:
    """The id of a line's answer: the same whenever, and wherever, the line runs."""
    return f"batch_req_{hashlib.sha256(f'{batch_id} {custom_id}'.encode()).hexdigest()[:32]}"


def closed_line(batch_id: str, custom_id: str, state: LineState) -> bytes:
    """JSON of a line that has expired or was cancelled."""
    line = {
        "id": request_id(batch_id, custom_id),
        "custom_id": custom_id,
        "response": None,
        "error": _ERRORS[state],
    }
    return msgspec.json.encode(line)
