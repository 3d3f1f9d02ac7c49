"""KV of a few requests whose lengths are alike: order gains nothing, and each move of KV costs capacity."""

from __future__ import annotations

from random import Random

from skipjoin.policies.cost import LinearCost
from support.bounds import BoundedRun
from support.watch import World

# As a large model on a GPU: steps of 20 ms, and blocks that move in half a millisecond.
COST = LinearCost(0.02, 1e-4, 0.0, 2e-4, 0.0, 5e-4, 5e-4)
SIZES = {"device_blocks": 327, "cpu_blocks": 4000, "max_seqs": 16, "max_tokens": 2048, "block_size": 16}
REQUESTS = 150


def seconds(recipe: str) -> float:
    """Return when the last of the requests finished, which arrive at about the capacity."""
    draw, sent = Random(0), []

    def send(run: BoundedRun) -> None:
        while len(sent) < REQUESTS and len(sent) <= 5 * run.now:
            sent.append(run.now)
            run.add(draw.randint(900, 1000), draw.randint(16, 48))

    run = BoundedRun(World(recipe, 1, cost=COST, starvation_s=20.0, **SIZES), send, [])  # type: ignore[arg-type]
    run.run(lambda: len(sent) == REQUESTS and not run.live)
    return run.now


def test_capacity_is_not_spent_on_early_first_tokens_of_large_requests() -> None:
    assert seconds("adaptive") <= 1.05 * seconds("fcfs")
