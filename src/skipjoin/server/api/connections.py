"""The open connections of a server, whose they are, and which of them is closed where there are too many."""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

# Connections beyond `max_connections`, for /health, /ready and /live.
SPARE = 32
# Of accounts that have more waiting connections than this, the one that has most loses one first.
_CROWD = 16
# The part of an IPv6 address that a network gives to one customer.
_IPV6_PREFIX = 64

Kind = Literal["address", "key", "proxy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of connections.

    Args:
        max_header_bytes: Of a request's head, of its trailers, and of what chunks have besides data.
        max_connections: For one more, a connection that waits for its client is closed.
        max_per_address: Connections of one client address that have not shown a key.
        max_per_key: Connections of one API key.
        head_s: Time for a head, from the connection or the head's first byte.
        body_s: Time for a body, to which each `body_bytes_per_s` that arrive add a second.
        write_s: Time in which a client takes `_TAKEN_BYTES` of an answer, or the rest of it.
        linger_s: Time for which the rest of a request is read and dropped after an answer that ends the connection.
        linger_pause_s: Longest pause of the client in that time.
        linger_bytes: Bytes that are dropped.
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
    """What the server does with a connection of which there are too many."""

    @property
    def is_unread(self) -> bool:
        """Whether it is so new that its first bytes may have arrived unread."""
        ...

    def abort(self) -> None:
        """End it without a word."""


class Account:
    """The connections of one client address, one API key, or all trusted proxies."""

    __slots__ = ("max_open", "open", "waiting", "whose")

    def __init__(self, whose: tuple[Kind, str], max_open: float) -> None:
        self.whose, self.max_open = whose, max_open
        self.open = 0
        self.waiting: OrderedDict[Connection, None] = OrderedDict()  # the one that waits for the longest time first


class Connections:
    """The open connections of a server.

    A connection waits while its client is to send: a request, the rest of one, or what is dropped after an early
    answer. Where there are too many, one that waits is closed: of the address or key that has most of them, the one
    that has waited for the longest time.

    Args:
        limits: How many there may be.
        refused: Called for each that the server refuses or ends, with one of `CONNECTION_REFUSALS`
            (`metric_table.py`).
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
        """Take a new connection, for which another one is closed if there are too many; return whether there is room.
        `assign` follows."""
        if len(self._open) >= self._max_open:
            crowd = max(self._crowds, key=lambda account: len(account.waiting), default=None)
            waiting = self._waiting if crowd is None else crowd.waiting
            if waiting:
                self._end(next(iter(waiting)), "idle")
        return len(self._open) < self._max_open + SPARE

    @property
    def is_over(self) -> bool:
        """Whether only spare connections are left."""
        return len(self._open) > self._max_open

    def assign(self, connection: Connection, kind: Kind, name: str) -> bool:
        """Count a connection for an address, a key or a trusted proxy, which it may not have been known for until now;
        return False if that one has too many, and none of them waits."""
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
        """Forget a connection."""
        self.set_busy(connection)
        if (account := self._open.pop(connection, None)) is not None:
            account.open -= 1
            if not account.open:
                del self._accounts[account.whose]

    def set_busy(self, connection: Connection) -> None:
        """Note that a connection has a request to be answered."""
        if connection in self._waiting:
            del self._waiting[connection]
            account = self._open[connection]
            waiting = account.waiting
            del waiting[connection]
            if len(waiting) == _CROWD:
                self._crowds.discard(account)

    def set_waiting(self, connection: Connection, *, first: bool = False) -> None:
        """Note that a connection waits for its client from now on. first: it is closed before others of its
        account."""
        if (account := self._open.get(connection)) is None:
            return
        waiting = account.waiting
        if connection in waiting or first:
            for one in (waiting, self._waiting):
                one[connection] = None
                one.move_to_end(connection, last=not first)
        else:
            waiting[connection] = self._waiting[connection] = None
        if len(waiting) > _CROWD:
            self._crowds.add(account)

    def _end(self, connection: Connection, reason: str) -> None:
        self.leave(connection)
        self.refused(reason)
        connection.abort()


def client_of(address: str) -> str:
    """Return what stands for the client of an IP address: the address, or the network of an IPv6 one."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _IPV6_PREFIX), strict=False))
