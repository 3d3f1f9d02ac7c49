"""Pages for browsers: the console. They are static files, need no key, and get their data with the viewer's key.

All work happens in the browser, so that no page can occupy this process for longer than a file of some kilobytes takes.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import NamedTuple

from fastapi import FastAPI, Request, Response

from skipjoin.server.api.page_paths import FILES

# Nothing from another host, no inline scripts or styles, no frames.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
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


class _Page(NamedTuple):
    body: bytes
    headers: dict[str, str]


def add_routes(app: FastAPI) -> None:
    """Add a route for each file."""
    pages = {path: _read(name) for path, name in FILES.items()}

    async def show(request: Request) -> Response:
        page = pages[request.url.path]
        if request.headers.get("if-none-match") == page.headers["etag"]:
            return Response(status_code=304, headers=page.headers)
        return Response(page.body, headers=page.headers)

    for path in pages:
        app.add_api_route(path, show, methods=["GET"], include_in_schema=False, name=path)


def _read(name: str) -> _Page:
    body = files("skipjoin").joinpath("console", *name.split("/")).read_bytes()
    kind = _TYPES[name.rpartition(".")[2]]
    return _Page(body, {**_HEADERS, "content-type": kind, "etag": f'"{hashlib.sha256(body).hexdigest()[:16]}"'})
