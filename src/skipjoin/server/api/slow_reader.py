from __future__ import annotations

import asyncio
from collections.abc import Callable

from skipjoin.server.api.connections import MIN_READ_BYTES


class SlowReaderWatch:
    """Calls `on_slow` if a client reads fewer than `MIN_READ_BYTES` of a response in `write_s` seconds."""

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
