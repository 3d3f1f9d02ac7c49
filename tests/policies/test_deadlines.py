from __future__ import annotations

from skipjoin.core.request import Request, Target
from skipjoin.core.step import Slice
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.deadlines import ByDeadline, NextTokens, StartedFirst
from skipjoin.policies.ordering import Fcfs, Prioritized
from support.load import make

DEFAULT = Target(ttft_s=0.4, tpot_s=0.2)


def sample(request: Request) -> Slice:
    """Compute all known tokens of the request; as in the engine, the sampled token is appended after `on_scheduled`."""
    piece = Slice(
        request, request.progress.computed, request.progress.known - request.progress.computed, True, False, ()
    )
    request.progress.computed = request.progress.planned = request.progress.known
    return piece


def ids(ordering: ByDeadline | StartedFirst | Prioritized, now: float) -> list[int]:
    return [request.id for request in ordering.ranked(now)]


def test_ttft_counts_from_the_arrival_and_tpot_from_the_last_token() -> None:
    tokens = NextTokens(DEFAULT)
    plain, strict = make(0, arrival=1.0), make(1, arrival=1.0, target=Target(ttft_s=0.1, tpot_s=0.05))
    for request in (plain, strict):
        tokens.begin(request, 1.5)
    assert [tokens.due(request) for request in (plain, strict)] == [1.4, 1.1]
    assert tokens.sampled([plain, strict], 2.0) == [2.2, 2.05]
    assert [tokens.due(request) for request in (plain, strict)] == [2.2, 2.05]


def test_a_promoted_best_effort_request_is_due_from_its_promotion() -> None:
    tokens = NextTokens(DEFAULT)
    old = make(0, arrival=1.0, best_effort=True)
    tokens.begin(old, 100.0)
    assert tokens.due(old) == 100.4


def test_late_requests_rank_last_by_length_and_overdue_ones_first() -> None:
    ordering = ByDeadline(NextTokens(DEFAULT), overdue_s=5.0, cost=LinearCost(0.01, 1e-4))
    long, short = make(0, 900, arrival=0.0), make(1, 30, arrival=0.1)
    for request in (long, short):
        ordering.on_arrived(request, request.arrival)
    assert ids(ordering, 0.2) == [0, 1]
    fresh = make(2, 500, arrival=0.45)
    ordering.on_arrived(fresh, 0.45)
    assert ids(ordering, 0.45) == [1, 2, 0]  # 0 was due at 0.4
    assert ids(ordering, 0.6) == [2, 1, 0]  # now 1 is late too, and shorter
    assert ordering.outranks(fresh, short)
    assert not ordering.outranks(short, long)
    ordering.on_scheduled([sample(fresh)], 5.3)
    assert ids(ordering, 5.39) == [2, 1, 0]
    assert ids(ordering, 5.45) == [0, 2, 1]  # 0 is overdue
    # Late requests are preempted; those on time keep their KV.
    assert ordering.outranks(long, short)
    assert not ordering.outranks(long, fresh)


def test_a_token_resets_a_late_request() -> None:
    ordering = ByDeadline(NextTokens(DEFAULT), overdue_s=5.0, cost=LinearCost(0.01, 1e-4))
    late, other = make(0, arrival=0.0), make(1, arrival=1.0)
    ordering.on_arrived(late, 0.0)
    ordering.on_arrived(other, 1.0)
    assert ids(ordering, 1.0) == [1, 0]
    ordering.on_scheduled([sample(late)], 1.1)
    assert ids(ordering, 1.1) == [0, 1]  # due at 1.3 and at 1.4
    assert ids(ordering, 5.5) == [0, 1]  # both are late: the fewest tokens to compute first


def test_first_tokens_preempt_the_requests_furthest_ahead_of_their_schedule_if_leads_count() -> None:
    for counts_lead in (False, True):
        ordering = ByDeadline(NextTokens(DEFAULT, counts_lead=counts_lead), overdue_s=5.0, cost=LinearCost(0.01, 1e-4))
        quick, slow, fresh = make(0, arrival=0.0), make(1, arrival=0.0), make(2, arrival=1.0)
        for request, steps in ((quick, 10), (slow, 2)):
            ordering.on_arrived(request, 0.0)
            for step in range(1, steps + 1):
                ordering.on_scheduled([sample(request)], step / steps)
                request.progress.output.append(0)
        ordering.on_arrived(fresh, 1.0)
        # One token is due at 1.2. With leads, the schedules are 1.2, and 2.1 after ten tokens within 0.9 s.
        assert ids(ordering, 1.0) == ([1, 2, 0] if counts_lead else [0, 1, 2])
        assert ordering.outranks(fresh, quick) == counts_lead
        assert not ordering.outranks(fresh, slow)
        assert not ordering.outranks(slow, quick)  # it has a token
        assert ids(ordering, 1.3) == [2, 0, 1]  # 1 is late in any case


def test_started_best_effort_requests_come_first_unless_preempted() -> None:
    ordering = StartedFirst()
    requests = [make(number, arrival=number, deadline=deadline) for number, deadline in enumerate([None, 50, 60, 40])]
    for request in requests:
        ordering.on_arrived(request, request.arrival)
    assert ids(ordering, 9.0) == [3, 1, 2, 0]  # by deadline
    ordering.on_scheduled([sample(requests[0]), sample(requests[2])], 9.1)
    assert ids(ordering, 9.1) == [2, 0, 3, 1]
    ordering.on_preempted(requests[2], 9.2)
    assert ids(ordering, 9.2) == [0, 2, 3, 1]
    ordering.on_scheduled([sample(requests[2])], 9.3)
    assert ids(ordering, 9.3) == [2, 0, 3, 1]


def test_one_starving_best_effort_request_at_a_time_is_lifted() -> None:
    ordering = Prioritized(Fcfs, best_effort_wait_s=10.0)
    batch = [make(number, arrival=number, best_effort=True) for number in range(3)]
    chat = make(3, arrival=5.0)
    for request in (*batch, chat):
        ordering.on_arrived(request, request.arrival)
    assert ids(ordering, 9.0) == [3, 0, 1, 2]
    assert ids(ordering, 10.0) == [0, 3, 1, 2]
    assert ordering.outranks(batch[0], chat)
    ordering.on_scheduled([sample(batch[0])], 19.0)
    assert ids(ordering, 29.0) == [0, 3, 1, 2]
    ordering.on_finished(batch[0], 29.0)
    assert ids(ordering, 29.0) == [1, 3, 2]
    for request in (batch[1], chat, batch[2]):
        ordering.on_finished(request, 29.0)
    assert ids(ordering, 29.0) == []
