"""The access guard: which requests are let in, and how large they may be. Pure ASGI, around everything else."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skipjoin.config.key_files import owner_of_key
from skipjoin.server.api.browsers import ANY_SITE, SiteRules, with_cors
from skipjoin.server.api.errors import ApiError, unauthorized

# Every other path needs a key, those that do not exist included.
OPEN_PATHS = frozenset(["/health", "/ready", "/live"])
# The owner where no key is asked for.
ANONYMOUS = "anonymous"
METRICS_PATH = "/metrics"
_MAX_ID = 128
_NOT_ID = re.compile(r"[^A-Za-z0-9._:@/+=-]")


class AccessGuard:
    """Checks the API key, the size and the site of every request, and gives each answer its `x-request-id`.

    api_keys: any of them is accepted; without any, no key is needed. metrics_keys: those accepted besides for /metrics,
    which needs one of either, if there are any. max_header_bytes: of all headers and the target. body_limits: by method
    and path, where a body may be larger than max_body_bytes. rules: which sites may cause a request. cors_origins:
    whose pages may read the answers. on_status: called with the status of each answer. `scope["state"]["owner"]` is a
    hash of the key, for routes that keep what they are given; `scope["state"]["on_owner"]`, if there is one, is called
    with it and may refuse it.
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
        if scope["type"] != "http":  # no route has a web socket
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._answer(scope, receive, send)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._on_status(message["status"])
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        limit = self._limits.get((scope["method"], scope["path"]), self._max_body)
        try:
            scope["state"]["owner"] = self._check(scope, limit)
        except ApiError as error:
            # The rest of the request is not read, so the connection cannot be used again.
            error.headers["Connection"] = "close"
            await error.response()(scope, receive, send_with_id)
            return
        await self.app(scope, _bounded(receive, limit), send_with_id)

    def _check(self, scope: Scope, limit: int) -> str:
        """The owner of what the request brings."""
        headers = scope["headers"]
        target = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if target + sum(len(name) + len(value) for name, value in headers) > self._max_header:
            raise ApiError(431, f"the request's target and headers must have at most {self._max_header} bytes")
        owner = _owner(headers, self._metrics_owners if scope["path"] == METRICS_PATH else self._owners)
        if not _is_open(scope):
            self._rules.check(headers)
            if owner is None:
                raise unauthorized()
            if (on_owner := scope["state"].get("on_owner")) is not None:
                on_owner(owner)
        for name, value in headers:
            if name == b"content-length" and (not value.isdigit() or int(value) > limit):
                raise _too_large(limit)
        return owner or ANONYMOUS


def _owner(headers: Iterable[tuple[bytes, bytes]], owners: Collection[str]) -> str | None:
    """Return a hash of the key; None where a key is needed, and there is none that is right. owners: hashes of all."""
    if not owners:
        return ANONYMOUS
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].partition(b" ")
    # Hashes are looked up, not keys: a client cannot choose how its hash begins, so the time taken reveals nothing, and
    # it does not grow with the number of keys.
    owner = owner_of_key(key.strip())
    return owner if scheme.lower() == b"bearer" and owner in owners else None


def _bounded(receive: Receive, limit: int) -> Receive:
    """`receive` that refuses a body that grows too large, whatever length its headers claim."""
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
