"""What batchers see: the requests that a step could run, and whose space they would take."""

from __future__ import annotations

from skipjoin.core.policy import BatchBuilder, Policies
from skipjoin.core.request import Request
from skipjoin.core.scheduling.context import StepContext
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.batching import Greedy
from skipjoin.policies.eviction import Spill
from skipjoin.policies.ordering import Fcfs, Prioritized
from support.load import make
from support.policies import COST
from support.watch import Stepper, World


class Looking(Greedy):
    """Keeps what it was shown."""

    def open(self, context: StepContext) -> BatchBuilder:
        self.seen = [request for request, _ in context.candidates]
        return super().open(context)


def looking() -> tuple[Stepper, Looking]:
    """An engine of 10 blocks of 4 tokens."""
    batcher = Looking(8, 1000, chunked=False)
    policies = Policies(Prioritized(Fcfs), batcher, OnDemand(watermark=0.0), Spill(COST))
    return Stepper(World(device_blocks=10, max_seqs=8).core(policies)), batcher


def held_by(stepper: Stepper, *tokens: int) -> list[Request]:
    """Best-effort requests that hold KV of so many tokens."""
    requests = [make(number, count, 8, best_effort=True) for number, count in enumerate(tokens)]
    stepper.add(*requests)
    stepper.step()
    return requests


def test_real_time_requests_find_the_blocks_of_best_effort_ones_which_are_no_candidates_then() -> None:
    stepper, batcher = looking()
    first, last = held_by(stepper, 15, 15)
    chat = make(10, 12, 4)
    stepper.add(chat)
    stepper.step()
    assert batcher.seen == [chat, first]
    assert stepper.core.kv.footprint(last) == 3, "of four, one was short"


def test_what_they_give_up_beyond_need_is_for_real_time_requests_alone() -> None:
    stepper, batcher = looking()
    held_by(stepper, 31)
    chat, more, batch = make(10, 12, 4), make(11, 16, 4), make(12, 4, 4, best_effort=True)
    stepper.add(chat, more, batch)
    stepper.step()
    assert batcher.seen == [chat, more]


def test_without_real_time_requests_nothing_is_given_up() -> None:
    stepper, batcher = looking()
    first, last = held_by(stepper, 15, 15)
    stepper.add(make(10, 12, 4, best_effort=True))
    stepper.step()
    assert batcher.seen == [first, last]
