"""Objectives that follow from the work: JCT targets for requests that bring none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from weakref import WeakSet

from skipjoin.core.events import Event, Finished
from skipjoin.core.forecast import Forecast
from skipjoin.core.policy import CostModel
from skipjoin.core.request import FinishReason, Request
from skipjoin.policies.execution import scaled_jct

# Requests that ended so have their whole output.
_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


class RelativeTargets:
    """Gives each request without a JCT target one of `scale` times what it takes alone: its prefill, and a decode step
    for each of its output tokens (EconoServe section 4).

    Policies get that of the forecast, and another one with each forecast that follows: that of the true length would
    tell them the length. Once a request has its whole output, its target is that of the true length, for what counts.

    cost: of steps, as it is known when a target is set.
    """

    def __init__(self, cost: CostModel, scale: float) -> None:
        self._cost = cost
        self._scale = scale
        self._requests: WeakSet[Request] = WeakSet()  # those whose targets are set here

    def arrived(self, request: Request) -> None:
        """Before the core takes the request. Without a forecast it has no target until one follows."""
        if request.options.target.jct_s == inf:
            self._requests.add(request)
            if request.forecast is not None:
                self._set(request, request.forecast.tokens)

    def reforecast(self, request: Request, forecast: Forecast) -> None:
        """Before the core takes another forecast of the request, so that policies find both."""
        if request in self._requests:
            self._set(request, forecast.tokens)

    def observe(self, events: Iterable[Event]) -> None:
        """What happened, before anything is counted."""
        for event in events:
            if isinstance(event, Finished) and event.reason in _WHOLE and event.request in self._requests:
                self._set(event.request, len(event.request.output))

    def _set(self, request: Request, tokens: float) -> None:
        jct_s = scaled_jct(self._cost, self._scale, len(request.prompt))(tokens)
        request.options = replace(request.options, target=request.options.target._replace(jct_s=jct_s))
