from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from skipjoin.server.api.auth import ANONYMOUS
from skipjoin.server.api.errors import too_many_connections

# Connections beyond `max_connections`, for /health, /ready and /live.
SPARE = 32
# A client that reads fewer bytes of a response in `write_s` is too slow.
MIN_READ_BYTES = 1 << 16
# If accounts have more waiting connections than this, the one with the maximum loses a connection first.
_CROWD = 16
# Prefix length of the IPv6 network of one customer.
_IPV6_PREFIX = 64

Kind = Literal["address", "key", "proxy"]
_FORWARDED_FOR = b"x-forwarded-for"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """`max_per_address` is for connections that have not shown a key.

    A client has `body_s` for a body, a second more for each `body_bytes_per_s` that arrive, and `write_s` to read
    `MIN_READ_BYTES`. `linger_*` limit the rest of a request after an early response.
    """

    max_header_bytes: int
    max_connections: int = 4096
    max_per_address: float = math.inf
    max_per_key: float = math.inf
    head_s: float = 20.0
    body_s: float = 20.0
    body_bytes_per_s: int = 4096
    write_s: float = 60.0
    linger_s: float = 20.0
    linger_pause_s: float = 5.0
    linger_bytes: int = 256 << 20


class Connection(Protocol):
    @property
    def is_unread(self) -> bool: ...

    def abort(self) -> None: ...


@dataclass(slots=True, eq=False)
class Account:
    whose: tuple[Kind, str]
    max_open: float
    open: int = 0
    waiting: OrderedDict[Connection, None] = field(default_factory=OrderedDict)  # longest waiting first


class Connections:
    """Open connections of a server.

    If there are too many, the address or key with the most connections that wait for their client loses the one that
    has waited longest.
    """

    def __init__(self, limits: ConnectionLimits, refused: Callable[[str], None]) -> None:
        self.refused = refused
        self._max_open = limits.max_connections
        self._max_of: dict[Kind, float] = {
            "address": limits.max_per_address,
            "key": limits.max_per_key,
            "proxy": math.inf,
        }
        self._accounts: dict[tuple[Kind, str], Account] = {}
        self._open: dict[Connection, Account] = {}
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        self._crowds: set[Account] = set()  # accounts with more than `_CROWD` waiting connections

    def enter(self, connection: Connection) -> bool:
        """Return whether there is room. Call `assign` next."""
        if len(self._open) >= self._max_open:
            crowd = max(self._crowds, key=lambda account: len(account.waiting), default=None)
            waiting = self._waiting if crowd is None else crowd.waiting
            if waiting:
                self._end(next(iter(waiting)), "idle")
        return len(self._open) < self._max_open + SPARE

    @property
    def is_exceeded(self) -> bool:
        return len(self._open) > self._max_open

    def assign(self, connection: Connection, kind: Kind, name: str) -> bool:
        """Return False if the client has too many connections and none can be closed."""
        whose = (kind, name)
        before = self._open.get(connection)
        if before is not None and before.whose == whose:
            return True
        is_waiting = before is None or connection in before.waiting
        self.leave(connection)
        account = self._accounts.get(whose) or Account(whose, self._max_of[kind])
        has_room = account.open < account.max_open
        if not has_room and account.waiting and not (oldest := next(iter(account.waiting))).is_unread:
            self._end(oldest, "share")
            has_room = True
        account.open += 1
        self._accounts[whose] = self._open[connection] = account
        if is_waiting:
            self.set_waiting(connection)
        return has_room

    def leave(self, connection: Connection) -> None:
        self.set_busy(connection)
        if (account := self._open.pop(connection, None)) is not None:
            account.open -= 1
            if not account.open:
                del self._accounts[account.whose]

    def set_busy(self, connection: Connection) -> None:
        if connection in self._waiting:
            del self._waiting[connection]
            account = self._open[connection]
            waiting = account.waiting
            del waiting[connection]
            if len(waiting) == _CROWD:
                self._crowds.discard(account)

    def set_waiting(self, connection: Connection, *, first: bool = False) -> None:
        if (account := self._open.get(connection)) is None:
            return
        waiting = account.waiting
        if connection in waiting or first:
            for connections in (waiting, self._waiting):
                connections[connection] = None
                connections.move_to_end(connection, last=not first)
        else:
            waiting[connection] = self._waiting[connection] = None
        if len(waiting) > _CROWD:
            self._crowds.add(account)

    def _end(self, connection: Connection, reason: str) -> None:
        self.leave(connection)
        self.refused(reason)
        connection.abort()


def client_of(address: str) -> str:
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _IPV6_PREFIX), strict=False))


class ConnectionClient:
    __slots__ = ("_connection", "_is_excess", "_is_proxied", "_limits", "_pool", "_proxies")

    def __init__(
        self, connection: Connection, pool: Connections, limits: ConnectionLimits, proxies: ProxyHeadersMiddleware
    ) -> None:
        self._connection, self._pool, self._limits, self._proxies = connection, pool, limits, proxies
        self._is_excess = False  # its address or key has too many connections
        self._is_proxied = False

    def count_peer(self, address: str) -> None:
        self._is_proxied = address in self._proxies.trusted_hosts
        self._count("proxy" if self._is_proxied else "address", "" if self._is_proxied else client_of(address))

    def count_forwarded(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if not self._is_proxied:
            return
        values = [value for name, value in headers if name == _FORWARDED_FOR]
        forwarded = b", ".join(values).decode("latin-1")
        host = self._proxies.trusted_hosts.get_trusted_client_address(forwarded)[0] if forwarded.strip() else ""
        self._count("address" if host else "proxy", client_of(host))

    def count_owner(self, owner: str) -> None:
        if owner != ANONYMOUS:
            self._count("key", owner)
        if self._is_excess:
            self._pool.refused("share")
            limits = self._limits
            if owner == ANONYMOUS:
                raise too_many_connections("address", limits.max_per_address)
            raise too_many_connections("key", limits.max_per_key)

    def _count(self, kind: Kind, name: str) -> None:
        self._is_excess = not self._pool.assign(self._connection, kind, name)


# Time for an answer without an interim response, which simple clients do not expect.
_PROVOKE_S = 0.25
_CHECK_S = 0.25
# Seconds without data, seconds between probes, and probes without an answer. Linux answers for a minute after a process
# has closed a connection, and then resets it.
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


@dataclass(slots=True, eq=False)
class LingeringClose:
    """Drops further input before a connection closes: a reset would lose the response."""

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
    """Calls `on_slow` if a client reads fewer than `MIN_READ_BYTES` in `write_s` seconds."""

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
    """Distinguishes a client that has closed its sending side from one that has disconnected.

    The latter resets the connection at the next bytes, which `provoke` sends.
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
