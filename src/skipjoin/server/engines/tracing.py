"""Export of request spans over OTLP/HTTP, which needs OpenTelemetry."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import SpanKind, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from skipjoin.core.events import Event
from skipjoin.core.request import Request
from skipjoin.observe.spans import Span, SpanLog
from skipjoin.server.engines.span_sender import SpanSender
from skipjoin.version import VERSION

_NS = 1_000_000_000
# `SpanFlags`: whether the parent is in another process is known, and it is.
_KNOWN = trace_pb2.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = _KNOWN | trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


class TraceWriter:
    """Encodes the spans of finished requests, for a thread that sends them.

    OpenTelemetry's SDK decides what is sampled. Its spans and exporter take 0.3 ms of a request.
    """

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
