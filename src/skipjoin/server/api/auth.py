"""The access guard: which requests are let in, and how large they may be. Pure ASGI, around everything else."""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skipjoin.server.api.errors import ApiError, unauthorized

# Every other path needs a key, those that do not exist included.
OPEN_PATHS = frozenset(["/health", "/ready", "/live"])
_MAX_ID = 128
_NOT_ID = re.compile(r"[^A-Za-z0-9._:@/+=-]")


class AccessGuard:
    """Checks the API key and the size of every request, and gives each answer its `x-request-id`.

    api_keys: any of them is accepted; without any, no key is needed. max_header_bytes: of all headers and the target.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Iterable[str], max_header_bytes: int, max_body_bytes: int) -> None:
        self.app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_header = max_header_bytes
        self._max_body = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no route has a web socket
            await send({"type": "websocket.close", "code": 1008})
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._check(scope)
        except ApiError as error:
            # The rest of the request is not read, so the connection cannot be used again.
            error.headers["Connection"] = "close"
            await error.response()(scope, receive, send_with_id)
            return
        await self.app(scope, self._bounded(receive), send_with_id)

    def _check(self, scope: Scope) -> None:
        headers = scope["headers"]
        target = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if target + sum(len(name) + len(value) for name, value in headers) > self._max_header:
            raise ApiError(431, f"the request's target and headers must have at most {self._max_header} bytes")
        if self._keys and not _is_open(scope) and not self._has_key(headers):
            raise unauthorized()
        for name, value in headers:
            if name == b"content-length" and (not value.isdigit() or int(value) > self._max_body):
                raise self._too_large()

    def _has_key(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        values = [value for name, value in headers if name == b"authorization"]
        if len(values) != 1:
            return False
        scheme, _, key = values[0].partition(b" ")
        # Every key is compared, each in constant time, so that the time taken reveals nothing.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)

    def _bounded(self, receive: Receive) -> Receive:
        """`receive` that refuses a body that grows too large, whatever length its headers claim."""
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                if taken > self._max_body:
                    raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> ApiError:
        text = f"the body must have at most {self._max_body} bytes"
        return ApiError(413, text, headers={"Connection": "close"})


def _is_open(scope: Scope) -> bool:
    """Whether the path, exactly as it was sent and as it is routed, needs no key."""
    path = scope["path"]
    raw = scope.get("raw_path")
    return path in OPEN_PATHS and not scope.get("root_path") and (raw is None or raw == path.encode())


def _request_id(scope: Scope) -> str:
    """The client's id without characters that do not belong in a header or a log, or a new id. Only headers have it."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and (clean := _NOT_ID.sub("", value.decode("latin-1"))[:_MAX_ID]):
            return clean
    return uuid.uuid4().hex
