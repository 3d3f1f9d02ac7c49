from __future__ import annotations

import gzip
import logging
import os
import random
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from http.client import HTTPException
from typing import Any, Generic, TypeVar

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import SpanKind, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.re import parse_env_headers

from skipjoin.core.events import Event
from skipjoin.core.request import Request
from skipjoin.observe.spans import Span, SpanLog
from skipjoin.system.unreachable import why_unreachable
from skipjoin.version import VERSION

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
    """Redirects would turn the request into a GET."""

    def redirect_request(self, *_: object) -> None:
        return None


class SpanSender(Generic[SpansT]):
    """Posts spans once per second in a thread, and drops those that the collector does not take in time.

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


_NS = 1_000_000_000
# `SpanFlags`: whether the parent is in another process is known, and it is.
_KNOWN = trace_pb2.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = _KNOWN | trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


class TraceWriter:
    """OpenTelemetry's SDK decides what is sampled. Its spans and exporter take 0.3 ms of a request."""

    def __init__(self, endpoint: str, model: str) -> None:
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "skipjoin"}
        resource = Resource.create({"service.version": VERSION, "service.instance.id": str(os.getpid()), **named})
        described = {key: value for key, value in resource.attributes.items() if isinstance(value, str)}
        self._resource = resource_pb2.Resource(attributes=_attributes(described))
        self._sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        self._random = random.Random()
        self._sender = SpanSender(endpoint, self._encode)
        self._log = SpanLog(self._export)

    def observe(self, events: Iterable[Event]) -> None:
        self._log.observe(events)

    def flush(self) -> None: ...

    def close(self) -> None:
        self._sender.close()

    def _export(self, request: Request, spans: list[Span]) -> None:
        given = request.options.trace
        assert given is not None
        context = self._propagator.extract({"traceparent": given.parent}) if given.parent else None
        client = get_current_span(context).get_span_context()
        trace, parent = self._random.randbytes(16), b""
        if client.is_valid:
            trace, parent = client.trace_id.to_bytes(16), client.span_id.to_bytes(8)
        whole, *parts = spans
        sampling = self._sampler.should_sample(context, int.from_bytes(trace), whole.name, SpanKind.SERVER)
        if sampling.decision is not Decision.RECORD_AND_SAMPLE:
            return
        offset = time.time_ns() - time.monotonic_ns()

        def encoded(span: Span, parent: bytes, **more: Any) -> trace_pb2.Span:
            return trace_pb2.Span(
                trace_id=trace,
                span_id=self._random.randbytes(8),
                parent_span_id=parent,
                name=span.name,
                start_time_unix_nano=round(span.begin * _NS) + offset,
                end_time_unix_nano=round(span.end * _NS) + offset,
                **more,
            )

        own = {
            "gen_ai.operation.name": given.operation,
            "gen_ai.provider.name": "skipjoin",
            "gen_ai.request.id": given.request_id,
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": given.response_id,
            "gen_ai.response.model": self._model,
            **whole.attributes,
        }
        kind, flags = trace_pb2.Span.SPAN_KIND_SERVER, _REMOTE if parent else _KNOWN
        root = encoded(whole, parent, kind=kind, flags=flags, attributes=_attributes(own))
        kind = trace_pb2.Span.SPAN_KIND_INTERNAL
        inner = [
            encoded(part, root.span_id, kind=kind, flags=_KNOWN, attributes=_attributes(part.attributes))
            for part in parts
        ]
        self._sender.put([root, *inner])

    def _encode(self, batch: list[list[trace_pb2.Span]]) -> bytes:
        scope = InstrumentationScope(name="skipjoin", version=VERSION)
        scoped = trace_pb2.ScopeSpans(scope=scope, spans=[span for spans in batch for span in spans])
        whole = trace_pb2.ResourceSpans(resource=self._resource, scope_spans=[scoped])
        message: bytes = ExportTraceServiceRequest(resource_spans=[whole]).SerializeToString()
        return message


def _attributes(values: Mapping[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in values.items()]


def _value(value: Any) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=map(_value, value)))
