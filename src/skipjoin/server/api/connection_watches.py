from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from skipjoin.server.api.connections import MIN_READ_BYTES, ConnectionLimits

# Time for an answer without an interim response, which simple clients do not expect.
_PROVOKE_S = 0.25
_CHECK_S = 0.25
# Seconds without data, seconds between probes, and probes without an answer. Linux answers for a minute after a process
# has closed a connection, and then resets it.
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


@dataclass(slots=True, eq=False)
class LingeringClose:
    """Drops further input, so that the client reads the response.

    A connection that is closed while bytes arrive is reset, and the client may lose unread data.
    """

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    limits: ConnectionLimits
    remaining_bytes: int
    close: Callable[[], None]
    has_begun: bool = False
    _dropped_at: float = 0.0  # on the loop's clock
    _end: float = 0.0
    _timer: asyncio.TimerHandle | None = None

    @property
    def is_exhausted(self) -> bool:
        return self.remaining_bytes < 0

    def drop(self, n_bytes: int) -> None:
        self._dropped_at = self.loop.time()
        self.remaining_bytes -= n_bytes

    def begin(self) -> None:
        self.has_begun = True
        self._dropped_at = self.loop.time()
        self._end = self._dropped_at + self.limits.linger_s
        self._timer = self.loop.call_later(self.limits.linger_pause_s, self._on_silence)
        if not self.transport.is_closing():
            if self.transport.can_write_eof():  # not with TLS
                self.transport.write_eof()
            self.transport.resume_reading()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_silence(self) -> None:
        due = min(self._dropped_at + self.limits.linger_pause_s, self._end)
        if (left := due - self.loop.time()) > 0:
            self._timer = self.loop.call_later(left, self._on_silence)
        else:
            self.close()


@dataclass(slots=True, eq=False)
class SlowReaderWatch:
    """Calls `on_slow` if a client reads fewer than `MIN_READ_BYTES` of a response in `write_s` seconds."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    write_s: float
    on_slow: Callable[[], None]
    _timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        self.stop()
        unread = self.transport.get_write_buffer_size()
        self._timer = self.loop.call_later(self.write_s, self._check, unread)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, unread: int) -> None:
        if unread - self.transport.get_write_buffer_size() < MIN_READ_BYTES:
            self.on_slow()
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
