"""Paths of the pages for browsers, which need no key."""

from __future__ import annotations

from typing import NamedTuple

_VIEWS = ("batches", "forecasts", "memory", "now", "objectives", "replicas", "request", "timeline", "whatif")
_ASSETS = (
    *("style.css", "icon.svg"),
    *("main.js", "chat.js", "conversation.js", "data.js", "dom.js", "format.js", "charts.js", "markdown.js"),
    "perfetto.js",
    *(f"views/{name}.js" for name in _VIEWS),
)
# The servers that the pages show, as JSON.
SERVERS_PATH = "/console/servers.json"


class NamedServer(NamedTuple):
    """Server that the pages show, and the prefix of its paths."""

    name: str
    path: str


# Files of the folder `console` by path.
FILES = {
    "/": "chat.html",
    "/console": "console.html",
    **{f"/console/{name}": name for name in _ASSETS},
}
