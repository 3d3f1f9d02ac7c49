from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from skipjoin.core.events import Arrived, Decoded, Event, Finished, Preempted, Started, Token
from skipjoin.core.request import Request


class Span(NamedTuple):
    name: str
    begin: float
    end: float
    attributes: dict[str, Any]


# Names of OpenTelemetry's conventions where they have one.
_INPUT, _OUTPUT = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
_TTFT = "gen_ai.latency.time_to_first_token"


@dataclass(slots=True)
class _Open:
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    preemptions: list[Span] = field(default_factory=list)
    preempted: Preempted | None = None  # not resumed yet

    def resume(self, now: float) -> None:
        if (event := self.preempted) is not None:
            attributes = {"skipjoin.preemption.how": event.how.name.lower(), "skipjoin.preemption.kept": event.kept}
            self.preemptions.append(Span("preempted", event.now, now, attributes))
            self.preempted = None


class SpanLog:
    """Folds core events into the spans of traced requests, with the times of `RequestFacts`.

    `on_end` is called with each finished request and its spans. The first span contains the others.
    """

    def __init__(self, on_end: Callable[[Request, list[Span]], None]) -> None:
        self._on_end = on_end
        self._live: dict[Request, _Open] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            Arrived: self._arrive,
            Started: self._start,
            Preempted: self._preempt,
            Decoded: self._decode,
            Finished: self._finish,
        }

    def observe(self, events: Iterable[Event]) -> None:
        live, handlers = self._live, self._handlers
        for event in events:
            if type(event) is Token:
                if (span := live.get(event.request)) is not None:
                    span.last_token = event.now
                    if span.first_token is None:
                        span.first_token = event.now
            elif (handle := handlers.get(type(event))) is not None:
                handle(event)

    def _arrive(self, event: Arrived) -> None:
        if event.request.options.trace is not None:
            self._live[event.request] = _Open()

    def _start(self, event: Started) -> None:
        if (span := self._live.get(event.request)) is not None:
            span.started = event.now if span.started is None else span.started
            span.resume(event.now)

    def _preempt(self, event: Preempted) -> None:
        if (span := self._live.get(event.request)) is not None:
            span.resume(event.now)
            span.preempted = event

    def _decode(self, event: Decoded) -> None:
        for request in event.requests:
            if (span := self._live.get(request)) is not None:
                span.last_token = event.ends[-1]
                span.first_token = event.ends[0] if span.first_token is None else span.first_token

    def _finish(self, event: Finished) -> None:
        if (span := self._live.pop(event.request, None)) is None:
            return
        span.resume(event.now)
        request, end = event.request, event.now
        spans = [Span("queue", request.arrival, end if span.started is None else span.started, {})]
        if span.started is not None:
            spans.append(Span("prefill", span.started, end if span.first_token is None else span.first_token, {}))
        if span.first_token is not None and span.last_token is not None:
            spans.append(Span("decode", span.first_token, span.last_token, {}))
        attributes = {
            _INPUT: len(request.prompt),
            _OUTPUT: len(request.progress.output),
            "gen_ai.response.finish_reasons": (event.reason.value,),
            "skipjoin.service": request.options.service.value,
            "skipjoin.preemptions": len(span.preemptions),
        }
        if span.first_token is not None:
            attributes[_TTFT] = span.first_token - request.arrival
        whole = Span("request", request.arrival, end, attributes)
        self._on_end(request, [whole, *spans, *span.preemptions])
