from __future__ import annotations

from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from skipjoin.server.api.errors import ApiError, bad_request

_BODY_HEADERS = (b"content-length", b"transfer-encoding")


class TolerantProtocol(HttpToolsProtocol):
    """uvicorn's connection, without upgrades (RFC 9110, 7.8), and for HTTP/1.0 without chunks and interim responses.

    The parser takes all bytes after a head with an upgrade, so it gets such a head again without it.
    """

    fault: ApiError | None = None  # raised by a callback of the parser
    ignores_upgrade = False  # the current head is about to be repeated

    def feed(self, data: bytes | memoryview) -> bytes | memoryview:
        """Parse data up to the end of a head with an upgrade, and return the rest.

        Raises:
            HttpParserUpgrade: After a CONNECT request.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self.ignores_upgrade:
                raise
            self.ignores_upgrade = False
            self.parser.feed_data(self._head_without_upgrade())
            return data[upgrade.args[0] :]
        return b""

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self.ignores_upgrade = self.parser.get_method() != b"CONNECT"
            if self.ignores_upgrade:
                return
            self._check_connect()
        super().on_headers_complete()
        if _is_old(self.cycle):
            self.cycle.waiting_for_100_continue = False

    def _check_connect(self) -> None:
        if any(name in _BODY_HEADERS and value != b"0" for name, value in self.headers):
            self.fault = bad_request("a CONNECT request must not have a body: leave it out")
            raise self.fault

    def on_message_complete(self) -> None:
        if not self.ignores_upgrade:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, _close_delimited(app, cycle) if _is_old(cycle) else app)

    def interim_response(self, cycle: RequestResponseCycle) -> bytes:
        return b"" if cycle.response_started or _is_old(cycle) else b"HTTP/1.1 100 Continue\r\n\r\n"


def _is_old(cycle: RequestResponseCycle) -> bool:
    return cycle.scope["http_version"] == "1.0"


def _close_delimited(app: Any, cycle: RequestResponseCycle) -> Any:
    """Let the end of the connection end a response without a length."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        is_delimited = False

        async def send_unchunked(message: Message) -> None:
            nonlocal is_delimited
            if message["type"] == "http.response.start":
                is_delimited = all(name.lower() != b"content-length" for name, _ in message.get("headers", []))
                if is_delimited:
                    cycle.chunked_encoding = False
            elif is_delimited:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unchunked)

    return run
