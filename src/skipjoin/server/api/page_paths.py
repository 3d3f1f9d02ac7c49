"""Paths of the pages for browsers, which need no key."""

from __future__ import annotations

_VIEWS = ("batches", "forecasts", "memory", "now", "objectives", "replicas", "request", "timeline")
_ASSETS = (
    *("style.css", "icon.svg"),
    *("main.js", "chat.js", "data.js", "dom.js", "format.js", "charts.js", "perfetto.js"),
    *(f"views/{name}.js" for name in _VIEWS),
)
# Files of the folder `console` by path.
FILES = {
    "/": "chat.html",
    "/console": "console.html",
    **{f"/console/{name}": name for name in _ASSETS},
}
