from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from skipjoin.routes import generating
from skipjoin.vllm.requests import MAX_PROGRAM, OBJECTIVES, TIERS, is_program, positive

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

TIER_HEADER = "x-service-tier"
PROGRAM_HEADERS = ("x-llm-d-inference-fairness-id", "x-program-id")
# Header of llm-d with a name that its operator chose.
_OBJECTIVE_HEADER = "x-llm-d-inference-objective"
# Headers, and their names in `vllm_xargs`. Of several with one name, the last wins.
_NAMES = {
    _OBJECTIVE_HEADER: "service_tier",
    TIER_HEADER: "service_tier",
    **dict.fromkeys(PROGRAM_HEADERS, "program_id"),
    **{f"x-slo-{name}-ms": f"slo_{name}_ms" for name in OBJECTIVES},
    **{f"x-llm-d-slo-{name}-ms": f"slo_{name}_ms" for name in OBJECTIVES},
}
_PATHS = frozenset(route.path for route in generating())


class RequestHeaders:
    """ASGI middleware that reads scheduling options from headers: `--middleware skipjoin.vllm.RequestHeaders`."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        found = _asked(scope) if scope["type"] == "http" and scope["path"] in _PATHS else {}
        if not found:
            await self._app(scope, receive, send)
            return
        for header, text in found.items():
            if (error := _problem(header, text)) is not None:
                await _refuse(send, header, error)
                return
        body, end = await _read(receive)
        if end is not None:  # the client is gone
            return
        changed = _with_xargs(body, {_NAMES[header]: found[header] for header in _NAMES if header in found})
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        scope = {**scope, "headers": [*headers, (b"content-length", str(len(changed)).encode())]}
        await self._app(scope, _replay(changed, receive), send)


def _asked(scope: MutableMapping[str, Any]) -> dict[str, str]:
    found = {
        header: value.decode("latin-1")
        for name, value in scope["headers"]
        if (header := name.decode("latin-1").lower()) in _NAMES
    }
    if found.get(_OBJECTIVE_HEADER) not in TIERS:  # a name of which only llm-d knows the priority
        found.pop(_OBJECTIVE_HEADER, None)
    return found


def _problem(header: str, text: str) -> str | None:
    if _NAMES[header] == "service_tier":
        return None if text in TIERS else f"{header} must be one of {', '.join(TIERS)}, got {text[:40]!r}"
    if header in PROGRAM_HEADERS:
        if is_program(text):
            return None
        return f"{header} must have 1 to {MAX_PROGRAM} characters, got {len(text)}"
    return None if positive(text) is not None else f"{header} must be a number above 0, got {text[:40]!r}"


async def _read(receive: Receive) -> tuple[bytes, Message | None]:
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"", message
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts), None


def _with_xargs(body: bytes, found: dict[str, str]) -> bytes:
    """Add the values to a body. vLLM rejects one that is not an object."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if not isinstance(fields, dict):
        return body
    given = fields.get("vllm_xargs")
    if given is not None and not isinstance(given, dict):
        return body
    fields["vllm_xargs"] = {**found, **(given or {})}
    return json.dumps(fields).encode()


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _refuse(send: Send, header: str, message: str) -> None:
    error = {"message": message, "type": "BadRequestError", "param": header, "code": 400}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
