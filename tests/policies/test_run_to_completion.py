from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papers.fastserve.static import RunToCompletion, WholeMaximum
from skipjoin.core.events import Event, Finished, Planned
from skipjoin.core.policy import AdmissionPolicy, EvictionPolicy, Ordering
from skipjoin.core.policy_set import Policies
from skipjoin.core.request import FinishReason, Request
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.eviction import Recompute
from skipjoin.policies.mlfq import SkipJoinMlfq
from skipjoin.policies.ordering import Fcfs, Prioritized
from support.load import load, make
from support.policies import COST, EVICTIONS, UnitCost
from support.watch import Run, Stepper, World, run

PIPELINES = [(1, False), (2, False), (2, True), (3, False)]
ORDERINGS: dict[str, Callable[[], Ordering]] = {
    "fcfs": Fcfs,
    "mlfq": lambda: SkipJoinMlfq(COST, starvation_s=0.3),
}


def static(
    max_seqs: int = 6,
    max_tokens: int = 64,
    *,
    ordering: Callable[[], Ordering] = Fcfs,
    admission: AdmissionPolicy | None = None,
    eviction: EvictionPolicy | None = None,
) -> Policies:
    return Policies(
        Prioritized(ordering),
        RunToCompletion(max_seqs, max_tokens),
        admission or WholeMaximum(),
        eviction or Recompute(),
    )


def table(done: Run) -> list[tuple[float, dict[int, int]]]:
    return [(now, {piece[0]: piece[2] for piece in plan[1]}) for now, plan in done.trace]


def test_the_next_batch_begins_after_the_longest_member_finished() -> None:
    """A token takes a second. The third request joins one step late, because the token budget is full. The fourth
    arrives during the batch and waits for the longest member although two slots are free before."""
    world = World(cost=UnitCost())
    requests = [make(0, 3, 4), make(1, 2, 2), make(2, 4, 5), make(3, 2, 2, arrival=12.0)]
    done = run(world, requests, core=world.core(static(3, 5)))
    assert table(done) == [
        (0.0, {0: 3, 1: 2}),
        (5.0, {0: 1, 1: 1, 2: 4}),
        (11.0, {0: 1, 2: 1}),
        (13.0, {0: 1, 2: 1}),
        (15.0, {2: 1}),
        (16.0, {2: 1}),
        (17.0, {3: 2}),
        (19.0, {3: 1}),
    ]


def assert_static(events: list[Event], max_seqs: int) -> None:
    """Check that no batch exceeds its slots, and that after a step of decodes only, or with all slots filled, no
    request joins before all members have finished."""
    members: set[Request] = set()
    closed = False
    for event in events:
        if isinstance(event, Finished):
            members.discard(event.request)
            closed = closed and bool(members)
        elif isinstance(event, Planned) and event.plan.slices:
            new = {piece.request for piece in event.plan.slices} - members
            assert not (closed and new), f"{[request.id for request in new]} joined at {event.now}"
            members |= new
            assert len(members) <= max_seqs
            decodes = all(piece.tokens == 1 for piece in event.plan.slices)
            closed = closed or len(members) == max_seqs or (decodes and not new)


@given(
    ordering=st.sampled_from(sorted(ORDERINGS)),
    eviction=st.sampled_from(sorted(EVICTIONS)),
    admission=st.sampled_from([OnDemand(), WholeMaximum()]),
    pipeline=st.sampled_from(PIPELINES),
    seed=st.integers(0, 10**6),
    device_blocks=st.integers(25, 70),  # the largest request has 100 tokens, which need 25 blocks
    max_seqs=st.integers(1, 10),
    max_tokens=st.integers(1, 80),
)
def test_any_load_is_served_in_static_batches(
    *,
    ordering: str,
    eviction: str,
    admission: AdmissionPolicy,
    pipeline: tuple[int, bool],
    seed: int,
    device_blocks: int,
    max_seqs: int,
    max_tokens: int,
) -> None:
    depth, overlap = pipeline
    world = World(depth=depth, overlap=overlap, device_blocks=device_blocks)
    policies = static(
        max_seqs,
        max_tokens,
        ordering=ORDERINGS[ordering],
        admission=admission,
        eviction=EVICTIONS[eviction](),
    )
    done = run(world, load(seed, 14, priorities=(0, seed % 3)), core=world.core(policies))
    assert all(request.progress.finish_reason is FinishReason.LENGTH for request in done.requests)
    assert all(len(request.progress.output) == request.max_tokens for request in done.requests)
    assert_static(done.events, max_seqs)


@pytest.mark.parametrize("eviction", sorted(EVICTIONS))
def test_aborts_never_delay_other_requests(eviction: str) -> None:
    """A request is aborted after every other step, whatever its state."""
    one = Stepper(World(depth=2).core(static(admission=OnDemand(), eviction=EVICTIONS[eviction]())))
    requests = load(3, 40)
    one.add(*requests)
    for number in range(0, 40, 2):
        one.fill()
        one.finish()
        one.core.abort(number, one.now)
    one.drain()
    reasons = [request.progress.finish_reason for request in requests]
    assert reasons.count(FinishReason.ABORT) >= 15
    assert set(reasons) == {FinishReason.ABORT, FinishReason.LENGTH}
    assert_static(one.events, 6)
