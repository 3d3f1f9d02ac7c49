from __future__ import annotations

import errno
import logging
import resource
import socket

from skipjoin.config import ConfigError, ServerConfig
from skipjoin.server.api.connections import MIN_READ_BYTES, SPARE, ConnectionLimits

logger = logging.getLogger(__name__)

# Length of the accept queue, so that the kernel refuses no connection of a burst.
BACKLOG = 2048
# File descriptors of the process itself: files, databases and libraries.
RESERVED_DESCRIPTORS = 80
# File descriptors of the sockets of each engine.
DESCRIPTORS_PER_ENGINE = 16
# Fraction of all connections that one client may have, so that others find room.
_CLIENT_SHARE = 0.75
# The same for connections of one address without a key, if keys are needed. It is smaller, because clients send their
# key with the first request.
_KEYLESS_SHARE = 0.125


def open_listeners(config: ServerConfig) -> list[socket.socket]:
    ports = {"port": config.port, "metrics_port": config.metrics_port}
    listeners: list[socket.socket] = []
    for name, port in ports.items():
        try:
            listeners += [] if port is None else [listen(config.host, port)]
        except OSError as error:
            for listener in listeners:
                listener.close()
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"{name} {port} on {config.host} is in use; choose another") from error
            remedy = "; --host takes an address of this machine" if isinstance(error, socket.gaierror) else ""
            why = f"{error.strerror or error}{remedy}"
            raise ConfigError(f"cannot listen on host {config.host!r}, port {port}: {why}") from error
    return listeners


def listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, kind, protocol)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Stream events are small and must not be delayed by Nagle's algorithm.
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            # Otherwise the kernel's megabytes of send buffer hide a slow reader for minutes.
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MIN_READ_BYTES)
        server.bind(address)
        server.listen(BACKLOG)
    except OSError:
        server.close()
        raise
    server.setblocking(False)
    return server


def url_of(listener: socket.socket, *, is_secure: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if is_secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def connection_limits(config: ServerConfig) -> ConnectionLimits:
    max_connections = raise_descriptor_limit(config.max_connections, config.replicas)
    if max_connections < config.max_connections:
        text = "the limit of open files (ulimit -n) allows %d connections at a time, where --max-connections is %d"
        logger.warning(text, max_connections, config.max_connections)
    per_address = _KEYLESS_SHARE if config.api_keys else _CLIENT_SHARE
    return ConnectionLimits(
        max_header_bytes=config.max_header_bytes,
        max_connections=max_connections,
        max_per_address=config.max_connections_per_address or max(1, int(per_address * max_connections)),
        max_per_key=config.max_connections_per_key or max(1, int(_CLIENT_SHARE * max_connections)),
        write_s=config.write_timeout_s,
    )


def raise_descriptor_limit(connections: int, engines: int) -> int:
    """Return how many connections the limit of open files allows.

    Raise `ConfigError` for none: libraries such as ZeroMQ abort the process when they may open no file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = SPARE + RESERVED_DESCRIPTORS + engines * DESCRIPTORS_PER_ENGINE
    needed = connections + others
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if soft <= others:
            raise ConfigError(
                f"the limit of open files (ulimit -n) is {hard}, and must be at least {others + 1}, or {needed} for "
                "max_connections: raise it with `ulimit -n`, in /etc/security/limits.conf or by the service manager"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return soft - others
    return connections
