"""HTTP listener of the engine process: Prometheus metrics, and explanations of requests."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

from skipjoin.vllm.lives import RequestLives
from skipjoin.vllm.metrics import EngineCollector
from skipjoin.vllm.options import PluginOptions

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_log = logging.getLogger("vllm.skipjoin")

_REQUESTS = "/debug/requests/"


def listen(
    collector: EngineCollector, lives: RequestLives | None, options: PluginOptions, engine: int
) -> Callable[[], None] | None:
    """Serve `/metrics` and `/debug/requests/ID` if a port is given, and return a function that stops it.

    Args:
        engine: Number of the data-parallel engine, which is added to the port.

    Raises:
        ValueError: The port cannot be opened.
    """
    if options.metrics_port is None or lives is None:
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
    server.set_app(with_explanations(make_wsgi_app(registry), lives))
    _log.info("metrics on http://%s:%d/metrics", options.metrics_host, port)

    def stop() -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    return stop


def with_explanations(metrics: WSGIApplication, lives: RequestLives) -> WSGIApplication:
    """Return an application that explains requests, and passes other paths on."""

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if not path.startswith(_REQUESTS):
            return metrics(environ, start)
        name = path.removeprefix(_REQUESTS).encode("latin-1").decode(errors="replace")
        found, status = lives.explain(name), "200 OK"
        if found is None:
            status = "404 Not Found"
            found = {"error": {"message": f"no request {name[:200]!r} is live or finished in the last ten minutes"}}
        start(status, [("Content-Type", "application/json")])
        return [json.dumps(found).encode()]

    return answer
