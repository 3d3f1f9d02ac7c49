"""Claims on KV, each rule in the smallest scene that shows it: when they are renewed, out of what they are lent, what
happens to guests, and what runs where nothing is granted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from skipjoin.core.events import Admitted, Preempted, Preemption, Reserved
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.kv.reservations import Account, Owner
from skipjoin.core.policy import Allocation, Deferral, EvictionPolicy, Policies
from skipjoin.core.request import UNLIMITED, Request
from skipjoin.core.scheduling.scheduler import Scheduler
from skipjoin.core.scheduling.waits import WaitReason
from skipjoin.policies.batching import Greedy
from skipjoin.policies.eviction import Recompute, Vacate
from support.load import make
from support.policies import COST, Answer, OnCall, Ranks, Scripted, SwapAll
from support.watch import Stepper, WatchedCore, nested_in

KEPT = Account("kept")
DEPTHS = pytest.mark.parametrize(("depth", "overlap"), [(1, False), (2, False), (2, True)])


class Scene:
    """Requests that come in the order of their ids, blocks of 4 tokens, and an admission policy that a test scripts."""

    def __init__(
        self,
        answers: dict[int, Answer],
        *,
        blocks: int,
        host: int = 0,
        slots: int = 8,
        keeps: int = 0,
        eviction: EvictionPolicy | None = None,
        depth: int = 1,
        overlap: bool = False,
    ) -> None:
        """keeps: blocks of the account. eviction: None: what makes way is dropped."""
        self.admission = Scripted(answers, {KEPT: keeps} if keeps else None)
        self.ordering = Ranks({number: number for number in range(300)})
        self.kv = KVLedger(blocks, host, 4)
        policies = Policies(self.ordering, Greedy(slots, 10_000, chunked=True), self.admission, eviction or Recompute())
        self.stepper = Stepper(WatchedCore(Scheduler(policies, self.kv, depth=depth, overlap=overlap)))

    def add(self, *requests: Request) -> None:
        self.stepper.add(*requests)

    def ran(self) -> list[int]:
        """Do a step; the requests that it ran."""
        return [piece.request.id for piece in self.stepper.step().slices]

    def drain(self) -> None:
        self.stepper.drain()
        for request in self.ordering.numbers:
            tokens = self.stepper.tokens.get(request)
            assert tokens is None or tokens == list(range(tokens[0], tokens[0] + len(tokens)))

    def claims(self, number: int) -> Iterator[tuple[Owner, int, int]]:
        """What the request was granted, in order: the lender, the blocks in all and those that an account gave up."""
        for event in self.stepper.events:
            if isinstance(event, Reserved) and event.request.id == number:
                yield event.parent, event.blocks, event.drawn

    def preempted(self) -> list[tuple[int, Preemption]]:
        return [(event.request.id, event.how) for event in self.stepper.events if isinstance(event, Preempted)]


def granting(blocks: int, tokens: int | None = None, lender: Owner = None, *, draws: Account | None = None) -> Answer:
    """So many blocks in all, which must be available at once."""
    return lambda *_: Allocation(blocks, blocks, tokens=tokens, parent=lender, draws=draws)


def refusing(how: Deferral) -> Answer:
    return lambda *_: how


# -- renewals ---------------------------------------------------------------------------------------------------------


@DEPTHS
def test_a_claim_asks_again_at_the_first_token_beyond_it(depth: int, overlap: bool) -> None:
    """Though the last block has room for more, and never before."""

    def in_parts(request: Request, target: int, kv: KVLedger) -> Allocation:
        return Allocation(now=2, blocks=2, tokens=6) if target <= 6 else Allocation(now=4, blocks=4, tokens=13)

    scene = Scene({0: in_parts}, blocks=20, depth=depth, overlap=overlap)
    scene.add(make(0, 5, 9), make(1, 5, 9))
    scene.drain()
    # The last token's own KV is never computed, so 13 of its 14 tokens are.
    assert [target for number, target in scene.admission.asked if number == 0] == [5, 7]
    assert list(scene.claims(0)) == [(None, 2, 0), (None, 4, 0)]
    assert len(list(scene.claims(1))) == 1, "a claim without a limit is asked for once"


def test_a_request_whose_claim_is_not_renewed_pauses_with_its_kv_and_goes_on_when_it_is() -> None:
    scene = Scene({0: granting(3, 9)}, blocks=20)
    paused = make(0, 8, 6)
    scene.add(paused, make(1, 8, 9))
    assert [scene.ran() for _ in range(2)] == [[0, 1]] * 2
    scene.admission.answers[0] = refusing(Deferral.REQUEST)
    table = scene.kv.blocks_of(paused).table
    assert [scene.ran() for _ in range(3)] == [[1]] * 3
    assert scene.kv.blocks_of(paused).table == table
    assert paused.wait is not None
    assert paused.wait.reason is WaitReason.HELD_BY_ADMISSION
    scene.admission.answers[0] = granting(4, 14)
    assert scene.ran() == [0, 1]
    scene.drain()
    assert scene.preempted() == [(0, Preemption.PAUSE)]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "refused", "gets_in"),
    [(Deferral.REQUEST, 63, True), (Deferral.REQUEST, 64, False), (Deferral.NEWCOMERS, 1, False)],
)
def test_a_refusal_lets_others_pass_until_there_were_64(how: Deferral, refused: int, gets_in: bool) -> None:
    scene = Scene({number: refusing(how) for number in range(1, 1 + refused)}, blocks=1000, slots=300)
    scene.add(make(0, 4, 4))
    assert scene.ran() == [0]
    scene.add(*(make(number, 4, 4) for number in range(1, 200)))
    scene.ordering.read = 0
    ran = scene.ran()
    assert ran == ([0, *range(1 + refused, 200)] if gets_in else [0])
    assert gets_in or scene.ordering.read == 1 + refused, "a long queue is not read to its end"
    scene.admission.answers.clear()
    scene.drain()


def test_a_refusal_that_closes_a_step_does_not_close_it_to_requests_that_hold_kv() -> None:
    scene = Scene({}, blocks=100)
    scene.add(make(1, 4, 8), make(2, 4, 8))
    assert scene.ran() == [1, 2]
    scene.admission.answers[0] = refusing(Deferral.NEWCOMERS)
    scene.add(make(0, 4, 4), make(3, 4, 4))
    assert scene.ran() == [1, 2]
    scene.admission.answers.clear()
    scene.drain()


# -- lenders ----------------------------------------------------------------------------------------------------------


def lending(
    *, account: bool = False, blocks: int = 12, output: int = 8, host: int = 0, eviction: EvictionPolicy | None = None
) -> tuple[Scene, Request, Request]:
    """A host that has claimed 10 blocks and holds 2, and its guest, which has claimed 4 of them for 16 tokens, 8 of
    these its output, and holds 2. account: whether the host's own claim is lent by an account, which has the whole
    pool. output: tokens that the guest would generate. host: blocks of the other tier."""
    lends, guest = make(0, 8, 30), make(1, 8, output)
    lender = KEPT if account else None
    answers = {0: granting(10, None, lender), 1: granting(4, 16, lends), 9: granting(8, None, lender)}
    scene = Scene(answers, blocks=blocks, host=host, keeps=blocks if account else 0, eviction=eviction)
    scene.add(lends, guest)
    assert scene.ran() == [0, 1]
    assert scene.kv.reservations.parent_of(guest) is lends
    assert nested_in(scene.kv, lends) == [guest]
    return scene, lends, guest


def test_a_guest_takes_nothing_that_is_available() -> None:
    scene, host, guest = lending()
    assert (scene.kv.available, scene.kv.reservations.unused(host), scene.kv.reservations.unused(guest)) == (
        2,
        10 - 2 - 4,
        4 - 2,
    )
    assert list(scene.claims(1)) == [(host, 4, 0)]
    scene.drain()
    assert scene.preempted() == []


def end(scene: Scene, host: Request) -> None:
    host.max_total_tokens = host.known + 1
    scene.ran()


def abort(scene: Scene, host: Request) -> None:
    scene.stepper.core.abort(host.id, scene.stepper.now)


def evict(scene: Scene, host: Request) -> None:
    """Let a request that matters more take the host's blocks."""
    scene.ordering.numbers[9] = -1
    scene.add(make(9, 8, 3))
    assert scene.ran() == [9]  # what ranks below an evicted request takes no blocks in that step
    assert host.evictions == 1


@pytest.mark.parametrize("account", [False, True])
@pytest.mark.parametrize("ways", [(end, Recompute), (abort, Recompute), (evict, Recompute), (evict, SwapAll)])
def test_a_guest_goes_on_with_its_hosts_lender_when_the_host_leaves(
    ways: tuple[Callable[[Scene, Request], None], Callable[[], EvictionPolicy]], account: bool
) -> None:
    leave, eviction = ways
    scene, host, guest = lending(account=account, host=20, eviction=eviction())
    table = scene.kv.blocks_of(guest).table
    leave(scene, host)
    assert scene.kv.reservations.parent_of(guest) == (KEPT if account else None)
    assert scene.kv.blocks_of(guest).table[:2] == table
    assert nested_in(scene.kv, host) == []
    assert scene.kv.reservations.parent_of(host) is None
    scene.ordering.numbers[0] = 400  # where the host comes back, it takes nothing from the guest
    scene.drain()
    assert guest.evictions == 0


def test_an_account_lends_what_it_keeps_and_has_it_again_afterwards() -> None:
    scene = Scene({0: granting(3, None, KEPT)}, blocks=10, keeps=4)
    request = make(0, 8, 4)
    scene.add(request, make(1, 8, 16))
    assert scene.ran() == [0, 1]
    assert (scene.kv.available, scene.kv.reservations.unused(KEPT)) == (0, 1)
    assert nested_in(scene.kv, KEPT) == [request]
    while 0 in scene.stepper.core.requests:
        scene.ran()
    assert (scene.kv.available, scene.kv.reservations.unused(KEPT)) == (0, 4)
    scene.drain()


def test_a_host_that_grows_vacates_its_guest_and_no_other_request() -> None:
    """Whatever the ranks: the request that matters least has blocks of its own."""
    scene, host, guest = lending(output=30, eviction=Vacate(COST))
    other = make(2, 4, 9)
    scene.admission.answers |= {2: granting(2, 8)}
    scene.add(other)
    assert scene.ran() == [0, 1, 2]
    assert scene.kv.available == 0
    scene.admission.answers = dict.fromkeys((1, 2), refusing(Deferral.REQUEST))
    while not guest.evictions:
        assert 0 in scene.ran()
    assert len(scene.kv.blocks_of(host).table) == 10 - 4 + 1
    assert (host.evictions, other.evictions) == (0, 0)
    scene.admission.answers.clear()
    scene.drain()


def test_a_host_takes_what_is_available_before_it_vacates_a_guest() -> None:
    scene, host, guest = lending(output=30, blocks=12, eviction=Vacate(COST))
    held = []
    while not guest.evictions:
        scene.admission.answers[1] = granting(4, 16, host) if guest.known <= 16 else refusing(Deferral.REQUEST)
        assert 0 in scene.ran()
        held.append(len(scene.kv.blocks_of(host).table))
    assert held[-2:] == [12 - 4, 12 - 4 + 1]
    scene.admission.answers.clear()
    scene.drain()


# -- accounts that are drawn upon -------------------------------------------------------------------------------------


def test_what_is_not_available_is_drawn_from_an_account() -> None:
    scene = Scene({0: granting(4, 10)}, blocks=10, keeps=4, eviction=Vacate(COST))
    scene.add(make(0, 8, 12), make(1, 6, 2))
    assert scene.ran() == [0, 1]
    assert (scene.kv.available, scene.kv.reservations.unused(KEPT)) == (10 - 4 - 4 - 2, 4)
    assert scene.ran() == [0, 1]
    scene.admission.answers[0] = granting(7, None, draws=KEPT)
    while len(list(scene.claims(0))) < 2:
        assert 0 in scene.ran()
    # The other one has ended: two of the three blocks were available.
    assert list(scene.claims(0)) == [(None, 4, 0), (None, 7, 1)]
    assert (scene.kv.available, scene.kv.reservations.unused(KEPT)) == (0, 3)
    scene.add(make(2, 8, 3))
    scene.ran()
    assert scene.kv.reservations.unused(KEPT) == 3, (
        "an account gets as many as are available, and no request loses any for it"
    )
    scene.drain()
    assert all(how is Preemption.PAUSE for _, how in scene.preempted())


def test_an_account_that_has_too_little_gives_up_nothing() -> None:
    scene = Scene({0: granting(4, 10)}, blocks=8, keeps=2)
    scene.add(make(0, 8, 20), make(1, 4, 4))
    scene.ordering.numbers[0] = 400  # it may evict no other request
    assert [scene.ran() for _ in range(3)] == [[1, 0]] * 3
    scene.admission.answers[0] = granting(8, None, draws=KEPT)
    assert scene.ran() == [1]
    assert scene.kv.reservations.unused(KEPT) == 2
    scene.drain()


# -- where nothing is granted -----------------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("how", Deferral)
def test_where_every_claim_is_refused_requests_run_one_at_a_time(how: Deferral, depth: int, overlap: bool) -> None:
    """Each to its end, in order, with what an account keeps."""
    scene = Scene(dict.fromkeys(range(3), refusing(how)), blocks=6, keeps=3, depth=depth, overlap=overlap)
    requests = [make(number, 9, 14) for number in range(3)]
    scene.add(*requests)
    scene.drain()
    ran = [[piece[0] for piece in plan[1]] for _, plan in scene.stepper.core.trace]
    assert all(len(numbers) == 1 for numbers in ran)
    assert sorted(ran) == ran
    assert [len(scene.stepper.tokens[number]) for number in range(3)] == [14] * 3
    assert all(request.evictions == 0 for request in requests)


def test_a_request_that_is_forced_takes_the_blocks_of_requests_that_hold_them_for_nothing() -> None:
    """Two that fill the pool and are granted no more: the first one takes the other's blocks, and both end."""
    scene = Scene({0: granting(3, 12), 1: granting(3, 12)}, blocks=6)
    requests = [make(0, 12, 8), make(1, 12, 8)]
    scene.add(*requests)
    assert scene.ran() == [0, 1]
    scene.admission.answers.update(dict.fromkeys(range(2), refusing(Deferral.REQUEST)))
    assert scene.ran() == [0]
    assert scene.preempted() == [(1, Preemption.DROP)]
    scene.drain()
    assert [request.evictions for request in requests] == [0, 1]


def test_nothing_is_forced_while_anything_runs() -> None:
    scene = Scene({1: refusing(Deferral.REQUEST)}, blocks=20)
    scene.add(make(0, 4, 6), make(1, 4, 3))
    while 0 in scene.stepper.core.requests:
        assert scene.ran() == [0]
    assert scene.ran() == [1]
    scene.drain()


# -- on the host ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 20])
def test_a_claim_ends_when_the_kv_leaves_the_device_and_is_asked_for_again(limit: int | None) -> None:
    eviction = OnCall()
    scene = Scene({1: granting(5, limit)}, blocks=12, host=12, eviction=eviction)
    request = make(1, 8, 10)
    scene.add(make(0, 8, 20), request)
    scene.ran()
    eviction.out = [request]
    assert scene.ran() == [0]
    assert scene.kv.cpu_footprint(request) == 2
    assert request.reserved_tokens == (UNLIMITED if limit is None else 0)
    assert scene.kv.available == 12 - 7
    if limit is not None:
        scene.admission.answers[1] = refusing(Deferral.REQUEST)
        assert scene.ran() == [0]
        assert scene.kv.cpu_footprint(request) == 2, "what is granted nothing does not come back"
        scene.admission.answers[1] = granting(5, limit)
    assert scene.ran() == [0, 1]
    assert scene.kv.cpu_footprint(request) == 0
    assert len(list(scene.claims(1))) == 1 + (limit is not None)
    scene.drain()
    assert sum(isinstance(event, Admitted) and event.request is request for event in scene.stepper.events) == 1


def test_kv_comes_back_from_the_host_into_a_claim_that_is_lent() -> None:
    eviction = OnCall()
    host, guest = make(0, 8, 30), make(1, 8, 10)
    scene = Scene({0: granting(10), 1: granting(3, 10)}, blocks=13, host=12, eviction=eviction)
    scene.add(host, guest)
    scene.ran()
    eviction.out = [guest]
    assert scene.ran() == [0]
    scene.admission.answers[1] = granting(5, 18, host)
    scene.add(make(2, 8, 4))
    assert scene.ran() == [0, 1, 2]
    assert scene.kv.reservations.parent_of(guest) is host
    assert scene.kv.available == 0
    scene.drain()
    assert (host.evictions, guest.evictions) == (0, 0)


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_a_restart_ends_all_claims_and_all_are_asked_for_again() -> None:
    scene, host, guest = lending(account=True)
    scene.stepper.start()
    scene.stepper.restart()
    unused = scene.kv.reservations.unused(KEPT)
    assert (scene.kv.available, unused, host.reserved_tokens, guest.reserved_tokens) == (12, 0, UNLIMITED, UNLIMITED)
    assert scene.ran() == [0, 1]
    assert [lender for lender, *_ in scene.claims(0)] == [KEPT, KEPT]
    assert [lender for lender, *_ in scene.claims(1)] == [host, host]
    scene.drain()
