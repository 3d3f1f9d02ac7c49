from __future__ import annotations

import gzip
import logging
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from http.client import HTTPException
from typing import Generic, TypeVar

from opentelemetry.util.re import parse_env_headers

from skipjoin.system.unreachable import why_unreachable

logger = logging.getLogger(__name__)
SpansT = TypeVar("SpansT")  # spans of one request

_INTERVAL_S = 1.0
# Requests whose spans one message has: about 600 KiB.
_MAX_BATCH = 1024
# Requests whose spans wait for the collector: a few seconds of a loaded server, and about 5 MiB.
_MAX_WAITING = 8192
_TIMEOUT_S = 10.0
# Time for the last spans at shutdown.
_CLOSE_S = 2.0
_WARNING_INTERVAL_S = 60.0
# With these answers, the collector may accept the same spans later.
_TRY_AGAIN = (429, 502, 503, 504)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Treats redirects as errors, because they would turn the request into a GET."""

    def redirect_request(self, *_: object) -> None:
        return None


class SpanSender(Generic[SpansT]):
    """Posts spans once per second in a thread. Those that the collector does not take in time are dropped.

    OpenTelemetry's variables for headers, certificates, compression and timeout apply.
    """

    def __init__(self, endpoint: str, build: Callable[[list[SpansT]], bytes]) -> None:
        self._endpoint = endpoint
        self._build = build
        self._headers = {"Content-Type": "application/x-protobuf"}
        self._headers |= parse_env_headers(_variable("HEADERS") or "", liberal=True)
        self._timeout_s = float(_variable("TIMEOUT") or _TIMEOUT_S)
        self._is_compressed = _variable("COMPRESSION") == "gzip"
        if self._is_compressed:
            self._headers["Content-Encoding"] = "gzip"
        context = ssl.create_default_context(cafile=_variable("CERTIFICATE"))
        if (certificate := _variable("CLIENT_CERTIFICATE")) is not None:
            context.load_cert_chain(certificate, _variable("CLIENT_KEY"))
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _NoRedirects)
        self._waiting: deque[SpansT] = deque()
        self._batch: list[SpansT] = []  # taken from the queue and not accepted yet
        self._dropped = 0
        self._warned_at: float | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, spans: SpansT) -> None:
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(spans)
        else:
            self._dropped += 1

    def close(self) -> None:
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._closing.wait(_INTERVAL_S):
            self._warn(self._send_all())
        problem = self._send_all()
        self._dropped += len(self._batch) + len(self._waiting)
        self._batch, self._warned_at = [], None
        self._waiting.clear()
        self._warn(problem)

    def _send_all(self) -> str:
        problem = "does not keep up"
        while self._batch or self._waiting:
            if not self._batch:
                self._batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MAX_BATCH))]
            try:
                self._post(self._build(self._batch))
            except urllib.error.HTTPError as error:
                error.close()
                problem = f"answered {error.code} {error.reason}"
                if error.code in _TRY_AGAIN:
                    break
                self._dropped += len(self._batch)
            except (OSError, HTTPException) as error:
                problem = f"cannot be reached: {why_unreachable(error)}"
                break
            self._batch = []
        return problem

    def _post(self, message: bytes) -> None:
        body = gzip.compress(message) if self._is_compressed else message
        request = urllib.request.Request(self._endpoint, body, self._headers)
        with self._opener.open(request, timeout=self._timeout_s) as answer:
            answer.read()

    def _warn(self, problem: str) -> None:
        if not (self._dropped or self._batch):
            return
        now = time.monotonic()
        if self._warned_at is not None and now - self._warned_at < _WARNING_INTERVAL_S:
            return
        dropped, self._dropped, self._warned_at = self._dropped, 0, now
        waiting = len(self._batch) + len(self._waiting)
        logger.warning(
            "%s %s: spans of %d requests were dropped, and those of %d are kept",
            self._endpoint,
            problem,
            dropped,
            waiting,
        )


def _variable(name: str) -> str | None:
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}")
