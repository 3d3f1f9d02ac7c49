"""Export of request spans over OTLP/HTTP, which needs OpenTelemetry."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable
from functools import partial

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import SpanKind, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from skipjoin.core.events import Event
from skipjoin.core.request import Request
from skipjoin.observe.spans import Span, SpanLog
from skipjoin.server.engines.otlp import (
    SpanIds,
    encode_attribute,
    encode_frequent_attribute,
    encode_request,
    encode_span,
)
from skipjoin.server.engines.span_sender import SpanSender
from skipjoin.version import VERSION

_NS = 1_000_000_000


class TraceWriter:
    """Encodes the spans of finished requests, for a thread that sends them.

    OpenTelemetry's SDK decides what is sampled. Its spans and exporter are not used, because they take 0.3 ms of a
    request.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "skipjoin"}
        resource = Resource.create({"service.version": VERSION, "service.instance.id": str(os.getpid()), **named})
        described = {key: value for key, value in resource.attributes.items() if isinstance(value, str)}
        self._sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler
        self._propagator = TraceContextTextMapPropagator()
        self._model = encode_attribute("gen_ai.request.model", model)
        self._random = random.Random()
        self._sender = SpanSender(endpoint, partial(encode_request, described, "skipjoin", VERSION))
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
        ids = self._random.randbytes(16 + 8 * len(spans))
        trace, parent = ids[:16], None
        if client.is_valid:
            trace, parent = client.trace_id.to_bytes(16), client.span_id.to_bytes(8)
        whole, *parts = spans
        sampling = self._sampler.should_sample(context, int.from_bytes(trace), whole.name, SpanKind.SERVER)
        if sampling.decision is not Decision.RECORD_AND_SAMPLE:
            return
        offset = time.time_ns() - time.monotonic_ns()

        def nanoseconds(seconds: float) -> int:
            return round(seconds * _NS) + offset

        root = ids[16:24]
        attributes = encode_attribute("gen_ai.request.id", given.request_id) + self._model + _encode(whole)
        times = nanoseconds(whole.begin), nanoseconds(whole.end)
        encoded = [encode_span(whole.name, SpanIds(trace, root, parent), *times, attributes, is_server=True)]
        for at, part in enumerate(parts, start=3):
            own = SpanIds(trace, ids[8 * at : 8 * at + 8], root)
            encoded.append(encode_span(part.name, own, nanoseconds(part.begin), nanoseconds(part.end), _encode(part)))
        self._sender.put(b"".join(encoded))


def _encode(span: Span) -> bytes:
    # Numbers with a fraction are hardly ever equal.
    return b"".join(
        [
            (encode_attribute if type(value) is float else encode_frequent_attribute)(key, value)
            for key, value in span.attributes.items()
        ]
    )
