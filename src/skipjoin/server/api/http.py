"""uvicorn, with bounds on what a connection may take, and without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from skipjoin.server.api.auth import OPEN_PATHS
from skipjoin.server.api.errors import ApiError, unavailable

# Connections that may wait to be accepted, so that the kernel refuses none of a burst.
BACKLOG = 2048
# Longer than clients' pools keep idle connections, so that the client closes them and not the server.
KEEP_ALIVE_S = 75
# Seconds for answers that are being written when the server ends.
LAST_ANSWERS_S = 2
# Connections beyond the most, for /health and its like.
SPARE = 32
# Descriptors of this process besides connections: files, databases, libraries; and the sockets of each engine.
RESERVED, PER_ENGINE = 80, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of connections.

    max_header_bytes: of a request's head. max_connections: for one beyond it the one that is idle for the longest time
    makes way. head_s: seconds for a head, from the connection or the head's first byte. body_s: seconds for a body, to
    which each `body_bytes_per_s` that arrive add one. write_s: seconds in which a client takes `_TAKEN_BYTES` of an
    answer, or all that is left.
    """

    max_header_bytes: int
    max_connections: int = 4096
    head_s: float = 20.0
    body_s: float = 20.0
    body_bytes_per_s: int = 4096
    write_s: float = 60.0


# A client that takes fewer bytes of an answer in `write_s` does not read it.
_TAKEN_BYTES = 1 << 16


class Connections:
    """The open connections of a server, and which of them are idle: without a request that is being answered, or whose
    body arrives.

    refused: called for each that the server refuses or ends, with one of `CONNECTION_REFUSALS` (`metric_table.py`).
    """

    def __init__(self, most: int, refused: Callable[[str], None]) -> None:
        self.refused = refused
        self._most = most
        self._open: set[BoundedProtocol] = set()
        self._idle: dict[BoundedProtocol, None] = {}  # the one that is idle for the longest time first

    def enter(self, connection: BoundedProtocol) -> bool:
        """Take a new connection, for which an idle one makes way if there are too many; whether there is room."""
        if len(self._open) >= self._most and self._idle:
            oldest = next(iter(self._idle))
            self.leave(oldest)
            self.refused("idle")
            oldest.abort()
        if len(self._open) >= self._most + SPARE:
            return False
        self._open.add(connection)
        self._idle[connection] = None
        return True

    @property
    def is_over(self) -> bool:
        """Whether only spare connections are left."""
        return len(self._open) > self._most

    def leave(self, connection: BoundedProtocol) -> None:
        """Forget a connection."""
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def set_busy(self, connection: BoundedProtocol) -> None:
        """It has a request now."""
        self._idle.pop(connection, None)

    def set_idle(self, connection: BoundedProtocol) -> None:
        """Its request has been answered."""
        if connection in self._open:
            self._idle[connection] = None


class BoundedProtocol(HttpToolsProtocol):
    """A connection within its bounds.

    It counts the bytes of a head as they arrive; the application checks a head that is complete. One timer runs while
    the client is to send, another while it is to read.
    """

    limits: ConnectionLimits
    pool: Connections

    _head_bytes = 0  # of a head that is not complete yet
    _in_head = True
    _advanced = False
    _is_spare = False
    _body_begin = 0.0  # on the loop's clock
    _body_bytes = 0
    _send_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    # -- the connection -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self.pool.enter(self):
            self.pool.refused("no_room")
            self.abort()
            return
        self._is_spare = self.pool.is_over
        self._expect_by(self.limits.head_s, self._on_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self.pool.leave(self)
        self._expect_nothing()
        self._stop_reading_timer()
        super().connection_lost(exc)

    def abort(self) -> None:
        """End the connection without a word."""
        self.transport.abort()

    # -- what the client sends ----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        was_in_head = self._in_head
        self._advanced = False
        if was_in_head and self._send_timer is None:
            self._expect_by(self.limits.head_s, self._on_late_head)
        super().data_received(data)
        # Bytes that arrive together with the end of a head or body are not counted: they are one read at most.
        if was_in_head and not self._advanced and not self.transport.is_closing():
            self._head_bytes += len(data)
            if (most := self.limits.max_header_bytes) < self._head_bytes:
                self._refuse(ApiError(431, f"the request's head must have at most {most} bytes"), "invalid")

    def on_headers_complete(self) -> None:
        self._in_head, self._advanced = False, True
        self.pool.set_busy(self)
        self._body_begin, self._body_bytes = self.loop.time(), 0
        self._expect_by(self.limits.body_s, self._on_late_body)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._advanced, self._head_bytes = True, True, 0
        self._expect_nothing()
        super().on_message_complete()
        self._rest_if_done()

    def _expect_by(self, seconds: float, on_late: Callable[[], None]) -> None:
        self._expect_nothing()
        self._send_timer = self.loop.call_later(seconds, on_late)

    def _expect_nothing(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _on_late_head(self) -> None:
        if self._is_answering:  # the head of a further request: there is time until this one is answered
            self._expect_by(self.limits.head_s, self._on_late_head)
        elif self._head_bytes:
            self._refuse(ApiError(408, f"the request's head must be complete within {self.limits.head_s:g} s"), "late")
        else:
            self.pool.refused("late")
            self.abort()

    def _on_late_body(self) -> None:
        limits, now = self.limits, self.loop.time()
        if self.flow.read_paused:  # the application does not read
            self._body_begin, self._body_bytes = now, 0
        due = self._body_begin + limits.body_s + self._body_bytes / limits.body_bytes_per_s
        if now < due:
            self._expect_by(due - now, self._on_late_body)
        elif self.cycle.response_started:
            self.pool.refused("late")
            self.abort()
        else:
            text = f"{limits.body_s:g} s and a second more for each {limits.body_bytes_per_s} bytes"
            self._refuse(ApiError(408, f"the body must be complete within {text}"), "late")

    # -- what the client reads ----------------------------------------------------------------------------

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_reading_timer()
        super().resume_writing()

    def _watch_reader(self) -> None:
        self._stop_reading_timer()
        unread = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(self.limits.write_s, self._check_reader, unread)

    def _check_reader(self, unread: int) -> None:
        if unread - self.transport.get_write_buffer_size() < _TAKEN_BYTES:
            self.pool.refused("slow_reader")
            self.abort()
        else:
            self._watch_reader()

    def _stop_reading_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._rest_if_done()
        elif self.transport.get_write_buffer_size():
            self._watch_reader()

    def _rest_if_done(self) -> None:
        if self._in_head and not self._is_answering and not self.pipeline:
            self.pool.set_idle(self)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            super().timeout_keep_alive_handler()

    # -- refusals -----------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._is_spare:
            cycle.keep_alive = False
            if cycle.scope["path"] not in OPEN_PATHS:
                self.pool.refused("no_room")
                app = _no_room
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "the request is not valid HTTP", code="invalid_http"), "invalid")

    def _refuse(self, error: ApiError, reason: str) -> None:
        self.pool.refused(reason)
        self._expect_nothing()
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._watch_reader()


async def _no_room(scope: Scope, receive: Receive, send: Send) -> None:
    error = unavailable("this server has no room for another connection", "too_many_connections", retry_after_s=1)
    error.headers["Connection"] = "close"
    await error.response()(scope, receive, send)


def bounded_protocol(limits: ConnectionLimits, refused: Callable[[str], None]) -> type[BoundedProtocol]:
    """The protocol of one server's connections. refused: see `Connections`."""
    pool = Connections(limits.max_connections, refused)
    return type("Connection", (BoundedProtocol,), {"limits": limits, "pool": pool})


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers: `launch` decides when the server ends. refused: see `Connections`."""

    def __init__(
        self, app: ASGIApp, limits: ConnectionLimits, refused: Callable[[str], None] = lambda reason: None
    ) -> None:
        settings: dict[str, Any] = {
            "http": bounded_protocol(limits, refused),
            "ws": "none",
            "lifespan": "off",
            "log_config": None,
            "log_level": "warning",
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "timeout_keep_alive": KEEP_ALIVE_S,
            "timeout_graceful_shutdown": LAST_ANSWERS_S,
        }
        super().__init__(uvicorn.Config(app, **settings))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signal."""
        yield


def room_for(connections: int, engines: int) -> int:
    """How many connections a server of so many engines may have, of so many that are wanted: its limit of open files is
    raised for them as far as that is allowed. At least one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = SPARE + RESERVED + engines * PER_ENGINE
    needed = connections + others
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, soft - others)
    return connections


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free one. Raises OSError, for a port that is taken among others."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, kind, protocol)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Events are small and must be sent at once.
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server.bind(address)
        server.listen(BACKLOG)
    except OSError:
        server.close()
        raise
    server.setblocking(False)
    return server
