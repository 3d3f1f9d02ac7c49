from __future__ import annotations

from collections.abc import Iterable

from skipjoin.core.events import Event, Finished, Token
from skipjoin.core.step import StepPlan
from skipjoin.sampling import TokenDetail
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
        ids: list[int] = []
        tokens: list[int] = []
        details: dict[int, TokenDetail] = {}
        ended: list[tuple[int, str]] = []
        errors: dict[int, str] = {}
        refused: list[int] = []
        for event in events:
            if isinstance(event, Token):
                if event.detail is not None:
                    details[len(ids)] = event.detail  # type: ignore[assignment]
                ids.append(event.request.id)
                tokens.append(event.token)
            elif isinstance(event, Finished):
                self._new.discard(event.request.id)
                ended.append((event.request.id, event.reason.value))
                if event.detail:
                    errors[event.request.id] = event.detail
                if event.is_refused:
                    refused.append(event.request.id)
        if ids or ended:
            return StepOutputs(ids=ids, tokens=tokens, details=details, ended=ended, errors=errors, refused=refused)
        return None
