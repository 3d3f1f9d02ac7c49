from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from skipjoin.core.request import Request
from skipjoin.exec.grammars_ahead import client_of
from skipjoin.exec.sampling import Sampling
from skipjoin.structured_output import StructuredOutput

# Maximum sum of the weights of a client's constraints. A weight is the length of the text, and at least `_MIN_WEIGHT`.
# The largest constraints take a few MB each when they are compiled.
MAX_WEIGHT, _MIN_WEIGHT = 1 << 20, 1 << 12


@dataclass(slots=True)
class _Client:
    live: Counter[StructuredOutput] = field(default_factory=Counter)
    weight: int = 0
    waiting: dict[Request, None] = field(default_factory=dict)


class LiveConstraints:
    """Bounds the memory for the different constraints of each client's unfinished requests. More of them wait."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._changed: set[str] = set()  # clients of which requests may need no longer wait

    def add(self, request: Request) -> bool:
        """Return whether a request may use its constraint now. If not, `admitted` returns it later."""
        client = self._clients.setdefault(client_of(request), _Client())
        if (not client.waiting or _constraint(request) in client.live) and _admit(client, request):
            return True
        client.waiting[request] = None
        return False

    def admitted(self) -> list[Request]:
        admitted = []
        while self._changed:
            client = self._clients[self._changed.pop()]
            while client.waiting and _admit(client, request := next(iter(client.waiting))):
                del client.waiting[request]
                admitted.append(request)
        return admitted

    def on_finished(self, request: Request) -> None:
        name, constraint = client_of(request), _constraint(request)
        client = self._clients[name]
        if request in client.waiting:
            del client.waiting[request]
        else:
            client.live[constraint] -= 1
            if not client.live[constraint]:
                del client.live[constraint]
                client.weight -= _weight(constraint)
        self._changed.add(name)
        if not client.live and not client.waiting:
            del self._clients[name]
            self._changed.discard(name)


def _admit(client: _Client, request: Request) -> bool:
    constraint = _constraint(request)
    if constraint not in client.live:
        weight = client.weight + _weight(constraint)
        if client.live and weight > MAX_WEIGHT:
            return False
        client.weight = weight
    client.live[constraint] += 1
    return True


def _weight(constraint: StructuredOutput) -> int:
    return max(_MIN_WEIGHT, len(constraint.text))


def _constraint(request: Request) -> StructuredOutput:
    assert isinstance(request.sampling, Sampling)
    assert request.sampling.params.structured_outputs is not None
    return request.sampling.params.structured_outputs
