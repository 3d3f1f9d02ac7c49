"""Reservations of KV: renewals, refusals, nested reservations, accounts, and progress without any grant.

A parent request is one in whose reservation that of a nested request lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from skipjoin.core.events import Admitted, Preemption, Reserved
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.kv.reservations import Account, Owner
from skipjoin.core.policy import Allocation, Deferral, EvictionPolicy
from skipjoin.core.request import UNLIMITED, Request
from skipjoin.core.waits import WaitReason
from skipjoin.policies.batching import Greedy
from skipjoin.policies.eviction import Recompute, Vacate
from support.load import make
from support.policies import COST, Answer, OnCall, Scripted, SwapAll
from support.watch import Scene, nested_in

KEPT = Account("kept")
DEPTHS = pytest.mark.parametrize(("depth", "overlap"), [(1, False), (2, False), (2, True)])


class Claims(Scene):
    """A scene of requests ranked by id, with an admission policy that a test scripts."""

    def __init__(
        self,
        answers: dict[int, Answer],
        *,
        blocks: int,
        cpu: int = 0,
        slots: int = 8,
        keeps: int = 0,
        eviction: EvictionPolicy | None = None,
        depth: int = 1,
        overlap: bool = False,
    ) -> None:
        self.admission = Scripted(answers, {KEPT: keeps} if keeps else None)
        super().__init__(
            {number: number for number in range(300)},
            blocks=blocks,
            cpu=cpu,
            batcher=Greedy(slots, 10_000, chunked=True),
            admission=self.admission,
            eviction=eviction,
            depth=depth,
            overlap=overlap,
        )

    def drain(self, max_steps: int = 10_000) -> None:
        super().drain(max_steps)
        for request in self.ordering.numbers:
            tokens = self.tokens.get(request)
            assert tokens is None or tokens == list(range(tokens[0], tokens[0] + len(tokens)))

    def claims(self, number: int) -> Iterator[tuple[Owner, int, int]]:
        """Yield for each grant of the request its parent, its blocks in all, and the blocks drawn from an account."""
        for event in self.events:
            if isinstance(event, Reserved) and event.request.id == number:
                yield event.parent, event.blocks, event.drawn


def granting(blocks: int, tokens: int | None = None, parent: Owner = None, *, draws: Account | None = None) -> Answer:
    return lambda *_: Allocation(blocks, blocks, tokens=tokens, parent=parent, draws=draws)


def refusing(how: Deferral) -> Answer:
    return lambda *_: how


@DEPTHS
def test_a_reservation_is_renewed_at_the_first_token_beyond_it(depth: int, overlap: bool) -> None:
    """The last block may have room for more tokens than the reservation covers."""

    def in_parts(request: Request, target: int, kv: KVLedger) -> Allocation:
        return Allocation(now=2, blocks=2, tokens=6) if target <= 6 else Allocation(now=4, blocks=4, tokens=13)

    scene = Claims({0: in_parts}, blocks=20, depth=depth, overlap=overlap)
    scene.add(make(0, 5, 9), make(1, 5, 9))
    scene.drain()
    # The KV of the last token is never computed, so 13 of its 14 tokens are.
    assert [target for number, target in scene.admission.asked if number == 0] == [5, 7]
    assert list(scene.claims(0)) == [(None, 2, 0), (None, 4, 0)]
    assert len(list(scene.claims(1))) == 1, "a reservation without a limit is requested once"


def test_a_request_keeps_its_kv_while_its_reservation_is_not_renewed() -> None:
    scene = Claims({0: granting(3, 9)}, blocks=20)
    paused = make(0, 8, 6)
    scene.add(paused, make(1, 8, 9))
    assert [scene.ran() for _ in range(2)] == [[0, 1]] * 2
    scene.admission.answers[0] = refusing(Deferral.REQUEST)
    table = scene.kv.blocks_of(paused).table
    assert [scene.ran() for _ in range(3)] == [[1]] * 3
    assert scene.kv.blocks_of(paused).table == table
    assert scene.core.scheduler.waits[paused].reason is WaitReason.HELD_BY_ADMISSION
    scene.admission.answers[0] = granting(4, 14)
    assert scene.ran() == [0, 1]
    scene.drain()
    assert scene.preempted() == [(0, Preemption.PAUSE)]


@pytest.mark.parametrize(("how", "passes"), [(Deferral.REQUEST, True), (Deferral.INCOMING, False)])
def test_requests_that_fit_pass_a_refused_one(how: Deferral, passes: bool) -> None:
    scene = Claims({number: refusing(how) for number in range(1, 150)}, blocks=1000, slots=300)
    scene.add(make(0, 4, 4))
    assert scene.ran() == [0]
    scene.add(*(make(number, 4, 4) for number in range(1, 200)))
    scene.ordering.read, scene.ordering.found = 0, range(140, 170)
    assert scene.ran() == ([0, *range(150, 170)] if passes else [0])
    assert scene.ordering.read == 2, "the rest of a long queue is not read"
    scene.admission.answers.clear()
    scene.drain()


def test_a_refusal_that_ends_admission_does_not_affect_requests_that_hold_kv() -> None:
    scene = Claims({}, blocks=100)
    scene.add(make(1, 4, 8), make(2, 4, 8))
    assert scene.ran() == [1, 2]
    scene.admission.answers[0] = refusing(Deferral.INCOMING)
    scene.add(make(0, 4, 4), make(3, 4, 4))
    assert scene.ran() == [1, 2]
    scene.admission.answers.clear()
    scene.drain()


def nesting(
    *, account: bool = False, blocks: int = 12, output: int = 8, cpu: int = 0, eviction: EvictionPolicy | None = None
) -> tuple[Claims, Request, Request]:
    """Run a parent request and one whose reservation is nested in that of the parent.

    The parent has reserved 10 blocks and holds 2. The nested request has reserved 4 of them for 16 tokens, and holds 2.
    """
    parent, nested = make(0, 8, 30), make(1, 8, output)
    owner = KEPT if account else None
    answers = {0: granting(10, None, owner), 1: granting(4, 16, parent), 9: granting(8, None, owner)}
    scene = Claims(answers, blocks=blocks, cpu=cpu, keeps=blocks if account else 0, eviction=eviction)
    scene.add(parent, nested)
    assert scene.ran() == [0, 1]
    assert scene.kv.reservations.parent_of(nested) is parent
    assert nested_in(scene.kv, parent) == [nested]
    return scene, parent, nested


def test_a_nested_reservation_takes_no_available_blocks() -> None:
    scene, parent, nested = nesting()
    assert (scene.kv.available, scene.kv.reservations.unused(parent), scene.kv.reservations.unused(nested)) == (
        2,
        10 - 2 - 4,
        4 - 2,
    )
    assert list(scene.claims(1)) == [(parent, 4, 0)]
    scene.drain()
    assert scene.preempted() == []


def end(scene: Claims, parent: Request) -> None:
    object.__setattr__(parent, "max_total_tokens", parent.progress.known + 1)  # it ends earlier than it could
    scene.ran()


def abort(scene: Claims, parent: Request) -> None:
    scene.core.abort(parent.id, scene.now)


def evict(scene: Claims, parent: Request) -> None:
    """Let a higher-ranked request take the parent's blocks."""
    scene.ordering.numbers[9] = -1
    scene.add(make(9, 8, 3))
    assert scene.ran() == [9]  # requests below an evicted one take no blocks in that step
    assert parent.progress.evictions == 1


@pytest.mark.parametrize("account", [False, True])
@pytest.mark.parametrize("how", [(end, Recompute), (abort, Recompute), (evict, Recompute), (evict, SwapAll)])
def test_a_nested_request_goes_on_in_the_grandparent_when_its_parent_is_released(
    how: tuple[Callable[[Claims, Request], None], Callable[[], EvictionPolicy]], account: bool
) -> None:
    end_parent, eviction = how
    scene, parent, nested = nesting(account=account, cpu=20, eviction=eviction())
    table = scene.kv.blocks_of(nested).table
    end_parent(scene, parent)
    assert scene.kv.reservations.parent_of(nested) == (KEPT if account else None)
    assert scene.kv.blocks_of(nested).table[:2] == table
    assert nested_in(scene.kv, parent) == []
    assert scene.kv.reservations.parent_of(parent) is None
    scene.ordering.numbers[0] = 400  # the parent, when swapped in, takes nothing from the nested request
    scene.drain()
    assert nested.progress.evictions == 0


def test_an_account_gets_its_blocks_again_after_a_nested_request() -> None:
    scene = Claims({0: granting(3, None, KEPT)}, blocks=10, keeps=4)
    request = make(0, 8, 4)
    scene.add(request, make(1, 8, 16))
    assert scene.ran() == [0, 1]
    assert (scene.kv.available, scene.kv.reservations.unused(KEPT)) == (0, 1)
    assert nested_in(scene.kv, KEPT) == [request]
    while 0 in scene.core.requests:
        scene.ran()
    assert (scene.kv.available, scene.kv.reservations.unused(KEPT)) == (0, 4)
    scene.drain()


def test_a_parent_that_grows_evicts_its_nested_request_only() -> None:
    """The request that ranks lowest is spared, because its blocks are its own."""
    scene, parent, nested = nesting(output=30, eviction=Vacate(COST))
    other = make(2, 4, 9)
    scene.admission.answers |= {2: granting(2, 8)}
    scene.add(other)
    assert scene.ran() == [0, 1, 2]
    assert scene.kv.available == 0
    scene.admission.answers = dict.fromkeys((1, 2), refusing(Deferral.REQUEST))
    while not nested.progress.evictions:
        assert 0 in scene.ran()
    assert len(scene.kv.blocks_of(parent).table) == 10 - 4 + 1
    assert (parent.progress.evictions, other.progress.evictions) == (0, 0)
    scene.admission.answers.clear()
    scene.drain()


def test_a_parent_takes_available_blocks_before_it_evicts_its_nested_request() -> None:
    scene, parent, nested = nesting(output=30, blocks=12, eviction=Vacate(COST))
    held = []
    while not nested.progress.evictions:
        scene.admission.answers[1] = (
            granting(4, 16, parent) if nested.progress.known <= 16 else refusing(Deferral.REQUEST)
        )
        assert 0 in scene.ran()
        held.append(len(scene.kv.blocks_of(parent).table))
    assert held[-2:] == [12 - 4, 12 - 4 + 1]
    scene.admission.answers.clear()
    scene.drain()


def test_blocks_that_are_not_available_are_drawn_from_an_account() -> None:
    scene = Claims({0: granting(4, 10)}, blocks=10, keeps=4, eviction=Vacate(COST))
    scene.add(make(0, 8, 12), make(1, 6, 2))
    assert scene.ran() == [0, 1]
    assert (scene.kv.available, scene.kv.reservations.unused(KEPT)) == (10 - 4 - 4 - 2, 4)
    assert scene.ran() == [0, 1]
    scene.admission.answers[0] = granting(7, None, draws=KEPT)
    while len(list(scene.claims(0))) < 2:
        assert 0 in scene.ran()
    # Request 1 has finished: two of the three blocks were available.
    assert list(scene.claims(0)) == [(None, 4, 0), (None, 7, 1)]
    assert (scene.kv.available, scene.kv.reservations.unused(KEPT)) == (0, 3)
    scene.add(make(2, 8, 3))
    scene.ran()
    assert scene.kv.reservations.unused(KEPT) == 3, (
        "an account gets only what is available, and no request loses blocks to it"
    )
    scene.drain()
    assert all(how is Preemption.PAUSE for _, how in scene.preempted())


def test_nothing_is_drawn_from_an_account_with_too_few_blocks() -> None:
    scene = Claims({0: granting(4, 10)}, blocks=8, keeps=2)
    scene.add(make(0, 8, 20), make(1, 4, 4))
    scene.ordering.numbers[0] = 400  # it may evict no other request
    assert [scene.ran() for _ in range(3)] == [[1, 0]] * 3
    scene.admission.answers[0] = granting(8, None, draws=KEPT)
    assert scene.ran() == [1]
    assert scene.kv.reservations.unused(KEPT) == 2
    scene.drain()


@DEPTHS
@pytest.mark.parametrize("how", Deferral)
def test_requests_run_one_at_a_time_if_every_reservation_is_refused(how: Deferral, depth: int, overlap: bool) -> None:
    """Each runs to its end, in order, with the blocks that the account keeps."""
    scene = Claims(dict.fromkeys(range(3), refusing(how)), blocks=6, keeps=3, depth=depth, overlap=overlap)
    requests = [make(number, 9, 14) for number in range(3)]
    scene.add(*requests)
    scene.drain()
    ran = [[piece[0] for piece in plan[1]] for _, plan in scene.core.trace]
    assert all(len(numbers) == 1 for numbers in ran)
    assert sorted(ran) == ran
    assert [len(scene.tokens[number]) for number in range(3)] == [14] * 3
    assert all(request.progress.evictions == 0 for request in requests)


def test_a_forced_request_takes_the_blocks_of_one_that_cannot_run() -> None:
    """Two requests fill the pool and are granted no more: the first takes the blocks of the second, and both finish."""
    scene = Claims({0: granting(3, 12), 1: granting(3, 12)}, blocks=6)
    requests = [make(0, 12, 8), make(1, 12, 8)]
    scene.add(*requests)
    assert scene.ran() == [0, 1]
    scene.admission.answers.update(dict.fromkeys(range(2), refusing(Deferral.REQUEST)))
    assert scene.ran() == [0]
    assert scene.preempted() == [(1, Preemption.DROP)]
    scene.drain()
    assert [request.progress.evictions for request in requests] == [0, 1]


def test_no_request_is_forced_while_another_runs() -> None:
    scene = Claims({1: refusing(Deferral.REQUEST)}, blocks=20)
    scene.add(make(0, 4, 6), make(1, 4, 3))
    while 0 in scene.core.requests:
        assert scene.ran() == [0]
    assert scene.ran() == [1]
    scene.drain()


@pytest.mark.parametrize("limit", [None, 20])
def test_a_reservation_ends_with_a_swap_out_and_is_requested_again(limit: int | None) -> None:
    eviction = OnCall()
    scene = Claims({1: granting(5, limit)}, blocks=12, cpu=12, eviction=eviction)
    request = make(1, 8, 10)
    scene.add(make(0, 8, 20), request)
    scene.ran()
    eviction.out = [request]
    assert scene.ran() == [0]
    assert scene.kv.tiers.cpu_footprint(request) == 2
    assert request.progress.reserved_tokens == (UNLIMITED if limit is None else 0)
    assert scene.kv.available == 12 - 7
    if limit is not None:
        scene.admission.answers[1] = refusing(Deferral.REQUEST)
        assert scene.ran() == [0]
        assert scene.kv.tiers.cpu_footprint(request) == 2, "a request without a grant is not swapped in"
        scene.admission.answers[1] = granting(5, limit)
    assert scene.ran() == [0, 1]
    assert scene.kv.tiers.cpu_footprint(request) == 0
    assert len(list(scene.claims(1))) == 1 + (limit is not None)
    scene.drain()
    assert sum(isinstance(event, Admitted) and event.request is request for event in scene.events) == 1


def test_kv_is_swapped_into_a_nested_reservation() -> None:
    eviction = OnCall()
    parent, nested = make(0, 8, 30), make(1, 8, 10)
    scene = Claims({0: granting(10), 1: granting(3, 10)}, blocks=13, cpu=12, eviction=eviction)
    scene.add(parent, nested)
    scene.ran()
    eviction.out = [nested]
    assert scene.ran() == [0]
    scene.admission.answers[1] = granting(5, 18, parent)
    scene.add(make(2, 8, 4))
    assert scene.ran() == [0, 1, 2]
    assert scene.kv.reservations.parent_of(nested) is parent
    assert scene.kv.available == 0
    scene.drain()
    assert (parent.progress.evictions, nested.progress.evictions) == (0, 0)


def test_a_restart_ends_all_reservations_and_all_are_requested_again() -> None:
    scene, parent, nested = nesting(account=True)
    scene.start()
    scene.restart()
    unused = scene.kv.reservations.unused(KEPT)
    assert (scene.kv.available, unused, parent.progress.reserved_tokens, nested.progress.reserved_tokens) == (
        12,
        0,
        UNLIMITED,
        UNLIMITED,
    )
    assert scene.ran() == [0, 1]
    assert [owner for owner, *_ in scene.claims(0)] == [KEPT, KEPT]
    assert [owner for owner, *_ in scene.claims(1)] == [parent, parent]
    scene.drain()
