from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skipjoin.server.api.auth import viewer_of
from skipjoin.server.api.browsers import json_body
from skipjoin.server.api.errors import ApiError, bad_request, from_engine, request_not_found
from skipjoin.server.api.fields import Body
from skipjoin.server.api.generation import BodyT, Endpoint
from skipjoin.server.api.jobs import Job, JobRun, Origin
from skipjoin.server.api.notes import note_of
from skipjoin.server.api.options import request_options
from skipjoin.server.api.responses import encode
from skipjoin.server.api.service import Service
from skipjoin.server.api.structured import may_compile
from skipjoin.server.engines.errors import EngineError

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")
RequestT = TypeVar("RequestT", bound=Body)
# Reason in the log if the client disconnects early.
_DISCONNECTED = "disconnected"

# Seconds after which a stream tells its place in the queue, and between two such comments.
_FIRST_NOTE_S, _NEXT_NOTE_S = 1.0, 5.0
_EVENTS = "text/event-stream"
# Proxies would hold events back.
_NO_BUFFERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
# Bytes of a response that are sent at a time.
_CHUNK_BYTES = 1 << 16


class DisconnectedError(Exception):
    pass


async def answer(request: Request, endpoint: Endpoint[BodyT]) -> Response:
    arrived = time.monotonic()
    service = endpoint.service
    body = await service.parse(await json_body(request, has_any_type=endpoint.route.has_any_type), endpoint.body_type)
    if (found := endpoint.ready(body)) is not None:
        return json_response(found)
    state = request.state
    state.request_id = body.request_id or state.request_id
    options = request_options(body, request.headers, service.config, state.owner, state.request_id)
    origin = Origin(options=options, arrived=arrived, owner=state.owner, request_id=state.request_id)
    preparing = endpoint.prepare(body, origin)
    # Only constraints wait for those of other requests.
    job = await (_while_connected(request.receive, preparing) if may_compile(body) else preparing)
    return (StreamReply if body.is_streamed else WholeReply)(endpoint, job)


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnection(receive))
    watcher.add_done_callback(lambda _: task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        if watcher.done():
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_request(request: Request, name: str) -> Response:
    """Cancel a live request of the key, by the id of its response or its `x-request-id`. Its client gets a 409."""
    service = service_of(request)
    found = service.index.find(name, viewer_of(service.config, request.state.owner).owner)
    if found is None or found.ended is not None:
        raise request_not_found(name, is_live=True)
    if not found.request_id:
        raise bad_request(f"{name[:200]!r} is a line of a batch: cancel the batch", "id")
    found.cancel()
    return json_response({"id": found.response_id, "object": "request", "canceled": True})


class JsonReply(Response):
    """JSON response, of which one piece is buffered for a slow client.

    `on_end` is called after the last byte was passed on, or sending failed.
    """

    media_type = "application/json"

    def __init__(self, content: bytes, on_end: Callable[[], None] = lambda: None) -> None:
        super().__init__(content)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytes(self.body)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for at in range(0, max(1, len(body)), _CHUNK_BYTES):
                end = at + _CHUNK_BYTES
                await send({"type": "http.response.body", "body": body[at:end], "more_body": end < len(body)})
        finally:
            self._on_end()


def service_of(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


async def open_body(request: Request, kind: type[RequestT]) -> tuple[Service, RequestT]:
    """Return the service, if it accepts requests, and the body, if its model is known."""
    service = service_of(request)
    service.check_open()
    body = await service.parse(await json_body(request), kind)
    service.check_model(body.model)  # type: ignore[attr-defined]
    return service, body


def json_response(content: Any) -> Response:
    return JsonReply(encode(content))


@asynccontextmanager
async def _watched(endpoint: Endpoint[BodyT], job: Job, scope: Scope, receive: Receive) -> AsyncIterator[JobRun]:
    endpoint.service.busy += 1
    try:
        async with endpoint.run(job) as run:
            note_of(scope).run = run
            watcher = asyncio.create_task(_watch(receive, run))
            try:
                yield run
            finally:
                watcher.cancel()
    finally:
        endpoint.service.busy -= 1


async def _watch(receive: Receive, run: JobRun) -> None:
    await _disconnection(receive)
    run.fail(DisconnectedError())


class _JobReply(Response):
    def __init__(self, endpoint: Endpoint[Any], job: Job) -> None:
        super().__init__()
        self._endpoint, self._job = endpoint, job


class WholeReply(_JobReply):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with _watched(self._endpoint, self._job, scope, receive) as run:
                await JsonReply(await run.whole())(scope, receive, send)
        except DisconnectedError:
            note_of(scope).reason = _DISCONNECTED
            await Response(status_code=499)(scope, receive, send)  # never sent, but ASGI needs a response


class StreamReply(_JobReply):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        frames = self._endpoint.route.frames
        assert frames is not None
        headers = [(b"content-type", frames.media_type.encode()), *_NO_BUFFERS]
        try:
            # An error before the stream starts has its own status.
            async with _watched(self._endpoint, self._job, scope, receive) as run:
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                try:
                    # In its own task, because each token would otherwise resume all enclosing calls of the framework.
                    last = await asyncio.create_task(self._send_all(run, send))
                except ApiError as error:
                    last = self._failed(scope, error)
                except EngineError as error:
                    last = self._failed(scope, from_engine(error))
                except DisconnectedError:
                    note_of(scope).reason = _DISCONNECTED
                    last = b""
                except Exception:
                    logger.exception("a stream failed")
                    last = self._failed(scope, ApiError(500, "internal error", code="internal_error"))
                run.stop()
                # The admission slots are held until the client has read the earlier events.
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except DisconnectedError:
            return

    async def _send_all(self, run: JobRun, send: Send) -> bytes:
        form, body = self._job.format, b""
        if begun := form.begin(run.usage()):
            await send({"type": "http.response.body", "body": begun, "more_body": True})
        if (frames := self._endpoint.route.frames) is not None and frames.media_type.startswith(_EVENTS):
            await _tell_place(run, send)
        async for deltas in run:
            body = b""
            for choice, text in deltas.items():
                body += await run.item(choice, text)
            if body and not run.is_finished:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        return body + await run.end()

    def _failed(self, scope: Scope, error: ApiError) -> bytes:
        note_of(scope).reason = error.code or ""
        return self._job.format.error(error)


async def _tell_place(run: JobRun, send: Send) -> None:
    """Send comments with the place in the queue until there is output."""
    wait_s = _FIRST_NOTE_S
    while True:
        # Not a task, whose end the event loop would notice only after more output.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                return await run.ready()
        if (place := run.queue_place) is None:
            return
        position, left_s = place
        left = "" if left_s is None else f", x-estimated-wait-ms {math.ceil(1000 * left_s)}"
        note = f": x-queue-position {position}{left}\n\n".encode()
        await send({"type": "http.response.body", "body": note, "more_body": True})
        wait_s = _NEXT_NOTE_S


def listed(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, "has_more": has_more, **ends}


def limit_of(query: Mapping[str, str], *, most: int, default: int) -> int:
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise bad_request(f"limit must be an integer in [1, {most}], got {text!r}", "limit")
    return int(text)
