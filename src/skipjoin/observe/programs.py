from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from skipjoin.core.events import Arrived, Computed, Event, Finished, Preempted, Preemption
from skipjoin.core.request import ProgramId, Request
from skipjoin.core.step import Slice


@dataclass(slots=True)
class ProgramFacts:
    """Observations of one program."""

    arrival: float
    ended: float
    calls: int = 0  # of which `live` have not finished
    live: int = 0
    calls_s: float = 0.0  # sum of the calls' times to the end
    reached: int = 0  # tokens of its longest call, whose KV the next one could find
    recomputed: int = 0  # tokens computed again, because their KV was lost

    @property
    def completion_s(self) -> float:
        return self.ended - self.arrival


class ProgramLog:
    """Facts of programs, folded from events. `block_size` is the part of a prefix that can be found again."""

    def __init__(self, block_size: int) -> None:
        self.programs: dict[ProgramId, ProgramFacts] = {}
        self._block_size = block_size
        self._computed: dict[Request, int] = {}  # tokens of each live call that were computed at some time

    def observe(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Computed):
                for slice_ in event.result.plan.slices:
                    if slice_.request in self._computed:
                        self._compute(slice_)
            elif isinstance(event, Arrived):
                self._arrive(event.request)
            elif isinstance(event, Preempted):
                # Decode-only steps may have been reported together, without their slices.
                if event.request in self._computed and event.how is Preemption.DROP and event.request.progress.output:
                    known = event.request.progress.known - 1
                    self._computed[event.request] = max(self._computed[event.request], known)
            elif isinstance(event, Finished):
                self._finish(event)

    def _arrive(self, request: Request) -> None:
        if (name := request.options.program) is None:
            return
        facts = self.programs.setdefault(name, ProgramFacts(request.arrival, request.arrival))
        facts.calls += 1
        facts.live += 1
        self._computed[request] = min(facts.reached, len(request.prompt) - 1) // self._block_size * self._block_size

    def _compute(self, slice_: Slice) -> None:
        request, end = slice_.request, slice_.start + slice_.tokens
        computed = self._computed[request]
        if slice_.start < computed and request.options.program is not None:
            self.programs[request.options.program].recomputed += min(end, computed) - slice_.start
        self._computed[request] = max(computed, end)

    def _finish(self, event: Finished) -> None:
        request = event.request
        if self._computed.pop(request, None) is None or request.options.program is None:
            return
        facts = self.programs[request.options.program]
        facts.live -= 1
        facts.ended = event.now
        facts.calls_s += event.now - request.arrival
        facts.reached = max(facts.reached, request.progress.known - 1)
