"""uvicorn, with bounds on what it reads before the application sees a request, and without its signal handlers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from skipjoin.server.api.errors import ApiError

# Connections that may wait to be accepted, so that the kernel refuses none of a burst.
BACKLOG = 2048
# Longer than clients' pools keep idle connections, so that the client closes them and not the server.
KEEP_ALIVE_S = 75
# Seconds for answers that are being written when the server ends.
LAST_ANSWERS_S = 2


def bounded_protocol(max_header_bytes: int) -> type[HttpToolsProtocol]:
    """A protocol that refuses a request whose head exceeds the bound before it is complete."""

    class BoundedProtocol(HttpToolsProtocol):
        """Counts the bytes of a head as they arrive. The application checks a head that is complete."""

        _head_bytes = 0  # of a head that is not complete yet
        _in_head = True
        _advanced = False

        def data_received(self, data: bytes) -> None:
            was_in_head = self._in_head
            self._advanced = False
            super().data_received(data)
            # Bytes that arrive together with the end of a head or body are not counted: they are one read at most.
            if was_in_head and not self._advanced and not self.transport.is_closing():
                self._head_bytes += len(data)
                if self._head_bytes > max_header_bytes:
                    self._refuse(ApiError(431, f"the request's head must have at most {max_header_bytes} bytes"))

        def on_headers_complete(self) -> None:
            self._in_head, self._advanced = False, True
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_head, self._advanced, self._head_bytes = True, True, 0
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            self._refuse(ApiError(400, "the request is not valid HTTP", code="invalid_http"))

        def _refuse(self, error: ApiError) -> None:
            body = error.body()
            head = (
                f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self.transport.close()

    return BoundedProtocol


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers: `launch` decides when the server ends."""

    def __init__(self, app: ASGIApp, *, max_header_bytes: int) -> None:
        settings: dict[str, Any] = {
            "http": bounded_protocol(max_header_bytes),
            "ws": "none",
            "lifespan": "off",
            "log_config": None,
            "log_level": "warning",
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "timeout_keep_alive": KEEP_ALIVE_S,
            "timeout_graceful_shutdown": LAST_ANSWERS_S,
        }
        super().__init__(uvicorn.Config(app, **settings))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signal."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free one. Raises OSError, for a port that is taken among others."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, kind, protocol)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Events are small and must be sent at once.
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server.bind(address)
        server.listen(BACKLOG)
    except OSError:
        server.close()
        raise
    server.setblocking(False)
    return server
