from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# As long as engines keep the histories of finished requests.
KEEP_S = 600.0
MAX_FINISHED = 20_000


@dataclass(slots=True, eq=False)
class IndexedRequest:
    """HTTP request, or line of a batch, which has no `request_id`. `choices` are by sequence number."""

    response_id: str
    request_id: str
    owner: str
    choices: dict[int, int] = field(default_factory=dict)
    program: str = ""
    cancel: Callable[[], None] = lambda: None
    ended: float | None = None


class RequestIndex:
    def __init__(
        self, *, keep_s: float = KEEP_S, max_finished: int = MAX_FINISHED, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keep_s = keep_s
        self._max_finished = max_finished
        self._clock = clock
        self._by_id: dict[str, list[IndexedRequest]] = {}
        self._by_number: dict[int, IndexedRequest] = {}
        self._finished: deque[IndexedRequest] = deque()

    def add(
        self, response_id: str, request_id: str, owner: str, numbers: Sequence[int], program: str = ""
    ) -> IndexedRequest:
        choices = {number: at for at, number in enumerate(numbers)}
        found = IndexedRequest(response_id, request_id, owner, choices, program)
        for name in _names(found):
            self._by_id.setdefault(name, []).append(found)
        self._by_number.update(dict.fromkeys(found.choices, found))
        return found

    def ended(self, request: IndexedRequest) -> None:
        if request.ended is None:
            request.ended = self._clock()
            self._finished.append(request)
        self._forget_old()

    def find(self, name: str, owner: str | None) -> IndexedRequest | None:
        """Return the request with this response id, or else the newest with this `x-request-id`."""
        named = self._named(name, owner)
        by_response = (request for request in named if request.response_id == name)
        return next(by_response, None) or next((request for request in named if request.request_id == name), None)

    def find_call(self, name: str, owner: str | None) -> IndexedRequest | None:
        """Also find the newest call of a program."""
        return self.find(name, owner) or next(iter(self._named(name, owner)), None)

    def _named(self, name: str, owner: str | None) -> list[IndexedRequest]:
        self._forget_old()
        return [request for request in reversed(self._by_id.get(name, ())) if owner is None or request.owner == owner]

    def of_number(self, number: int) -> IndexedRequest | None:
        return self._by_number.get(number)

    def _forget_old(self) -> None:
        oldest = self._clock() - self._keep_s
        while self._finished and ((self._finished[0].ended or 0) < oldest or len(self._finished) > self._max_finished):
            request = self._finished.popleft()
            for number in request.choices:
                del self._by_number[number]
            for name in _names(request):
                self._by_id[name].remove(request)
                if not self._by_id[name]:
                    del self._by_id[name]


def _names(request: IndexedRequest) -> set[str]:
    return {request.response_id, request.request_id, request.program} - {""}
