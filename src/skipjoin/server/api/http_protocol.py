from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.utils import get_remote_addr

from skipjoin.routes import Access, paths
from skipjoin.server.api import connections
from skipjoin.server.api.errors import ApiError, unavailable
from skipjoin.server.api.tolerant_protocol import TolerantProtocol

# Bytes parsed at a time. It bounds the number of pipelined requests and the error of the other bounds.
_SLICE_BYTES = 1 << 12
# Bytes of framing that a chunked body may have per byte of data, beyond `max_header_bytes`. Clients that encode JSON
# incrementally send chunks of one byte, which have five.
_FRAMING_PER_BYTE = 16
# Bytes dropped after an invalid request, as a multiple of `max_header_bytes`.
_REFUSED_HEADS = 16
_PROBES = paths(Access.PROBE)
# Time for which the first bytes of a connection may be unread on a busy machine.
_UNREAD_S = 1.0


class _Trailers(list[tuple[bytes, bytes]]):
    def append(self, header: tuple[bytes, bytes]) -> None: ...


_TRAILERS = _Trailers()


class BoundedProtocol(TolerantProtocol):
    """HTTP/1.1 connection with limits on sizes and times.

    For a `LingeringClose`, it is the transport of uvicorn's request cycles (`write` to `resume_reading`).
    """

    limits: connections.ConnectionLimits
    pool: connections.Connections
    proxies: ProxyHeadersMiddleware
    # Data of chunks, which may have one byte each, to be joined. All connections share the list, because it is empty
    # between two calls.
    chunks: list[bytes]

    write: Callable[[bytes], None]
    _head_bytes = 0  # of an incomplete head
    _in_head = True
    _advanced = False
    _is_spare = False
    _is_unread = True
    _made_at = 0.0  # on the loop's clock, like all times
    _may_stay = False  # keep alive after the current request
    _awaits_body = False
    _body_begin = 0.0
    _body_bytes = 0
    _framing_bytes = 0  # beyond the allowance for the data
    _unparsed: bytes | memoryview = b""  # held while earlier requests wait for their responses
    _parsing: asyncio.Handle | None = None
    _running: RequestResponseCycle | None = None
    _half_closed: connections.HalfClosedWatch | None = None  # set when the client sends nothing more
    _lingering: connections.LingeringClose | None = None  # set when further input is dropped
    _send_timer: asyncio.TimerHandle | None = None
    _counted_client: connections.ConnectionClient
    _reader: connections.SlowReaderWatch

    # -- the connection -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # Not `super`, which spends a third of the time on the local address. Requests name the host.
        self.connections.add(self)
        self.transport, self.flow = transport, FlowControl(self)  # type: ignore[arg-type]
        self.client, self.scheme = get_remote_addr(transport), "http"
        self._made_at = self.loop.time()
        self.write = transport.write
        self._counted_client = connections.ConnectionClient(self, self.pool, self.limits, self.proxies)
        self._reader = connections.SlowReaderWatch(transport, self.loop, self.limits.write_s, self._on_slow_reader)
        self.app_state = {**self.app_state, "on_owner": self._counted_client.count_owner}  # copied for each request
        if not self.pool.enter(self):
            self.pool.refused("no_room")
            self.abort()
            return
        self._counted_client.count_peer("" if self.client is None else self.client[0])
        self._is_spare = self.pool.is_exceeded
        self._expect_by(self.limits.head_s, self._on_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        self.pool.leave(self)
        self._expect_nothing()
        self._reader.stop()
        if self._lingering is not None:
            self._lingering.cancel()
        if self._half_closed is not None:
            self._half_closed.stop()
        self._unparsed = b""
        running = self._running
        if running is not None and not running.response_complete:  # uvicorn only notifies the last parsed request
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        self._may_stay = False
        super().shutdown()

    def abort(self) -> None:
        self.transport.abort()

    @property
    def is_unread(self) -> bool:
        return self._is_unread and self.loop.time() - self._made_at < _UNREAD_S

    # -- what the client sends ----------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._lingering is not None:
            self._drop(self._lingering, len(data))
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

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open, for answers to complete requests."""
        if self._lingering is None and self.pipeline and self.cycle.more_body:  # cut within its body
            del self.pipeline[0]
        last = self.pipeline[0][0] if self.pipeline else self._running
        if last is None or last.response_complete or last.disconnected or last.more_body:
            return False
        last.keep_alive = False
        self._expect_nothing()
        self._in_head, self._head_bytes = True, 0  # a head that was begun is dropped
        if self._half_closed is None:
            self._half_closed = connections.HalfClosedWatch(self.transport, self.loop, self._provoke_reset, self.abort)
        return True

    def _provoke_reset(self) -> None:
        if self._running is not None and (interim := self.interim_response(self._running)):
            self.transport.write(interim)

    def _parse_slices(self) -> None:
        self._parsing = None
        while self._unparsed and not (self.pipeline or self._is_done):
            chunk, self._unparsed = self._unparsed[:_SLICE_BYTES], self._unparsed[_SLICE_BYTES:]
            self._parse(chunk)
        if self._is_done:
            self._unparsed = b""
        elif not (self._unparsed or self.flow.read_paused):
            self.transport.resume_reading()
        if not self._in_head:
            self._note_missing_body()

    @property
    def _is_done(self) -> bool:
        return self._lingering is not None or self.transport.is_closing()

    def _parse(self, data: bytes | memoryview) -> None:
        while data and not self._is_done:
            data = self._parse_next(data)

    def _parse_next(self, data: bytes | memoryview) -> bytes | memoryview:
        was_in_head = self._in_head
        had_bytes = self._body_bytes
        self._advanced = False
        self.chunks.clear()  # another connection may have left data of an invalid body
        try:
            rest = self.feed(data)
        except httptools.HttpParserUpgrade:  # bytes after the request are in another protocol
            self._end_after_answer()
            return b""
        except httptools.HttpParserError:
            error = self.fault or ApiError(400, "the request is not valid HTTP", code="invalid_http")
            self._refuse(error, "invalid")
            return b""
        if self.chunks:
            self._take_body()
        if not self._advanced:
            self._check_sizes(len(data), self._body_bytes - had_bytes, was_in_head=was_in_head)
        return rest

    def _check_sizes(self, received: int, taken: int, *, was_in_head: bool) -> None:
        """Refuse a long incomplete head, or a body with too little data."""
        most = self.limits.max_header_bytes
        if was_in_head:
            self._head_bytes += received
            if self._head_bytes > most:
                self._refuse(ApiError(431, f"the request's head must have at most {most} bytes"), "invalid")
        else:
            self._framing_bytes = max(0, self._framing_bytes + received - taken * (1 + _FRAMING_PER_BYTE))
            if self._framing_bytes > most:
                text = f"a chunked body must have at most {most} bytes of sizes, extensions and trailers"
                self._refuse(ApiError(431, text), "invalid")

    def _take_body(self) -> None:
        body = self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)
        self.chunks.clear()
        self._body_bytes += len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.ignores_upgrade:
            return
        self._body_begin, self._body_bytes, self._framing_bytes = self.loop.time(), 0, 0
        self._expect_by(self.limits.body_s, self._on_late_body)
        self._counted_client.count_forwarded(self.headers)
        self._in_head, self._advanced = False, True
        self.headers = _TRAILERS  # the application owns the previous list
        self._may_stay, self.cycle.keep_alive = self.cycle.keep_alive, False  # until the request is complete

    def on_message_complete(self) -> None:
        if self.ignores_upgrade:
            return
        if self.chunks:
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
        if self._is_answering:  # the head of a pipelined request, which cannot run yet
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
        return self.transport.is_closing()

    def close(self) -> None:
        is_idle = not (self._head_bytes or self._unparsed or self.pipeline or self._lingering is not None)
        if self._half_closed is not None or (self._in_head and is_idle):
            self.transport.close()  # the client has nothing left to send
        else:
            self._linger()

    def pause_reading(self) -> None:
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.pipeline or (self._lingering is not None and self._lingering.is_exhausted):
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
        self._reader.watch()

    def resume_writing(self) -> None:
        self._reader.stop()
        super().resume_writing()

    def _on_slow_reader(self) -> None:
        self.pool.refused("slow_reader")
        self.abort()

    def on_response_complete(self) -> None:
        if self._lingering is not None and self._lingering.has_begun:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if not self.transport.is_closing():
            self._rest_if_done()
            if not self._in_head:
                self._note_missing_body()
        elif self.transport.get_write_buffer_size():
            self._reader.watch()

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
            if cycle.scope["path"] not in _PROBES:
                self.pool.refused("no_room")
                app = _no_room
        super()._start_asgi_task(cycle, app)

    def _refuse(self, error: ApiError, reason: str, *, lingers: bool = True) -> None:
        self.pool.refused(reason)
        self._expect_nothing()
        running = self._running
        if running is not None and not running.response_complete:
            if self._in_head or running is not self.cycle:  # the error is in a later request
                self._end_after_answer()
                return
            if running.response_started:
                self.abort()
                return
            running.disconnected = True
            running.message_event.set()
        self.transport.write(error.last_response())
        if lingers:
            self._linger(_REFUSED_HEADS * self.limits.max_header_bytes)
        else:
            self._close()

    def _end_after_answer(self) -> None:
        self._drop_from_now(_REFUSED_HEADS * self.limits.max_header_bytes)
        self._expect_nothing()
        assert self._running is not None
        self._running.keep_alive = False
        if self._running.response_complete:
            self._linger()

    def _linger(self, max_bytes: int | None = None) -> None:
        lingering = self._drop_from_now(self.limits.linger_bytes if max_bytes is None else max_bytes)
        self._unset_keepalive_if_required()
        self._expect_nothing()
        self.pool.set_waiting(self, first=True)
        lingering.begin()
        if not self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._reader.watch()

    def _drop_from_now(self, max_bytes: int) -> connections.LingeringClose:
        if self._lingering is not None:
            self._lingering.cancel()
        self._unparsed = b""
        self.pipeline.clear()
        self._lingering = connections.LingeringClose(self.transport, self.loop, self.limits, max_bytes, self._close)
        return self._lingering

    def _drop(self, lingering: connections.LingeringClose, n_bytes: int) -> None:
        lingering.drop(n_bytes)
        if lingering.is_exhausted:
            if lingering.has_begun:
                self._close()
            else:
                self.flow.pause_reading()

    def _close(self) -> None:
        self._expect_nothing()
        if self._lingering is not None:
            self._lingering.cancel()
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._reader.watch()


async def _no_room(scope: Scope, receive: Receive, send: Send) -> None:
    error = unavailable("this server has no room for another connection", "too_many_connections", retry_after_s=1)
    error.headers["Connection"] = "close"
    await error.response(scope)(scope, receive, send)
