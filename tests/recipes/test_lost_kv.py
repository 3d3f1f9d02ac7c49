"""What a request is expected to compute again after a drop is what it then computes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from skipjoin.core.events import Admitted, Event, Preemption
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import Request
from skipjoin.core.step import StepPlan
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.eviction import Swap
from support.bounds import BoundedRun
from support.policies import COST
from support.watch import World

SIZE = 16


class Losses:
    """Tokens that dropped requests had, were expected to lose, and lacked when they returned."""

    def __init__(self, kv: KVLedger) -> None:
        self.had = self.expected = self.lost = 0
        self._kv, self._drop = kv, kv.drop
        self._dropped: dict[Request, tuple[int, int]] = {}
        kv.drop = self.drop  # type: ignore[method-assign]

    def drop(self, request: Request, *, keep: int = 0) -> None:
        self._dropped[request] = request.progress.computed, self._kv.lost(request, keep)
        self._drop(request, keep=keep)

    def check(self, run: BoundedRun, plan: StepPlan, begin: float, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Admitted) and event.request in self._dropped:
                had, expected = self._dropped.pop(event.request)
                self.had += had
                self.expected += expected
                self.lost += had - event.cached


@pytest.mark.parametrize(("recipe", "shared", "blocks"), [("alise", 0, 30), ("fastserve-recompute", 160, 30)])
def test_prices_of_recomputation_are_what_dropped_requests_compute_again(recipe: str, shared: int, blocks: int) -> None:
    """Dropped KV stays cached until its blocks are reused, and that of common prefixes while others hold it."""
    draw = Random(1)
    cost = LinearCost(0.01, 5e-4, 0.0, 1e-3, 0.0, 1e-4, 1e-4)

    def send(run: BoundedRun) -> None:
        while len(run.live) < 20:
            own = 1000 * (run.count + 1)
            run.add([*range(shared), *range(own, own + draw.randint(20, 120))], draw.randint(1, 60))

    run = BoundedRun(
        World(recipe, cost=cost, device_blocks=blocks, cpu_blocks=0, block_size=SIZE, max_seqs=8, max_tokens=256), send
    )
    losses = Losses(run.core.kv)
    run.invariants = [losses]
    run.run(lambda: run.now > 12)
    assert losses.had > 2.5 * losses.lost, "dropped requests lose most of their KV, and test nothing here"
    assert 0.75 * losses.lost <= losses.expected <= 1.33 * losses.lost


def test_a_request_is_dropped_rather_than_swapped_if_others_hold_most_of_its_kv() -> None:
    """A swap would move the common prefix, too, which recomputation finds."""
    how = {}
    for is_shared in (False, True):
        kv, requests = KVLedger(80, 80, 4), list[Request]()
        for number in (0, 1):
            own = 0 if is_shared else 1000 * number
            prompt = [*range(own, own + 120), 5000 + number, 1]
            request = Request(number, 0.0, prompt, 10, prefix=ContentPrefix(4))
            kv.adopt(request)
            kv.reserve(request, 31)
            kv.grow(request, 122)
            request.progress.settle(122, samples=False)
            request.progress.append(7)
            kv.cache.offer(request)
            requests.append(request)
        assert kv.lost(requests[1]) == (2 if is_shared else 122)
        (eviction,) = Swap(COST).victims(1, requests[1:], kv, 0.0, None)
        how[is_shared] = eviction.how
    assert how == {False: Preemption.SWAP, True: Preemption.DROP}
