"""KV that was swapped in stays for a token, so that the link is not kept busy for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random

import pytest

from skipjoin.core.events import Event
from skipjoin.core.step import Direction, StepPlan
from skipjoin.observe.residency import Residency
from skipjoin.policies.cost import LinearCost
from support.bounds import BoundedRun
from support.watch import World


class Watched(Residency):
    def check(self, run: BoundedRun, plan: StepPlan, begin: float, events: Sequence[Event]) -> None:
        for event in events:
            self.observe(event)


@pytest.mark.parametrize("recipe", ["adaptive", "alise", "fastserve"])
def test_of_what_is_swapped_in_two_percent_leave_without_a_token(recipe: str) -> None:
    swapped = wasted = 0
    for stages, seed in product((1, 2), range(4)):
        draw, sent = Random(seed), [0.0]
        cost = LinearCost(0.01, 1e-4, 0.0, 2e-4, 0.0, 2e-4, 2e-4)

        def send(run: BoundedRun, draw: Random = draw, sent: list[float] = sent) -> None:
            while not run.live or (sent[0] <= run.now and len(run.live) < 25):
                sent[0] = max(sent[0], run.now - 1) + draw.expovariate(25)
                run.add(draw.randint(1, 120), draw.choice((5, 20, 60, 120)))

        use = Watched(block_size=16, block_bytes=1)
        sizes = {"device_blocks": 40, "cpu_blocks": 200, "max_seqs": 16, "max_tokens": 256, "block_size": 16}
        world = World(recipe, stages, stages=stages, cost=cost, starvation_s=5.0, **sizes)  # type: ignore[arg-type]
        run = BoundedRun(world, send, [use])
        run.run(lambda run=run: run.now > 5)  # type: ignore[misc]
        swapped += sum(use.swapped_bytes[Direction.IN])
        wasted += use.wasted_bytes
    assert swapped > 1000
    assert wasted <= 0.02 * swapped
