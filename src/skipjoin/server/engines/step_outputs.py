from __future__ import annotations

from collections.abc import Iterable

from skipjoin.core.events import Event, Finished, Token
from skipjoin.core.step import StepPlan
from skipjoin.server.engines.messages import StepOutputs


class StepOutputsBuilder:
    """Builder of the `StepOutputs` messages.

    Before a step that starts requests, it sends their ids, which are the suspects if the engine crashes.
    """

    def __init__(self) -> None:
        self._new: set[int] = set()  # requests that have not run yet

    def arrived(self, request_id: int) -> None:
        self._new.add(request_id)

    def begin(self, plan: StepPlan) -> StepOutputs | None:
        new = [slice_ for slice_ in plan.slices if slice_.request.id in self._new] if self._new else []
        started = [slice_.request.id for slice_ in new]
        self._new.difference_update(started)
        # The first slice of a request begins after its prefix-cache hits.
        cached = {slice_.request.id: slice_.start for slice_ in new if slice_.start}
        return StepOutputs(started=started, cached=cached) if started else None

    def fold(self, events: Iterable[Event]) -> StepOutputs | None:
        out = StepOutputs()
        for event in events:
            if isinstance(event, Token):
                if event.detail is not None:
                    out.details[len(out.ids)] = event.detail  # type: ignore[assignment]
                out.ids.append(event.request.id)
                out.tokens.append(event.token)
            elif isinstance(event, Finished):
                self._new.discard(event.request.id)
                out.ended.append((event.request.id, event.reason.value))
                if event.detail:
                    out.errors[event.request.id] = event.detail
                if event.is_refused:
                    out.refused.append(event.request.id)
        return out if out.ids or out.ended else None
