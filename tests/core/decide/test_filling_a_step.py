"""How the scheduler reads its queue, by the answers of the batcher and of admission."""

from __future__ import annotations

from papers.fastserve.static import WholeMaximum
from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy import ALL_HELD, HELD, NEWCOMERS_HELD, AdmissionPolicy, Batcher, Policies
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.batching import Greedy
from skipjoin.policies.eviction import Recompute
from support.load import make
from support.policies import Ranks, Verdicts
from support.watch import Stepper, WatchedCore


def queue(
    batcher: Batcher, length: int, blocks: int = 1000, admission: AdmissionPolicy | None = None
) -> tuple[Stepper, Ranks]:
    ordering = Ranks({number: number for number in range(length)})
    policies = Policies(ordering, batcher, admission or OnDemand(0.0), Recompute())
    stepper = Stepper(WatchedCore(Scheduler(policies, KVLedger(blocks, 0, 4))))
    stepper.add(*(make(number, 2, 2) for number in range(length)))
    return stepper, ordering


def ran(stepper: Stepper) -> list[int]:
    return [piece.request.id for piece in stepper.step().slices]


def test_requests_run_in_rank_order() -> None:
    stepper, _ = queue(Greedy(3, 100, chunked=False), 9)
    assert ran(stepper) == [0, 1, 2]


def test_the_queue_is_read_until_all_slots_are_taken() -> None:
    stepper, ordering = queue(Greedy(3, 100, chunked=False), 500)
    ran(stepper)
    assert ordering.read == 4


def test_held_skips_one_request_and_admits_later_ones() -> None:
    stepper, _ = queue(Verdicts({1: HELD}), 4)
    assert ran(stepper) == [0, 2, 3]


def test_newcomers_held_ends_reading_the_queue_but_holders_run() -> None:
    batcher = Verdicts({0: HELD, 1: HELD, 3: ALL_HELD})
    stepper, ordering = queue(batcher, 500)
    assert ran(stepper) == [2]
    batcher.verdicts = {0: NEWCOMERS_HELD}
    ordering.read = 0
    assert ran(stepper) == [2]
    assert ordering.read == 1


def test_a_full_device_ends_reading_the_queue() -> None:
    for admission in (OnDemand(0.0), WholeMaximum()):
        stepper, ordering = queue(Greedy(100, 1000, chunked=False), 500, blocks=3, admission=admission)
        assert ran(stepper) == [0, 1, 2]
        assert ordering.read == 4


def test_no_plan_is_made_without_requests() -> None:
    stepper, _ = queue(Greedy(3, 100, chunked=False), 0)
    assert stepper.start() is None
