from __future__ import annotations

from papers.fastserve.static import WholeMaximum
from skipjoin.core.context import StepContext
from skipjoin.core.policy import AdmissionPolicy, BatchBuilder, Batcher, EvictionPolicy
from skipjoin.core.policy_set import Policies
from skipjoin.core.refusals import ALL_HELD, HELD, INCOMING_HELD
from skipjoin.core.request import Request
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.batching import Greedy
from skipjoin.policies.eviction import Spill
from skipjoin.policies.ordering import Fcfs, Prioritized
from support.load import make
from support.policies import COST, LendAlongside, Verdicts
from support.watch import Scene, Stepper, World


class Recording(Greedy):
    def open(self, context: StepContext) -> BatchBuilder:
        self.seen = [request for request, _ in context.candidates]
        return super().open(context)


def recording(eviction: EvictionPolicy | None = None) -> tuple[Stepper, Recording]:
    """Return an engine of 10 blocks of 4 tokens, and its batcher."""
    batcher = Recording(8, 1000, chunked=False)
    policies = Policies(Prioritized(Fcfs), batcher, OnDemand(), eviction or Spill(COST))
    return Stepper(World(device_blocks=10, max_seqs=8).core(policies)), batcher


def held_by(stepper: Stepper, *tokens: int) -> list[Request]:
    """Add best-effort requests that hold KV of these numbers of tokens."""
    requests = [make(number, count, 8, best_effort=True) for number, count in enumerate(tokens)]
    stepper.add(*requests)
    stepper.step()
    return requests


def test_a_best_effort_request_whose_blocks_real_time_ones_take_is_no_candidate() -> None:
    stepper, batcher = recording()
    first, last = held_by(stepper, 15, 15)
    chat = make(10, 12, 4)
    stepper.add(chat)
    stepper.step()
    assert batcher.seen == [chat, first]
    assert stepper.core.kv.footprint(last) == 3, "one of its four blocks was short"


def test_surplus_blocks_of_preempted_requests_go_to_real_time_requests_only() -> None:
    stepper, batcher = recording()
    held_by(stepper, 31)
    chat, more, batch = make(10, 12, 4), make(11, 16, 4), make(12, 4, 4, best_effort=True)
    stepper.add(chat, more, batch)
    stepper.step()
    assert batcher.seen == [chat, more]


def test_best_effort_requests_keep_their_blocks_without_real_time_ones() -> None:
    stepper, batcher = recording()
    first, last = held_by(stepper, 15, 15)
    stepper.add(make(10, 12, 4, best_effort=True))
    stepper.step()
    assert batcher.seen == [first, last]


def run_until_finished(stepper: Stepper, request: Request) -> None:
    stepper.add(request)
    while request.progress.finish_reason is None:
        stepper.step()


def test_a_best_effort_request_is_swapped_in_while_others_compute() -> None:
    stepper, _ = recording(LendAlongside())
    first, last = held_by(stepper, 15, 15)
    run_until_finished(stepper, make(10, 12, 1))
    incoming = make(11, 4, 4, best_effort=True)
    stepper.add(incoming)
    plan = stepper.step()
    assert [slice_.request for slice_ in plan.slices] == [first, incoming]
    assert [move.request for move in plan.overlapped] == [last]
    assert not plan.blocking
    assert last in [slice_.request for slice_ in stepper.step().slices]


def test_a_best_effort_request_alone_does_not_wait_for_its_swap_in() -> None:
    stepper, _ = recording(LendAlongside())
    (alone,) = held_by(stepper, 31)
    run_until_finished(stepper, make(10, 12, 1))
    plan = stepper.step()
    assert [slice_.request for slice_ in plan.slices] == [move.request for move in plan.blocking] == [alone]


class SpillAlongside(LendAlongside):
    shares = False


def test_incoming_requests_leave_the_blocks_that_a_swapped_out_request_waits_for() -> None:
    stepper, batcher = recording(SpillAlongside())
    _, last = held_by(stepper, 13, 15)
    stepper.add(make(10, 9, 3))
    run_until_finished(stepper, make(11, 4, 1))
    stepper.add(make(12, 3, 4, best_effort=True))
    assert stepper.core.kv.available == 1 < stepper.core.kv.tiers.cpu_footprint(last)
    stepper.step()
    assert [request.id for request in batcher.seen] == [10, 0]


def queue(batcher: Batcher, length: int, blocks: int = 1000, admission: AdmissionPolicy | None = None) -> Scene:
    scene = Scene({number: number for number in range(length)}, blocks=blocks, batcher=batcher, admission=admission)
    scene.add(*(make(number, 2, 2) for number in range(length)))
    return scene


def test_requests_run_in_rank_order() -> None:
    scene = queue(Greedy(3, 100, chunked=False), 9)
    assert scene.ran() == [0, 1, 2]


def test_the_queue_is_read_until_all_slots_are_taken() -> None:
    scene = queue(Greedy(3, 100, chunked=False), 500)
    scene.ran()
    assert scene.ordering.read == 4


def test_held_skips_one_request_and_admits_later_ones() -> None:
    scene = queue(Verdicts({1: HELD}), 4)
    assert scene.ran() == [0, 2, 3]


def test_incoming_requests_held_ends_reading_the_queue_but_holders_run() -> None:
    batcher = Verdicts({0: HELD, 1: HELD, 3: ALL_HELD})
    scene = queue(batcher, 500)
    assert scene.ran() == [2]
    batcher.verdicts = {0: INCOMING_HELD}
    scene.ordering.read = 0
    assert scene.ran() == [2]
    assert scene.ordering.read == 1


def test_a_full_device_ends_reading_the_queue() -> None:
    for admission in (OnDemand(), WholeMaximum()):
        scene = queue(Greedy(100, 1000, chunked=False), 500, blocks=3, admission=admission)
        assert scene.ran() == [0, 1, 2]
        assert scene.ordering.read == 4


def test_no_plan_is_made_without_requests() -> None:
    scene = queue(Greedy(3, 100, chunked=False), 0)
    assert scene.start() is None
