from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

from skipjoin.vllm.histories import RequestHistories
from skipjoin.vllm.metrics import EngineCollector
from skipjoin.vllm.options import PluginOptions

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_log = logging.getLogger("vllm.skipjoin")

_METRICS, _REQUESTS = "/metrics", "/debug/requests/"
_METHODS = ("GET", "HEAD")
_ALLOWED = ("Allow", ", ".join(_METHODS))
_JSON = ("Content-Type", "application/json")
# The library refuses HEAD. In OpenMetrics, which Prometheus 2 prefers, it replaces the colons of names.
_AS_TEXT = {"REQUEST_METHOD": "GET", "HTTP_ACCEPT": "text/plain"}


def listen(
    collector: EngineCollector, histories: RequestHistories | None, options: PluginOptions, engine: int
) -> Callable[[], None] | None:
    """Serve `/metrics` and `/debug/requests/ID` if a port is given, and return a function that stops it.

    `engine`, the number of the data-parallel engine, is added to the port.
    """
    if options.metrics_port is None or histories is None:
        return None
    port = options.metrics_port + engine
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, addr=options.metrics_host, registry=registry)
    except OSError as error:
        raise ValueError(
            f"metrics_port {port} cannot be opened on {options.metrics_host}: {error.strerror}; choose another one"
        ) from error
    server.set_app(application(make_wsgi_app(registry), histories))
    _log.info("metrics on http://%s:%d/metrics", options.metrics_host, port)

    def stop() -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    return stop


def application(metrics: WSGIApplication, histories: RequestHistories) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path != _METRICS and not path.startswith(_REQUESTS):
            return _error(start, "404 Not Found", f"there is no {path[:200]!r} here, only {_METRICS} and {_REQUESTS}ID")
        if method not in _METHODS:
            return _error(start, "405 Method Not Allowed", f"{path[:200]} answers GET, not {method}", _ALLOWED)
        if path == _METRICS:
            found = metrics(environ | _AS_TEXT, start)
        else:
            found = explain(path.removeprefix(_REQUESTS).encode("latin-1").decode(errors="replace"), start)
        return found if method == "GET" else ()

    def explain(name: str, start: StartResponse) -> Iterable[bytes]:
        found = histories.explain(name)
        if found is None:
            text = f"no request {name[:200]!r} is live or finished in the last ten minutes"
            return _error(start, "404 Not Found", text)
        start("200 OK", [_JSON])
        return [json.dumps(found).encode()]

    return answer


def _error(start: StartResponse, status: str, message: str, *headers: tuple[str, str]) -> Iterable[bytes]:
    start(status, [_JSON, *headers])
    return [json.dumps({"error": {"message": message}}).encode()]
