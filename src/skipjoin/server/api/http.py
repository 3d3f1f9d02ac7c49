from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from skipjoin.server.api.connections import ConnectionLimits, Connections
from skipjoin.server.api.http_protocol import BoundedProtocol

# Longer than clients' pools keep idle connections, so that the client closes them first.
KEEP_ALIVE_S = 75
# Time to finish writing responses when the server stops.
LAST_ANSWERS_S = 2


class HttpServer(uvicorn.Server):
    """uvicorn server without signal handlers: `lifecycle` decides when it stops."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        refused: Callable[[str], None] = lambda reason: None,
        trusted_proxies: Sequence[str] = (),
        tls: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        settings: dict[str, Any] = {
            "http": bounded_protocol(limits, refused, trusted_proxies),
            "ws": "none",
            "lifespan": "off",
            "log_config": None,
            "log_level": "warning",
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "timeout_keep_alive": KEEP_ALIVE_S,
            "timeout_graceful_shutdown": LAST_ANSWERS_S,
            **tls,
        }
        super().__init__(uvicorn.Config(app, **settings))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bounded_protocol(
    limits: ConnectionLimits, refused: Callable[[str], None], trusted_proxies: Sequence[str] = ()
) -> type[BoundedProtocol]:
    chunks: list[bytes] = []
    parts = {
        "limits": limits,
        "chunks": chunks,
        "on_body": chunks.append,
        "pool": Connections(limits, refused),
        "proxies": ProxyHeadersMiddleware(_no_app, list(trusted_proxies)),
    }
    return type("Connection", (BoundedProtocol,), parts)


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    """Do nothing. Only the address parsing of `ProxyHeadersMiddleware` is used."""
