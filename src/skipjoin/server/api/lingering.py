from __future__ import annotations

import asyncio
from collections.abc import Callable

from skipjoin.server.api.connections import ConnectionLimits


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
