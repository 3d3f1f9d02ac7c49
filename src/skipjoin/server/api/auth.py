from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skipjoin.config import ServerConfig
from skipjoin.config.key_files import owner_of_key
from skipjoin.routes import Access, paths
from skipjoin.server.api.browsers import ANY_SITE, SiteRules, with_cors
from skipjoin.server.api.errors import ApiError, unauthorized

# Owner of requests to a server without keys.
ANONYMOUS = "anonymous"
# Anthropic's clients send the second.
_KEY_HEADERS = (b"authorization", b"x-api-key")
_MAX_ID = 128
_NOT_ID = re.compile(r"[^A-Za-z0-9._:@/+=-]")


class AccessGuard:
    """ASGI middleware that checks API key, size and origin, and adds an `x-request-id` to the response.

    It sets `scope["state"]["owner"]` to a hash of the key, and calls `scope["state"]["on_owner"]`, which may raise
    `ApiError`, with it. `metrics_keys` are further keys for paths of metrics.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Iterable[str],
        max_header_bytes: int,
        max_body_bytes: int,
        body_limits: Mapping[tuple[str, str], int] | None = None,
        rules: SiteRules = ANY_SITE,
        cors_origins: Sequence[str] = (),
        metrics_keys: Iterable[str] = (),
        on_status: Callable[[int], None] = lambda status: None,
    ) -> None:
        self.app = app
        # All other paths need a key, including paths that do not exist.
        self._open_paths = paths(Access.OPEN, Access.PROBE)
        self._metrics_paths = paths(Access.METRICS)
        self._rules = rules
        self._answer = with_cors(self._guarded, cors_origins)
        self._limits = dict(body_limits or {})
        self._owners = frozenset(owner_of_key(key.encode()) for key in api_keys)
        self._metrics_owners = self._owners.union(owner_of_key(key.encode()) for key in metrics_keys)
        self._on_status = on_status
        self._max_header = max_header_bytes
        self._max_body = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no WebSocket routes
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._answer(scope, receive, send)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state["request_id"] = _request_id(scope)  # that a body may replace

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._on_status(message["status"])
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", state["request_id"].encode())]
            await send(message)

        limit = self._limits.get((scope["method"], scope["path"]), self._max_body)
        try:
            scope["state"]["owner"] = self._check(scope, limit)
        except ApiError as error:
            # The rest of the request is not read, so the connection cannot be reused.
            error.headers["Connection"] = "close"
            await error.response(scope)(scope, receive, send_with_id)
            return
        await self.app(scope, _bounded(receive, limit), send_with_id)

    def _check(self, scope: Scope, limit: int) -> str:
        headers = scope["headers"]
        target = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if target + sum(len(name) + len(value) for name, value in headers) > self._max_header:
            raise ApiError(431, f"the request's target and headers must have at most {self._max_header} bytes")
        owner = _owner(headers, self._metrics_owners if scope["path"] in self._metrics_paths else self._owners)
        if not self._is_open(scope):
            self._rules.check(headers)
            if owner is None:
                raise unauthorized(is_sent=any(name in _KEY_HEADERS for name, _ in headers))
            if (on_owner := scope["state"].get("on_owner")) is not None:
                on_owner(owner)
        for name, value in headers:
            if name == b"content-length" and (not value.isdigit() or int(value) > limit):
                raise _too_large(limit)
        return owner or ANONYMOUS

    def _is_open(self, scope: Scope) -> bool:
        """Sent and routed path must match exactly."""
        path, raw = scope["path"], scope.get("raw_path")
        return path in self._open_paths and not scope.get("root_path") and (raw is None or raw == path.encode())


def _owner(headers: Iterable[tuple[bytes, bytes]], owners: Collection[str]) -> str | None:
    if not owners:
        return ANONYMOUS
    # Both may be there, with one key.
    found = {_owner_of(name, value) for name, value in headers if name in _KEY_HEADERS}
    return owner if len(found) == 1 and (owner := found.pop()) in owners else None


def _owner_of(name: bytes, value: bytes) -> str | None:
    scheme, _, key = (b"bearer", b"", value) if name == b"x-api-key" else value.partition(b" ")
    # Look up the hash, not the key: clients cannot choose the prefix of a hash, so timing reveals nothing.
    return owner_of_key(key.strip()) if scheme.lower() == b"bearer" else None


def _bounded(receive: Receive, limit: int) -> Receive:
    taken = 0

    async def bounded() -> Message:
        nonlocal taken
        message = await receive()
        if message["type"] == "http.request":
            taken += len(message.get("body", b""))
            if taken > limit:
                raise _too_large(limit, {"Connection": "close"})
        return message

    return bounded


def _too_large(limit: int, headers: Mapping[str, str] | None = None) -> ApiError:
    return ApiError(413, f"the body must have at most {limit} bytes", headers=headers)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and (clean := _NOT_ID.sub("", value.decode("latin-1"))[:_MAX_ID]):
            return clean
    return uuid.uuid4().hex


class Viewer(NamedTuple):
    """What a key may see: requests of `owner` (None: all), and figures over all keys, which reveal others' lengths."""

    key: str
    owner: str | None
    has_totals: bool


def viewer_of(config: ServerConfig, key: str) -> Viewer:
    sees_all = key == ANONYMOUS or config.rights_of(key).is_operator
    return Viewer(key, None if sees_all else key, sees_all or len(set(config.api_keys)) == 1)
