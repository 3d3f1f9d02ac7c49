"""The one place where a client's wishes to the scheduler become `RequestOptions`."""

from __future__ import annotations

from collections.abc import Mapping

from skipjoin.core.request import RequestOptions
from skipjoin.server.api.errors import bad_request
from skipjoin.server.api.protocol import MAX_DEADLINE_MS, GenerationBody

_DEADLINE_HEADER = "x-request-deadline-ms"


def request_options(
    body: GenerationBody, headers: Mapping[str, str], default_deadline_s: float | None
) -> RequestOptions:
    """What the body asks for, or else the headers, or else the server's default. Raises 400 for a header that is out of
    bounds."""
    milliseconds = body.deadline_ms if body.deadline_ms is not None else _header_ms(headers)
    return RequestOptions(
        priority=body.priority or 0,
        deadline_s=milliseconds / 1000 if milliseconds is not None else default_deadline_s,
    )


def _header_ms(headers: Mapping[str, str]) -> int | None:
    text = headers.get(_DEADLINE_HEADER)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12 and 1 <= int(text) <= MAX_DEADLINE_MS):
        raise bad_request(f"{_DEADLINE_HEADER} must be an integer in [1, {MAX_DEADLINE_MS}]", _DEADLINE_HEADER)
    return int(text)
