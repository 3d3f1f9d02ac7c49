"""FastServe's worked example (its figure 7): three jobs, one at a time, under four policies.

The paper prints average completion times: 13/3 for FCFS, 5 for MLFQ, 10/3 for skip-join MLFQ and 3 for SRPT. It shows
job times in a figure only. These jobs, which all arrive at time 0, give exactly those averages. In units of half a
second, J0 takes 5 for its prompt and 1 to decode, J1 2 and 1, and J2 1 and 1. The shortest iteration, and so the first
quantum, is 1.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from skipjoin.core.events import Finished
from skipjoin.core.policy import Ordering, Policies
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.batching import Greedy
from skipjoin.policies.eviction import Recompute
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.mlfq import SkipJoinMlfq
from skipjoin.policies.ordering import Fcfs
from skipjoin.policies.predictors import longest_output
from skipjoin.policies.remaining import RemainingTime
from skipjoin.policies.valued import Valued
from support.load import make
from support.policies import UnitCost
from support.watch import World, run

COST = UnitCost()
# Start of each iteration in half-seconds, and its job.
EXAMPLES: dict[str, tuple[Ordering, list[tuple[int, int]], Fraction]] = {
    "fcfs": (Fcfs(), [(0, 0), (5, 0), (6, 1), (8, 1), (9, 2), (10, 2)], Fraction(13, 3)),
    "mlfq": (
        SkipJoinMlfq(COST, skip_join=False, starvation_s=1e9),
        [(0, 0), (5, 1), (7, 2), (8, 0), (9, 1), (10, 2)],
        Fraction(5),
    ),
    "skip-join": (
        SkipJoinMlfq(COST, starvation_s=1e9),
        [(0, 2), (1, 1), (3, 2), (4, 1), (5, 0), (10, 0)],
        Fraction(10, 3),
    ),
    "srpt": (
        Valued(RemainingTime(ExecutionTime(COST), longest_output)),
        [(0, 2), (1, 2), (2, 1), (4, 1), (5, 0), (10, 0)],
        Fraction(3),
    ),
}


@pytest.mark.parametrize(("ordering", "table", "average"), EXAMPLES.values(), ids=EXAMPLES.keys())
def test_jobs_run_as_in_figure_7(ordering: Ordering, table: list[tuple[int, int]], average: Fraction) -> None:
    policies = Policies(ordering, Greedy(1, 1000, chunked=False), OnDemand(), Recompute())
    world = World(cost=COST)
    jobs = [make(0, 5, 2), make(1, 2, 2), make(2, 1, 2)]
    done = run(world, jobs, core=world.core(policies))
    assert [(now, plan[1][0][0]) for now, plan in done.trace] == table
    completions = [Fraction(event.now) / 2 for event in done.events if isinstance(event, Finished)]
    assert sum(completions) / 3 == average
