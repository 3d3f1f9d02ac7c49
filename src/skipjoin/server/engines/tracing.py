"""Export of request spans over OTLP/HTTP. Imported only with --otlp-traces-endpoint, which needs OpenTelemetry."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from skipjoin.core.events import Event
from skipjoin.core.request import Request
from skipjoin.observe.spans import Span, SpanLog
from skipjoin.version import VERSION

_NS = 1_000_000_000
# Time for the last spans at shutdown, in milliseconds.
_FLUSH_MS = 2000


class TraceWriter:
    """Sends the spans of finished requests in a thread. Spans that the collector does not take in time are dropped.

    OpenTelemetry's variables apply, such as OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS and OTEL_TRACES_SAMPLER.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "skipjoin"}
        resource = Resource.create({"service.version": VERSION, "service.instance.id": str(os.getpid()), **named})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("skipjoin", VERSION)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        self._log = SpanLog(self._export)

    def observe(self, events: Iterable[Event]) -> None:
        """Process events in order."""
        self._log.observe(events)

    def flush(self) -> None:
        """Do nothing: the thread sends spans at intervals."""

    def close(self) -> None:
        """Send the remaining spans."""
        self._processor.force_flush(_FLUSH_MS)
        self._provider.shutdown()

    def _export(self, request: Request, spans: list[Span]) -> None:
        trace = request.options.trace
        assert trace is not None
        offset = time.time_ns() - time.monotonic_ns()
        context = self._propagator.extract({"traceparent": trace.parent})
        for span in spans:
            attributes = span.attributes
            is_root = span is spans[0]
            if is_root:
                own = {"gen_ai.request.model": self._model, "gen_ai.request.id": trace.request_id}
                attributes = own | attributes
            made = self._tracer.start_span(
                span.name,
                context,
                kind=SpanKind.SERVER if is_root else SpanKind.INTERNAL,
                attributes=attributes,
                start_time=round(span.begin * _NS) + offset,
            )
            made.end(round(span.end * _NS) + offset)
            if is_root:
                context = set_span_in_context(made, context)
