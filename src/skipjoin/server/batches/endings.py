from __future__ import annotations

import hashlib

import msgspec

from skipjoin.server.batches.records import LineState

# OpenAI's codes and messages, which clients compare.
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
    """Return the id of a line's response, the same in all attempts."""
    return f"batch_req_{hashlib.sha256(f'{batch_id} {custom_id}'.encode()).hexdigest()[:32]}"


def closed_line(batch_id: str, custom_id: str, state: LineState) -> bytes:
    line = {
        "id": request_id(batch_id, custom_id),
        "custom_id": custom_id,
        "response": None,
        "error": _ERRORS[state],
    }
    return msgspec.json.encode(line)
