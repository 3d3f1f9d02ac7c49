"""Checks of answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from fuzz.case import HIDDEN, TRAILER, Case

# Error codes of 503 that a healthy server may return (docs/api.md), and error codes that may end a stream.
_BUSY = frozenset({"too_many_connections"})
_ENDS = frozenset({"deadline_exceeded", "slow_reader", "shutting_down"})
# Statuses of protocol errors, which occur before a request has an id.
_REFUSALS = (400, 408, 431)


@dataclass
class Answer:
    """Response as read so far."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_complete: bool = False

    def __str__(self) -> str:
        return f"{self.status} {self.body[:300]!r}"


def wrong_with(case: Case, answer: Answer, is_last: bool) -> str | None:
    """Return what is wrong with an answer, or None.

    Args:
        is_last: Whether the answer is the last one of its connection.
    """
    marker = answer.headers.get("x-request-id", "")
    if marker.startswith(HIDDEN):
        return "bytes inside a request were answered as a request"
    if marker.startswith(TRAILER):
        return "a trailer was treated as a header"
    if case.is_locked and answer.status < 400:
        return "a request without a key was answered"
    if case.statuses and answer.status not in case.statuses:
        return f"the status must be one of {sorted(case.statuses)}"
    if not answer.is_complete:
        return None if case.leaves or case.must_close or is_last else "an answer is incomplete"
    if "x-injected" in answer.headers:
        return "a response header was injected by the request"
    return wrong_body(answer.status, answer.headers, answer.body)


def wrong_body(status: int, headers: dict[str, str], body: bytes) -> str | None:
    """Return what is wrong with a complete answer to any request, or None."""
    kind = headers.get("content-type", "")
    if "x-request-id" not in headers and not (status in _REFUSALS and headers.get("connection") == "close"):
        return "there is no x-request-id"
    if status >= 400:
        return wrong_error(status, body)
    if kind.startswith("text/event-stream"):
        return _wrong_stream(body)
    if kind == "application/json":
        try:
            json.loads(body, parse_constant=_refuse)
        except ValueError as error:
            return f"the answer is not valid JSON: {error}"
    return None


def wrong_error(status: int, body: bytes) -> str | None:
    """Return what is wrong with an error, which must have OpenAI's form and be the client's fault, or None."""
    if not body and status in (404, 405):  # HEAD
        return None
    try:
        error = json.loads(body)["error"]
        is_whole = set(error) == {"message", "type", "param", "code"} and bool(error["message"])
    except (ValueError, KeyError, TypeError):
        is_whole, error = False, {}
    if not is_whole:
        return "the error does not have OpenAI's form"
    if status >= 500 and not (status == 503 and error["code"] in _BUSY):
        return "the server fails"
    return None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _wrong_stream(body: bytes) -> str | None:
    *events, rest = body.split(b"\n\n")
    if rest or not events:
        return "the stream is cut off"
    last = events[-1].removeprefix(b"data: ")
    if last == b"[DONE]":
        return None
    code = (json.loads(last).get("error") or {}).get("code")
    return None if code in _ENDS else f"the stream ended with {last[:300]!r}"
