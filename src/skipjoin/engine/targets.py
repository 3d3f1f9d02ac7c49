from __future__ import annotations

from collections.abc import Iterable
from math import inf
from weakref import WeakSet

from skipjoin.core.events import Event, Finished
from skipjoin.core.forecast import Forecast
from skipjoin.core.policy import CostModel
from skipjoin.core.request import FinishReason, Request
from skipjoin.policies.execution import scaled_jct

# Finish reasons of requests that have their whole output.
_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


class RelativeTargets:
    """Sets JCT targets of `scale` times a request's time alone by its forecast (EconoServe section 4)."""

    def __init__(self, cost: CostModel, scale: float) -> None:
        self._cost = cost
        self._scale = scale
        self._requests: WeakSet[Request] = WeakSet()  # requests whose targets are set here

    def arrived(self, request: Request) -> None:
        if request.progress.target.jct_s == inf:
            self._requests.add(request)
            if request.progress.forecast is not None:
                self._set(request, request.progress.forecast.tokens)

    def reforecast(self, request: Request, forecast: Forecast) -> None:
        """Update the target before the core takes the forecast, so that policies see both."""
        if request in self._requests:
            self._set(request, forecast.tokens)

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Finished) and event.reason in _WHOLE and event.request in self._requests:
                self._set(event.request, len(event.request.progress.output))

    def _set(self, request: Request, tokens: float) -> None:
        jct_s = scaled_jct(self._cost, self._scale, len(request.prompt))(tokens)
        progress = request.progress
        progress.expect(progress.forecast, progress.target._replace(jct_s=jct_s))
