"""Error responses in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import Scope

from skipjoin.adapters import unknown_model
from skipjoin.routes import dialect_of, resolved
from skipjoin.sampling import ContextLengthError, ParameterError
from skipjoin.server.api.notes import note_of
from skipjoin.server.engines.errors import EngineError, EngineHungError, LostRequestError, NoReplicaError, RefusedError

logger = logging.getLogger(__name__)

# Clients and gateways choose their exception by status, then by this type.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large", 431: "headers_too_large"}
# Code of `ContextLengthError`, which clients look for.
CONTEXT_LENGTH = "context_length_exceeded"
# Time for which a server without an engine answers before it exits, and in which a supervisor starts a small model.
DEATH_GRACE_S, _RESTART_S = 10.0, 5.0
# Maximum characters of a message, which may quote text of the request.
_LONGEST_TEXT = 1000


class ApiError(Exception):
    """Error response. `param` is the invalid field; `is_of_client`: the limit is one client's, not the server's."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        is_of_client: bool = False,
    ) -> None:
        super().__init__(message)
        self.is_of_client = is_of_client
        self.status = status
        self.message = message if len(message) <= _LONGEST_TEXT else message[:_LONGEST_TEXT] + "..."
        self.code = code if code is not None else _CODES.get(status)
        self.param = param if param is None else param[:_LONGEST_TEXT]
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        # A message may quote text that is not valid Unicode.
        clean = {name: value and value.encode("utf-8", "replace").decode() for name, value in error.items()}
        return msgspec.json.encode({"error": clean})

    def response(self, scope: Scope) -> Response:
        route = dialect_of(scope["method"], scope["path"])
        shaped, status = self.body, self.status
        if route is not None and route.error_body is not None:
            shaped = partial(resolved(route.error_body), self)
        if route is not None and route.error_status is not None:
            status = resolved(route.error_status)(self)
        return Response(shaped(), status, self.headers, "application/json")

    def last_response(self) -> bytes:
        body = self.body()
        head = (
            f"HTTP/1.1 {self.status} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, code=code, param=param)


def unauthorized(*, is_sent: bool) -> ApiError:
    why = "the API key that was sent is none of this server's" if is_sent else "this server needs an API key"
    return ApiError(
        401,
        f"{why}: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def model_not_found(name: str, served: Sequence[str]) -> ApiError:
    return ApiError(404, unknown_model(repr(name), served), code="model_not_found")


def overloaded(
    message: str,
    retry_after_s: float,
    *,
    is_of_client: bool = False,
    position: int | None = None,
    wait_s: float | None = None,
) -> ApiError:
    """Return 429. The place in the queue is the one that the request would have had."""
    headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    if position is not None:
        headers["x-queue-position"] = str(position)
    if wait_s is not None:
        headers["x-estimated-wait-ms"] = str(math.ceil(1000 * wait_s))
    return ApiError(429, message, code="queue_full", headers=headers, is_of_client=is_of_client)


def unavailable(message: str, code: str, retry_after_s: int = 5) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after_s)})


def too_many_connections(whose: str, most: float) -> ApiError:
    text = f"there are {most:g} connections of this {whose}, the most that this server allows: use fewer"
    return ApiError(429, text, code="too_many_connections", headers={"Retry-After": "1"})


def from_engine(error: EngineError) -> ApiError:
    if isinstance(error, RefusedError):
        return bad_request(str(error), error.param)
    if isinstance(error, LostRequestError):
        return final(500, str(error), "engine_lost")
    if isinstance(error, NoReplicaError):
        return unavailable("no replica of the engine is alive; replicas are being restarted", "no_replica")
    if isinstance(error, EngineHungError):
        return unavailable("the engine makes no progress; it is ended if that goes on", "engine_hung")
    # Clients give up after a few retries. So the first one should find the server that a supervisor has started.
    again_s = math.ceil(DEATH_GRACE_S + _RESTART_S)
    return unavailable("the engine has stopped; the server is shutting down", "engine_dead", again_s)


def final(status: int, message: str, code: str) -> ApiError:
    return ApiError(status, message, code=code, headers={"x-should-retry": "false"})


def deadline_exceeded() -> ApiError:
    return final(408, "the request's deadline passed before it was done", "deadline_exceeded")


def request_not_found(name: str, *, is_live: bool = False) -> ApiError:
    when = "live" if is_live else "live or finished in the last ten minutes"
    return ApiError(
        404,
        f"no request {name[:200]!r} is {when}: ids are those of responses or of the header x-request-id, and refused "
        "requests have no history",
        code="request_not_found",
    )


def from_parameter(error: ParameterError) -> ApiError:
    return bad_request(str(error), error.param, CONTEXT_LENGTH if isinstance(error, ContextLengthError) else None)


def unknown_field(param: str) -> ApiError:
    return bad_request(f"unknown or unsupported field {param!r}", param, "unknown_parameter")


def from_validation(error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_context=False)
    if found[0]["type"] == "missing":  # a body of another endpoint is known by what it has
        found.sort(key=lambda entry: entry["type"] != "extra_forbidden")
    param = _path(found[0]["loc"])
    if found[0]["type"] == "extra_forbidden":
        return unknown_field(param or "")
    if found[0]["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {found[0]['msg'].removeprefix('Invalid JSON: ')}")
    reasons = dict.fromkeys(
        entry["msg"].removeprefix("Value error, ") for entry in found if _path(entry["loc"]) == param
    )
    where = param or "the body"
    return bad_request(f"{where}: {'; '.join(reasons)}", param)


def _path(location: tuple[int | str, ...]) -> str | None:
    parts = [str(part) for part in location if isinstance(part, int) or not part.startswith(_INTERNAL)]
    return ".".join(parts) or None


# Prefix of the union tags in `protocol`, and pydantic's mark of an invalid key.
_INTERNAL = ("~", "[key]")


def _no_route(app: FastAPI, request: Request) -> str:
    path = request.url.path
    paths = {route.path.partition("{")[0].rstrip("/") for route in app.routes if isinstance(route, Route)}
    routes = sorted(path for path in paths if path and not path.startswith("/console/"))
    similar = [found for found in routes if path.strip("/") and found.endswith(path.rstrip("/"))]
    similar = similar or difflib.get_close_matches(path[:128], routes, 1)
    hint = f", did you mean {similar[0]}?" if similar else "."
    if path in routes:
        hint = f": its requests name an id, as in {path}/ID."
    return f"no such path: {request.method} {path[:128]}{hint} There are {', '.join(routes)}"


def _routes_at(app: FastAPI, request: Request) -> list[Route]:
    routes = (route for route in app.routes if isinstance(route, Route))
    return [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]


def install(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        note_of(request.scope).reason = error.code or ""
        return error.response(request.scope)

    @app.exception_handler(EngineError)
    async def on_engine_error(request: Request, error: EngineError) -> Response:
        return await on_api_error(request, from_engine(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        status, message, headers = error.status_code, str(error.detail), error.headers
        if status == 404:
            message = _no_route(app, request)
        elif status == 405:
            found, path = _routes_at(app, request), request.url.path[:128]
            methods = ", ".join(sorted({method for route in found for method in route.methods or ()}))
            if request.method == "POST" and all("{" in route.path for route in found):
                # An operation, such as `compact`, where only the id of an object would have other methods.
                status, message = 404, f"this server does not offer POST {path}"
            else:
                message, headers = f"{path} has no method {request.method[:16]}: use {methods}", {"Allow": methods}
        return ApiError(status, message, headers=headers).response(request.scope)

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # never sent, but ASGI needs a response

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        # The text of an unexpected exception may contain secrets, so it is only logged.
        text = "internal error; the server's log has the details"
        return ApiError(500, text, code="internal_error").response(request.scope)
