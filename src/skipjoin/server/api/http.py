"""uvicorn, with bounds on what a connection may take, and without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_remote_addr

from skipjoin.server.api.auth import ANONYMOUS, OPEN_PATHS
from skipjoin.server.api.connections import SPARE, ConnectionLimits, Connections, client_of
from skipjoin.server.api.errors import ApiError, bad_request, too_many_connections, unavailable

# Connections that may wait to be accepted, so that the kernel refuses none of a burst.
BACKLOG = 2048
# Longer than clients' pools keep idle connections, so that the client closes them and not the server.
KEEP_ALIVE_S = 75
# Seconds for answers that are being written when the server ends.
LAST_ANSWERS_S = 2
# Descriptors of this process besides connections: files, databases, libraries; and the sockets of each engine.
RESERVED, PER_ENGINE = 80, 16
# A client that takes fewer bytes of an answer in `write_s` does not read it.
_TAKEN_BYTES = 1 << 16
# Bytes that are parsed at a time: as many requests as they hold are queued, and bounds are exact to them.
_SLICE_BYTES = 1 << 12
# Bytes besides data that a chunked body may have for each byte of data, beyond `max_header_bytes`. Chunks of one byte,
# which clients send that encode JSON piece by piece, have five.
_FRAMING_PER_BYTE = 16
# As many of the largest heads are dropped after a request that is not valid HTTP, or has too long a head or trailers.
_REFUSED_HEADS = 16
# Time that the first bytes of a connection may lie unread on a busy machine.
_UNREAD_S = 1.0
_BODY_HEADERS = (b"content-length", b"transfer-encoding")
_FORWARDED_FOR = b"x-forwarded-for"


class _Trailers(list[tuple[bytes, bytes]]):
    """Stands where uvicorn collects headers, after a head is complete, and drops what follows."""

    def append(self, header: tuple[bytes, bytes]) -> None:
        """Drop a trailer."""


_TRAILERS = _Trailers()


class BoundedProtocol(HttpToolsProtocol):
    """A connection within its bounds.

    It counts the bytes of a head as they arrive; the application checks a head that is complete. Of a chunked body it
    counts what is not data: sizes, extensions and trailers. One timer runs while the client is to send, another while
    it is to read.

    A connection whose request is answered before all of it has arrived is used for no other: the rest is dropped for a
    while, so that the client comes to read the answer, and the connection is closed. To that end it stands before
    uvicorn's parts in place of its transport (`write` to `resume_reading`).
    """

    limits: ConnectionLimits
    pool: Connections
    proxies: ProxyHeadersMiddleware
    # Data of chunks, of which there may be one for each byte: the parser appends them, and they are joined. Connections
    # share the list, which is empty between two calls.
    pieces: list[bytes]

    write: Callable[[bytes], None]
    _head_bytes = 0  # of a head that is not complete yet
    _in_head = True
    _advanced = False
    _is_spare = False
    _is_excess = False  # its address or key has too many
    _is_proxied = False
    _is_unread = True
    _made_at = 0.0  # on the loop's clock, as all times
    _may_stay = False  # after the request that arrives
    _is_last = False  # what follows the request that arrived last is dropped
    _awaits_body = False
    _body_begin = 0.0
    _body_bytes = 0
    _framing_bytes = 0  # beyond what the data allow
    _fault: ApiError | None = None  # what the parser's callbacks found
    _unparsed: bytes | memoryview = b""  # held while requests that came before wait to be answered
    _parsing: asyncio.Handle | None = None
    _running: RequestResponseCycle | None = None
    _is_lingering = False
    _linger_end = 0.0
    _dropped_at = 0.0
    _droppable_bytes = 0
    _send_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    # -- the connection -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # Without `super`, which spends a third of the time on the local address: requests name the host.
        self.connections.add(self)
        self.transport, self.flow = transport, FlowControl(self)  # type: ignore[arg-type]
        self.client, self.scheme = get_remote_addr(transport), "http"
        self._made_at = self.loop.time()
        self.write = transport.write
        self.app_state = {**self.app_state, "on_owner": self._on_owner}  # of which each request gets a copy
        if not self.pool.enter(self):
            self.pool.refused("no_room")
            self.abort()
            return
        address = "" if self.client is None else self.client[0]
        self._is_proxied = address in self.proxies.trusted_hosts
        self._count_for("proxy" if self._is_proxied else "address", "" if self._is_proxied else client_of(address))
        self._is_spare = self.pool.is_over
        self._expect_by(self.limits.head_s, self._on_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self.pool.leave(self)
        self._expect_nothing()
        self._stop_reading_timer()
        self._unparsed = b""
        running = self._running
        if running is not None and not running.response_complete:  # uvicorn tells the request that was parsed last
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        self._may_stay = False
        super().shutdown()

    def abort(self) -> None:
        """End the connection without a word."""
        self.transport.abort()

    @property
    def is_unread(self) -> bool:
        """Whether it is so new that its first bytes may have arrived unread."""
        return self._is_unread and self.loop.time() - self._made_at < _UNREAD_S

    def _count_for(self, kind: Any, name: str) -> None:
        self._is_excess = not self.pool.assign(self, kind, name)

    def _on_owner(self, owner: str) -> None:
        """Count the connection for the key of its request. Raises `ApiError` if the key, or the address of a client
        without one, has too many."""
        if owner != ANONYMOUS:
            self._count_for("key", owner)
        if self._is_excess:
            self.pool.refused("share")
            limits = self.limits
            if owner == ANONYMOUS:
                raise too_many_connections("address", limits.max_per_address)
            raise too_many_connections("key", limits.max_per_key)

    # -- what the client sends ----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_last:
            self._drop(len(data))
            return
        self._is_unread = False
        self._unset_keepalive_if_required()
        if self._in_head and self._send_timer is None:
            self._expect_by(self.limits.head_s, self._on_late_head)
        if len(data) <= _SLICE_BYTES and not self._unparsed:
            self._parse(data)
        else:
            self._unparsed = memoryview(bytes(self._unparsed) + data if self._unparsed else data)
            self._parse_slices()
        if not self._in_head:
            self._note_missing_body()

    def _parse_slices(self) -> None:
        """Parse what has arrived, until a request has to wait for those before it."""
        self._parsing = None
        while self._unparsed and not (self.pipeline or self._is_done):
            piece, self._unparsed = self._unparsed[:_SLICE_BYTES], self._unparsed[_SLICE_BYTES:]
            self._parse(piece)
        if self._is_done:
            self._unparsed = b""
        elif not (self._unparsed or self.flow.read_paused):
            self.transport.resume_reading()
        if not self._in_head:
            self._note_missing_body()

    @property
    def _is_done(self) -> bool:
        """Whether no further request is taken."""
        return self._is_last or self.transport.is_closing()

    def _parse(self, data: bytes | memoryview) -> None:
        was_in_head = self._in_head
        had_bytes = self._body_bytes
        self._advanced = False
        self.pieces.clear()  # of a connection whose body was not valid
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # the request is answered, and what follows it is in another protocol
            self._end_after_answer()
            return
        except httptools.HttpParserError:
            error = self._fault or ApiError(400, "the request is not valid HTTP", code="invalid_http")
            self._refuse(error, "invalid")
            return
        if self.pieces:
            self._take_body()
        if self._advanced:
            return
        most = self.limits.max_header_bytes
        if was_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > most:
                self._refuse(ApiError(431, f"the request's head must have at most {most} bytes"), "invalid")
        else:
            taken = self._body_bytes - had_bytes
            self._framing_bytes = max(0, self._framing_bytes + len(data) - taken * (1 + _FRAMING_PER_BYTE))
            if self._framing_bytes > most:
                text = f"a chunked body must have at most {most} bytes of sizes, extensions and trailers"
                self._refuse(ApiError(431, text), "invalid")

    def _take_body(self) -> None:
        body = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
        self.pieces.clear()
        self._body_bytes += len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self._check_upgrade()
        self._body_begin, self._body_bytes, self._framing_bytes = self.loop.time(), 0, 0
        self._expect_by(self.limits.body_s, self._on_late_body)
        if self._is_proxied:
            self._count_forwarded()
        super().on_headers_complete()
        self._in_head, self._advanced = False, True
        self.headers = _TRAILERS  # the list until now is the application's
        self._may_stay, self.cycle.keep_alive = self.cycle.keep_alive, False  # until all of it has arrived

    def _check_upgrade(self) -> None:
        """Raise `ApiError` for a request to change the protocol that has a body: the parser takes it for the beginning
        of what follows."""
        if any(name in _BODY_HEADERS and value != b"0" for name, value in self.headers):
            self._fault = bad_request("a request that has a body must not have the header 'Upgrade': leave it out")
            raise self._fault

    def _count_forwarded(self) -> None:
        """Count the connection of a trusted proxy for the client whose request this is."""
        values = [value for name, value in self.headers if name == _FORWARDED_FOR]
        forwarded = b", ".join(values).decode("latin-1")
        host = self.proxies.trusted_hosts.get_trusted_client_address(forwarded)[0] if forwarded.strip() else ""
        self._count_for("address" if host else "proxy", client_of(host))

    def on_message_complete(self) -> None:
        if self.pieces:
            self._take_body()
        self._in_head, self._advanced, self._head_bytes, self._awaits_body = True, True, 0, False
        self._expect_nothing()
        self.pool.set_busy(self)
        if self._may_stay and not (self._is_spare or self.cycle.response_started):
            self.cycle.keep_alive = True
        super().on_message_complete()
        self._rest_if_done()

    def _note_missing_body(self) -> None:
        if not (self._awaits_body or self._is_done) and self._running is self.cycle:
            self._awaits_body = True
            self.pool.set_waiting(self)

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
            text = f"the request's head must be complete within {self.limits.head_s:g} s"
            self._refuse(ApiError(408, text), "late", lingers=False)
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
        else:
            text = f"{limits.body_s:g} s and a second more for each {limits.body_bytes_per_s} bytes"
            self._refuse(ApiError(408, f"the body must be complete within {text}"), "late", lingers=False)

    # -- in place of the transport -------------------------------------------------------------------------

    def is_closing(self) -> bool:
        """Return whether nothing can be written any more."""
        return self.transport.is_closing()

    def close(self) -> None:
        """Close after an answer, or where there is none."""
        if self._in_head and not (self._head_bytes or self._unparsed or self.pipeline or self._is_last):
            self.transport.close()  # the client has nothing left to send
        else:
            self._linger()

    def pause_reading(self) -> None:
        """Stop reading."""
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on, unless requests wait that have been read."""
        if self.pipeline or self._droppable_bytes < 0:
            self.flow.read_paused = True
        elif not self._unparsed:
            self.transport.resume_reading()
        elif self._parsing is None:
            self._parsing = self.loop.call_soon(self._parse_slices)

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
        if self._is_lingering:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if not self.transport.is_closing():
            self._rest_if_done()
            if not self._in_head:
                self._note_missing_body()
        elif self.transport.get_write_buffer_size():
            self._watch_reader()

    def _rest_if_done(self) -> None:
        if self._in_head and not self._is_answering and not self.pipeline:
            self.pool.set_waiting(self)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            super().timeout_keep_alive_handler()

    # -- the end ------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.transport = self  # type: ignore[assignment]
        if self._is_spare:
            cycle.keep_alive = False
            if cycle.scope["path"] not in OPEN_PATHS:
                self.pool.refused("no_room")
                app = _no_room
        super()._start_asgi_task(cycle, app)

    def _refuse(self, error: ApiError, reason: str, *, lingers: bool = True) -> None:
        """Answer what arrives with an error, and take nothing more. lingers: see `_linger`."""
        self.pool.refused(reason)
        self._expect_nothing()
        running = self._running
        if running is not None and not running.response_complete:
            if self._in_head or running is not self.cycle:  # another request is at fault
                self._end_after_answer()
                return
            if running.response_started:
                self.abort()
                return
            running.disconnected = True
            running.message_event.set()
        body = error.body()
        head = (
            f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if lingers:
            self._linger(_REFUSED_HEADS * self.limits.max_header_bytes)
        else:
            self._close()

    def _end_after_answer(self) -> None:
        """Take nothing more, and close when the request that runs has been answered."""
        self._drop_from_now(_REFUSED_HEADS * self.limits.max_header_bytes)
        self._expect_nothing()
        assert self._running is not None
        self._running.keep_alive = False
        if self._running.response_complete:
            self._linger()

    def _linger(self, max_bytes: int | None = None) -> None:
        """Drop what the client still sends, so that it comes to read the answer, and close.

        A connection that is closed while bytes arrive is reset, and the client may lose what it has not read yet.

        Args:
            max_bytes: How much is dropped; None: `linger_bytes`.
        """
        self._drop_from_now(self.limits.linger_bytes if max_bytes is None else max_bytes)
        self._is_lingering = True
        self._unset_keepalive_if_required()
        self._dropped_at = self.loop.time()
        self._linger_end = self._dropped_at + self.limits.linger_s
        self._expect_by(self.limits.linger_pause_s, self._on_silence)
        self.pool.set_waiting(self, first=True)
        if self.transport.is_closing():
            return
        self.transport.write_eof()
        self.transport.resume_reading()
        if self.transport.get_write_buffer_size():
            self._watch_reader()

    def _drop_from_now(self, max_bytes: int) -> None:
        self._is_last, self._unparsed, self._droppable_bytes = True, b"", max_bytes
        self.pipeline.clear()

    def _drop(self, size: int) -> None:
        self._dropped_at = self.loop.time()
        self._droppable_bytes -= size
        if self._droppable_bytes < 0:
            if self._is_lingering:
                self._close()
            else:
                self.flow.pause_reading()

    def _on_silence(self) -> None:
        due = min(self._dropped_at + self.limits.linger_pause_s, self._linger_end)
        if (left := due - self.loop.time()) > 0:
            self._expect_by(left, self._on_silence)
        else:
            self._close()

    def _close(self) -> None:
        """Close when what was written has been sent."""
        self._expect_nothing()
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._watch_reader()


async def _no_room(scope: Scope, receive: Receive, send: Send) -> None:
    error = unavailable("this server has no room for another connection", "too_many_connections", retry_after_s=1)
    error.headers["Connection"] = "close"
    await error.response()(scope, receive, send)


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    """Stand where `ProxyHeadersMiddleware`, which is asked for addresses only, has an application."""


def bounded_protocol(
    limits: ConnectionLimits, refused: Callable[[str], None], trusted_proxies: Sequence[str] = ()
) -> type[BoundedProtocol]:
    """Return the protocol of one server's connections. refused: see `Connections`."""
    pieces: list[bytes] = []
    parts = {
        "limits": limits,
        "pieces": pieces,
        "on_body": pieces.append,
        "pool": Connections(limits, refused),
        "proxies": ProxyHeadersMiddleware(_no_app, list(trusted_proxies)),
    }
    return type("Connection", (BoundedProtocol,), parts)


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers: `launch` decides when the server ends.

    Args:
        app: The application.
        limits: Of its connections.
        refused: See `Connections`.
        trusted_proxies: Addresses and networks whose `X-Forwarded-For` names the client.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        refused: Callable[[str], None] = lambda reason: None,
        trusted_proxies: Sequence[str] = (),
    ) -> None:
        settings: dict[str, Any] = {
            "http": bounded_protocol(limits, refused, trusted_proxies),
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
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            # Otherwise the megabytes that the kernel buffers hide for minutes that a client reads slowly.
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _TAKEN_BYTES)
        server.bind(address)
        server.listen(BACKLOG)
    except OSError:
        server.close()
        raise
    server.setblocking(False)
    return server
