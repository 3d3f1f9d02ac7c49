"""What counts as service, and what a client that comes back is taken to have had."""

from __future__ import annotations

from skipjoin.core.request import Request
from skipjoin.core.step import Slice
from skipjoin.policies.fairness import Fair
from skipjoin.policies.ordering import Fcfs
from support.load import make


class Clients:
    """Clients whose requests run as a test says."""

    def __init__(self) -> None:
        self.ordering = Fair(Fcfs, lead=100, output_weight=2.0)
        self._next = 0

    def send(self, client: str) -> Request:
        request = make(self._next, 30, 50, arrival=self._next, client=client)
        self._next += 1
        self.ordering.arrived(request, 0.0)
        return request

    def run(self, request: Request, tokens: int, start: int = 0) -> None:
        """Compute so many tokens; those after the prompt are sampled one by one."""
        for at in range(start, start + tokens) if start >= 30 else (start,):
            width = 1 if start >= 30 else tokens
            self.ordering.ran([Slice(request, at, width, at + width >= 30, False, ())], 0.0)

    def order(self) -> list[str]:
        return [request.options.client for request in self.ordering.ranked(0.0)]


def test_prompts_count_once_and_outputs_by_weight() -> None:
    clients = Clients()
    asked = clients.send("a")
    clients.run(asked, 20)
    assert clients.ordering.served("a") == 20
    clients.run(asked, 30)  # dropped, and computed again with the rest
    assert clients.ordering.served("a") == 30 + 2
    clients.run(asked, 5, start=30)
    assert clients.ordering.served("a") == 30 + 2 * 6


def test_time_without_requests_saves_nothing_up() -> None:
    clients = Clients()
    busy = clients.send("busy")
    clients.run(busy, 29)
    clients.send("new")
    assert clients.ordering.served("new") == 29
    assert clients.order() == ["busy", "new"]
    clients.run(busy, 1, start=29)
    assert clients.order() == ["new", "busy"]


def test_what_a_client_is_ahead_by_stays_while_others_have_requests() -> None:
    clients = Clients()
    greedy, other = clients.send("greedy"), clients.send("other")
    clients.run(greedy, 28)
    clients.ordering.finished(greedy, 0.0)
    again = clients.send("greedy")
    assert clients.ordering.served("greedy") == 28
    assert clients.order() == ["other", "greedy"]
    for request in (other, again):
        clients.ordering.finished(request, 0.0)
    clients.send("other")
    assert clients.ordering.served("greedy") == clients.ordering.served("other") == 0


def test_requests_make_way_after_a_lead_only() -> None:
    clients = Clients()
    ahead, behind = clients.send("ahead"), clients.send("behind")
    clients.run(ahead, 30)
    assert clients.order() == ["behind", "ahead"]
    assert not clients.ordering.outranks(behind, ahead)
    clients.run(ahead, 40, start=30)
    assert clients.ordering.outranks(behind, ahead)
    assert not clients.ordering.outranks(ahead, behind)
