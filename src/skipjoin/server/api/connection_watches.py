from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from skipjoin.server.api.connections import MIN_READ_BYTES, ConnectionLimits

# Time for an answer without an interim response, which simple clients do not expect.
_PROVOKE_S = 0.25
_CHECK_S = 0.25
# Seconds without data, seconds between probes, and probes without an answer. Linux answers for a minute after a process
# has closed a connection, and then resets it.
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class LingeringClose:
    """Drops further input, so that the client reads the response.

    A connection that is closed while bytes arrive is reset, and the client may lose unread data.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        limits: ConnectionLimits,
        max_bytes: int,
        close: Callable[[], None],
    ) -> None:
        self._transport, self._loop, self._limits, self._close = transport, loop, limits, close
        self._remaining_bytes = max_bytes
        self._dropped_at = self._end = 0.0  # on the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self.has_begun = False

    @property
    def is_exhausted(self) -> bool:
        return self._remaining_bytes < 0

    def drop(self, n_bytes: int) -> None:
        self._dropped_at = self._loop.time()
        self._remaining_bytes -= n_bytes

    def begin(self) -> None:
        self.has_begun = True
        self._dropped_at = self._loop.time()
        self._end = self._dropped_at + self._limits.linger_s
        self._timer = self._loop.call_later(self._limits.linger_pause_s, self._on_silence)
        if not self._transport.is_closing():
            if self._transport.can_write_eof():  # not with TLS
                self._transport.write_eof()
            self._transport.resume_reading()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_silence(self) -> None:
        due = min(self._dropped_at + self._limits.linger_pause_s, self._end)
        if (left := due - self._loop.time()) > 0:
            self._timer = self._loop.call_later(left, self._on_silence)
        else:
            self._close()


class SlowReaderWatch:
    __slots__ = ("_loop", "_on_slow", "_timer", "_transport", "_write_s")

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        write_s: float,
        on_slow: Callable[[], None],
    ) -> None:
        self._transport, self._loop, self._write_s, self._on_slow = transport, loop, write_s, on_slow
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        self.stop()
        unread = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._write_s, self._check, unread)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, unread: int) -> None:
        if unread - self._transport.get_write_buffer_size() < MIN_READ_BYTES:
            self._on_slow()
        else:
            self.watch()


class HalfClosedWatch:
    """Distinguishes a client that only sends nothing more from one that has disconnected.

    The latter resets the connection at the next bytes that it gets. `provoke` sends bytes if the response has not
    begun.
    """

    __slots__ = ("_loop", "_on_lost", "_provoke", "_socket", "_timer")

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        provoke: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._loop, self._provoke, self._on_lost = loop, provoke, on_lost
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if (option := getattr(socket, name, None)) is not None:
                self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self._timer = loop.call_later(_PROVOKE_S, self._ask)

    def stop(self) -> None:
        self._timer.cancel()

    def _ask(self) -> None:
        self._provoke()
        self._check()

    def _check(self) -> None:
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._on_lost()
        else:
            self._timer = self._loop.call_later(_CHECK_S, self._check)
