from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

from fastapi import Request, Response

from skipjoin.routes import PAGES, SERVERS_PATH
from skipjoin.server.api.responses import encode

# Name of the server that sends the pages, and prefix of its paths.
_THIS_SERVER = {"name": "", "path": ""}
# Nothing from another host, no inline scripts or styles, no frames.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
# Headers of answers that are data, whatever they contain.
DATA_HEADERS = {"content-security-policy": "default-src 'none'; sandbox", "x-content-type-options": "nosniff"}
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}


class Page(NamedTuple):
    body: bytes
    headers: dict[str, str]


def read_pages(servers: Sequence[Mapping[str, str]] = (_THIS_SERVER,)) -> dict[str, Page]:
    pages = {path: _read(name) for path, name in PAGES.items()}
    return pages | {SERVERS_PATH: _page(encode(servers), "application/json")}


async def show(request: Request) -> Response:
    page: Page = request.app.state.pages[request.url.path]
    if request.headers.get("if-none-match") == page.headers["etag"]:
        return Response(status_code=304, headers=page.headers)
    return Response(page.body, headers=page.headers)


def _read(name: str) -> Page:
    body = files("skipjoin").joinpath("console", *name.split("/")).read_bytes()
    return _page(body, _TYPES[name.rpartition(".")[2]])


def _page(body: bytes, kind: str) -> Page:
    return Page(body, {**_HEADERS, "content-type": kind, "etag": f'"{hashlib.sha256(body).hexdigest()[:16]}"'})
