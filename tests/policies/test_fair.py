"""Definition of service, and the service credited to a client that returns."""

from __future__ import annotations

from itertools import product

import pytest

from skipjoin.core.context import StepContext
from skipjoin.core.policy_set import Policies, is_decode_invariant
from skipjoin.core.refusals import ALL_TOO_LONG, INCOMING_TOO_LONG
from skipjoin.core.request import Request
from skipjoin.core.step import Slice
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.batching import Greedy
from skipjoin.policies.best_effort import LimitedBestEffort, Patience
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.eviction import Recompute
from skipjoin.policies.fairness import Fair, FairSteps
from skipjoin.policies.ordering import Fcfs, Prioritized
from support.load import make


class Clients:
    def __init__(self) -> None:
        self.ordering = Fair(Fcfs, lead=100, output_weight=2.0)
        self._next = 0

    def send(self, client: str) -> Request:
        request = make(self._next, 30, 50, arrival=self._next, client=client)
        self._next += 1
        self.ordering.on_arrived(request, 0.0)
        return request

    def run(self, request: Request, tokens: int, start: int = 0) -> None:
        for at in range(start, start + tokens) if start >= 30 else (start,):
            width = 1 if start >= 30 else tokens
            self.ordering.on_scheduled([Slice(request, at, width, at + width >= 30, False, ())], 0.0)

    def order(self) -> list[str]:
        return [request.options.client for request in self.ordering.ranked(0.0)]


def test_prompts_count_once_and_outputs_by_weight() -> None:
    clients = Clients()
    sent = clients.send("a")
    clients.run(sent, 20)
    assert clients.ordering.served("a") == 20
    clients.run(sent, 30)  # after a drop, the prompt is computed again, with the rest
    assert clients.ordering.served("a") == 30 + 2
    clients.run(sent, 5, start=30)
    assert clients.ordering.served("a") == 30 + 2 * 6


def test_charges_count_as_output() -> None:
    clients = Clients()
    sent, other = clients.send("a"), clients.send("b")
    clients.ordering.on_charged(sent, 3.5, 0.0)
    assert clients.ordering.served("a") == 7
    assert clients.order() == [other.options.client, "a"]


def test_charges_of_finished_requests_count_while_others_have_requests() -> None:
    clients = Clients()
    sent, other = clients.send("a"), clients.send("b")
    clients.ordering.on_finished(sent, 0.0)
    clients.ordering.on_charged(sent, 3.5, 0.0)
    clients.send("a")
    assert clients.ordering.served("a") == 7
    assert clients.order() == [other.options.client, "a"]


def test_idle_clients_save_up_no_service() -> None:
    clients = Clients()
    busy = clients.send("busy")
    clients.run(busy, 29)
    clients.send("new")
    assert clients.ordering.served("new") == 29
    assert clients.order() == ["new", "busy"]
    clients.send("newer")
    assert clients.order() == ["newer", "new", "busy"]


def test_a_clients_excess_service_is_kept_while_others_have_requests() -> None:
    clients = Clients()
    greedy, other = clients.send("greedy"), clients.send("other")
    clients.run(greedy, 28)
    clients.ordering.on_finished(greedy, 0.0)
    again = clients.send("greedy")
    assert clients.ordering.served("greedy") == 28
    assert clients.order() == ["other", "greedy"]
    for request in (other, again):
        clients.ordering.on_finished(request, 0.0)
    clients.send("other")
    assert clients.ordering.served("greedy") == clients.ordering.served("other") == 0


def test_requests_are_preempted_only_beyond_the_lead() -> None:
    clients = Clients()
    ahead, behind = clients.send("ahead"), clients.send("behind")
    clients.run(ahead, 30)
    assert clients.order() == ["behind", "ahead"]
    assert not clients.ordering.outranks(behind, ahead)
    clients.run(ahead, 40, start=30)
    assert clients.ordering.outranks(behind, ahead)
    assert not clients.ordering.outranks(ahead, behind)


# Seconds whose sums are exact in floating point.
COST = LinearCost(floor=8.0, prefill_token=1.0, decode=1.0)


def begun(number: int, client: str, *, best_effort: bool = False) -> Request:
    request = make(number, 21, client=client, best_effort=best_effort)
    request.progress.planned = request.progress.computed = 20
    return request


def step(live: list[Request], offered: list[Request]) -> list[object]:
    batcher = FairSteps(
        LimitedBestEffort(Greedy(100, 1000, chunked=True), Patience(COST), lambda request: request.is_best_effort)
    )
    policies = Policies(Prioritized(Fcfs), batcher, OnDemand(), Recompute())
    for request, notify in product(live, policies.on_arrived):
        notify(request, 0.0)
    assert is_decode_invariant(batcher) is (len({request.options.client for request in live}) < 2)
    builder = batcher.open(StepContext(now=0.0))
    found: list[object] = []
    for request in offered:
        verdict = builder.offer(request, request.progress.pending)
        if isinstance(verdict, int):
            builder.take(request, verdict)
        found.append(verdict)
    for request, notify in product(live, policies.on_finished):
        notify(request, 0.0)
    assert is_decode_invariant(batcher)
    return found


@pytest.mark.parametrize("clients", [2, 3, 5])
def test_the_step_time_limit_is_proportional_to_the_number_of_clients(clients: int) -> None:
    """The two decodes of the first client take 10 s alone."""
    first = [begun(0, "0"), begun(1, "0")]
    others = [begun(10 + number, str(1 + number % (clients - 1))) for number in range(90)]
    n_taken = clients * 10 - 10
    assert step([*first, *others], [*first, *others]) == [1] * (2 + n_taken) + [ALL_TOO_LONG] * (90 - n_taken)


def test_a_single_client_fills_the_step() -> None:
    flood = [begun(number, "a") for number in range(100)]
    assert step(flood, flood) == [1] * 100


def test_prompts_of_other_clients_are_cut_to_the_time_limit() -> None:
    chat, prompts = begun(0, "a"), [make(number, 500, client="b") for number in (1, 2)]
    _, first, second = step([chat, *prompts], [chat, *prompts])
    assert first == second == INCOMING_TOO_LONG, "there is time for 9 tokens, which is too short a chunk"
    long = make(0, 40, client="a")
    _, first, second = step([long, *prompts], [long, *prompts])
    assert 48 - 16 <= first <= 48
    assert second is INCOMING_TOO_LONG
