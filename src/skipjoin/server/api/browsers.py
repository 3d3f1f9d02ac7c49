"""Protection against requests of web pages: Origin names their site, and Host reveals DNS rebinding."""

from __future__ import annotations

import codecs
import ipaddress
import re
import socket
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp

from skipjoin.config import ServerConfig
from skipjoin.config.access import ANY, is_loopback
from skipjoin.server.api.errors import ApiError, bad_request

Headers = Iterable[tuple[bytes, bytes]]

_LOCAL = "localhost"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/?#@\s]+?)\.?(:\d{1,5})?")
_JSON = re.compile(r"application/([\w.+-]+\+)?json")
# Byte-order marks, which some editors and shells write.
_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Time for which browsers cache a CORS preflight.
_MAX_AGE_S = 600


class SiteRules(NamedTuple):
    """Accepted hosts and origins, None for any.

    localhost and IP addresses are always accepted hosts, because no other site can have them.
    """

    hosts: frozenset[str] | None
    origins: frozenset[str] | None

    @classmethod
    def of(cls, config: ServerConfig) -> SiteRules:
        """Pages of other sites have no key, so only a local server without keys checks origins."""
        is_open_here = not config.api_keys and is_local(config.host)
        hosts = frozenset(name.lower() for name in config.allowed_hosts)
        checks_hosts = (hosts or is_open_here) and ANY not in hosts
        origins = frozenset(config.cors_origins)
        return cls(
            hosts | {config.host.lower()} if checks_hosts else None,
            origins if is_open_here and ANY not in origins else None,
        )

    def check(self, headers: Headers) -> None:
        hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
        host = hosts[0] if len(hosts) == 1 else ""
        # Browsers always name a host; checks of HAProxy and other programs of HTTP/1.0 need not.
        if self.hosts is not None and hosts and not _is_known(host, self.hosts):
            raise _refused(
                f"this server does not answer to the Host header {host!r}: it must be localhost, an IP address, or a "
                "name that --allowed-hosts gives",
                "host_not_allowed",
            )
        for name, value in headers:
            if name == b"origin" and not self._may_ask(value.decode("latin-1"), host):
                raise _refused(
                    f"this server does not answer pages of {value.decode('latin-1')}: --cors-origins gives those that "
                    "it answers",
                    "origin_not_allowed",
                )

    def _may_ask(self, origin: str, host: str) -> bool:
        return self.origins is None or origin in self.origins or origin.partition("://")[2] == host


ANY_SITE = SiteRules(None, None)


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", "x-should-retry"],
        max_age=_MAX_AGE_S,
    )


async def json_body(request: Request, *, has_any_type: bool = False) -> bytes:
    """Return a JSON body, or raise 415: pages of other sites cannot send that type without CORS.

    With `has_any_type`, clients without an origin may send another one.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if _JSON.fullmatch(kind) is None and not (has_any_type and "origin" not in request.headers):
        got = repr(kind) if kind else "none"
        raise ApiError(
            415,
            f"the body must be JSON and the header Content-Type must say so: application/json, got {got} "
            "(curl: -H 'Content-Type: application/json')",
            code="unsupported_media_type",
        )
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("identity", ""):
        raise ApiError(
            415,
            f"the body must not be compressed, but the header Content-Encoding says {encoding[:64]!r}",
            code="unsupported_media_type",
            headers={"Accept-Encoding": "identity"},
        )
    body = await request.body()
    if body.startswith(_MARKS):
        raise bad_request("the body is not valid JSON: it must be UTF-8 without a byte-order mark, and begins with one")
    return body


def is_local(host: str) -> bool:
    return is_loopback(str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]))


def _is_known(host: str, hosts: Collection[str]) -> bool:
    found = _HOST.fullmatch(host)
    name = found[1] if found else ""
    return name in hosts or name == _LOCAL or name.endswith(f".{_LOCAL}") or _is_address(name.strip("[]"))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refused(message: str, code: str) -> ApiError:
    return ApiError(403, message, code=code)
