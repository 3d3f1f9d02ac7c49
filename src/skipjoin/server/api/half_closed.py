from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

# Time for an answer without an interim response, which simple clients do not expect.
_PROVOKE_S = 0.25
_CHECK_S = 0.25
# Seconds without data, seconds between probes, and probes without an answer. Linux answers for a minute after a process
# has closed a connection, and then resets it.
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


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
