from __future__ import annotations

from collections.abc import Iterable

from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from skipjoin.server.api.auth import ANONYMOUS
from skipjoin.server.api.connections import Connection, ConnectionLimits, Connections, Kind, client_of
from skipjoin.server.api.errors import too_many_connections

_FORWARDED_FOR = b"x-forwarded-for"


class ConnectionClient:
    """Client for which a connection counts: its address, the one that a trusted proxy forwards, or its API key."""

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
