"""Under adversarial arrivals nobody waits without end: a bound on `fastserve`, computed while it runs.

A request that has not run for `starvation_s` joins the tail of the first queue at the next decision. From there on
only those ahead of it in that queue count: who arrives or is promoted later queues behind it, and everybody ahead
leaves that queue after its quantum and at most one iteration more. So the time between two of its runs is at most

    depth x iteration (its own step) + starvation_s + depth x iteration (until the next decision)
    + (those ahead + 1) x depth x (quantum + 2 iterations)

where `depth` plans in flight take turns on the device; plus, where memory is short, the rest of those who hold
blocks and are protected by the eviction limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from skipjoin.core.policy import Pressure
from skipjoin.core.request import Request
from skipjoin.core.scheduler import Scheduler
from skipjoin.core.step import StepPlan, StepShape
from skipjoin.policies.ordering import Prioritized, SkipJoinMlfq
from skipjoin.policies.pressure import Recompute, Swap
from support.load import make
from support.policies import COST
from support.watch import WatchedCore, World, run

STARVATION_S = 0.5
# Transfers cost next to nothing here, so that one number bounds every step.
FAST_LINK = replace(COST, block=1e-5, transfer_floor=1e-5)
QUANTUM_S = FAST_LINK.step(StepShape(decodes=1, context=1))
ITERATION_S = 0.03


class StarvationWatch(WatchedCore):
    """Proves the bound of one request at every decision. gaps: seconds between its runs."""

    def __init__(self, scheduler: Scheduler, tracked: Request, starvation_s: float = STARVATION_S) -> None:
        super().__init__(scheduler)
        self.starvation_s = starvation_s
        self.tracked = tracked
        self.last = tracked.arrival
        self.due = float("inf")
        self.gaps: list[float] = []

    def start_step(self, now: float) -> StepPlan | None:
        plan = super().start_step(now)
        assert plan is None or FAST_LINK.step(StepShape.of(plan.slices)) < ITERATION_S
        if plan is None or self.tracked.id not in self.requests:
            return plan
        if any(piece.request is self.tracked for piece in plan.slices):
            self.gaps.append(now - self.last)
            self.last, self.due = now, float("inf")
        elif self.level(self.tracked) > 0:
            self.due = float("inf")
            depth = self.scheduler.depth
            assert now <= self.last + self.starvation_s + 2 * depth * ITERATION_S, "promoted too late"
        elif self.due == float("inf"):
            self.due = now + self.allowance()
        assert now <= self.due, f"request {self.tracked.id} has waited for {now - self.last:.3f} s"
        return plan

    def allowance(self) -> float:
        ordering = self.scheduler.policies.ordering
        rank = ordering.rank(self.tracked)
        ahead = sum(1 for r in self.requests.values() if self.level(r) == 0 and ordering.rank(r) < rank)
        protected = [r for r in self.kv.holders() if r.evictions >= self.scheduler.eviction_limit]
        rest = sum(r.limit - r.computed for r in protected if r is not self.tracked)
        turn = self.scheduler.depth * (QUANTUM_S + 2 * ITERATION_S)
        return (ahead + 1) * turn + rest * self.scheduler.depth * ITERATION_S

    def level(self, request: Request) -> int:
        ordering = self.scheduler.policies.ordering
        assert isinstance(ordering, Prioritized)
        band = ordering._bands[request.priority]
        assert isinstance(band, SkipJoinMlfq)
        return band.level(request)


def stream(count: int, every: float, prompt: int, max_tokens: int) -> list[Request]:
    """Short requests, one `every` seconds."""
    return [make(number, prompt, max_tokens, arrival=number * every) for number in range(1, count + 1)]


def longest_gap(world: World, tracked: Request, others: list[Request]) -> float:
    plain = world.core()
    watch = StarvationWatch(plain.scheduler, tracked)
    run(world, [tracked, *others], core=watch)
    return max(watch.gaps)


@pytest.mark.parametrize(("depth", "overlap"), [(1, False), (2, True)])
def test_a_saturating_stream_of_short_requests_does_not_starve_a_long_one(depth: int, overlap: bool) -> None:
    """One seat, and more short requests than it can serve: without promotion the long one would wait for all."""
    world = World("fastserve", depth, overlap, max_seqs=1, starvation_s=STARVATION_S, device_blocks=200, cost=FAST_LINK)
    shorts = stream(400, 0.02, prompt=1, max_tokens=1)
    gap = longest_gap(world, make(0, 300, 6), shorts)
    assert STARVATION_S <= gap < 2.5


def test_without_promotion_it_would() -> None:
    world = World("fastserve", max_seqs=1, starvation_s=1e6, device_blocks=200)
    watch = StarvationWatch(world.core().scheduler, make(0, 300, 6), starvation_s=1e6)
    run(world, [watch.tracked, *stream(400, 0.02, prompt=1, max_tokens=1)], core=watch)
    assert max(watch.gaps) > 7


@pytest.mark.parametrize("pressure", [Recompute, Swap])
@pytest.mark.parametrize("seats", [1, 4])
@pytest.mark.parametrize(("depth", "overlap"), [(1, False), (2, False), (2, True)])
def test_nor_does_it_where_memory_is_short(
    pressure: Callable[[], Pressure], seats: int, depth: int, overlap: bool
) -> None:
    """The short ones leave too little memory for the long one unless somebody keeps it free."""
    world = World(
        "fastserve",
        depth,
        overlap,
        pressure,
        max_seqs=seats,
        starvation_s=STARVATION_S,
        device_blocks=30,
        host_blocks=200,
        cost=FAST_LINK,
    )
    shorts = stream(120, 0.02 / seats, prompt=12, max_tokens=3)
    longest_gap(world, make(0, 90, 20), shorts)
