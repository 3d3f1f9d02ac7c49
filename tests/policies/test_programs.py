"""Programs of many calls: their order, the KV that is kept for them, and what is known of them."""

from __future__ import annotations

import math
from random import Random

import pytest

from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy import Allocation, Deferral
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import FinishReason, ProgramId, Request
from skipjoin.core.step import Slice
from skipjoin.policies import program_book
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.fairness import Fair
from skipjoin.policies.ordering import Fcfs
from skipjoin.policies.program_book import MAX_IDLE, ProgramBook
from skipjoin.policies.program_leases import ProgramLeases
from skipjoin.policies.programs import ByProgram
from support.load import BLOCK_SIZE, changed, make

OVERTAKING_S = 100.0
COST = LinearCost(floor=0.01, prefill_token=0.001)


class Calls:
    """Sends calls of programs to an ordering, and runs them."""

    def __init__(self) -> None:
        self.book = ProgramBook()
        self.ordering = ByProgram(Fcfs, self.book, overtaking_s=OVERTAKING_S)
        self.now = 0.0
        self._next = 0

    def send(self, program: str, prompt: int, *, owner: str = "", found: int = 0, stated: bool = True) -> Request:
        name = ProgramId(owner, program, stated) if program else None
        asked = make(self._next, prompt, 50, arrival=self.now)
        text = [100 * self._next + at for at in range(prompt)]
        request = changed(asked, program=name, prompt=text, prefix=ContentPrefix(BLOCK_SIZE))
        request.progress.find(found)
        self._next += 1
        self.ordering.on_arrived(request, self.now)
        return request

    def run(self, request: Request, tokens: int = 1) -> None:
        """Compute the prompt and generate tokens."""
        progress, prompt = request.progress, len(request.prompt)
        for start, width in [(0, prompt), *((prompt + at, 1) for at in range(tokens - 1))]:
            progress.begin(start + width, True, 0)
            progress.settle(start + width, True)
            self.ordering.on_scheduled([Slice(request, start, width, True, False, ())], self.now)
            progress.append(7)

    def end(self, request: Request) -> None:
        request.progress.finish(FinishReason.STOP)
        self.ordering.on_finished(request, self.now)

    def call(self, program: str, prompt: int, tokens: int = 1, *, owner: str = "", stated: bool = True) -> None:
        """Send a call and finish it."""
        request = self.send(program, prompt, owner=owner, stated=stated)
        self.run(request, tokens)
        self.end(request)

    def order(self) -> list[str]:
        return [request.options.program.name if request.options.program else "" for request in self._ranked()]

    def _ranked(self) -> list[Request]:
        return list(self.ordering.ranked(self.now))


def test_calls_follow_by_service_of_their_programs() -> None:
    calls = Calls()
    calls.call("much", 20_000)
    calls.call("some", 5_000)
    for name in ("much", "some", "none", "more"):
        calls.send(name, 21_000)
    assert calls.order() == ["none", "more", "some", "much"]


def test_tokens_of_earlier_calls_are_no_service() -> None:
    calls = Calls()
    calls.call("one", 1_000, 10)
    calls.call("one", 1_500, 1)
    program = calls.book.of(calls.send("one", 1_600))
    assert program is not None
    # The 1,009 tokens that the first call computed count once.
    assert program.attained == 1_000 + 2 * 10 + (1_500 - 1_009) + 2


def test_calls_that_find_their_kv_precede_others_of_their_level_but_do_not_evict_them() -> None:
    calls = Calls()
    new, old = calls.send("new", 100), calls.send("old", 100, found=96)
    assert calls.order() == ["old", "new"]
    assert not calls.ordering.outranks(old, new)


def test_nearly_finished_programs_come_first_where_all_are_equally_long() -> None:
    calls = Calls()
    for number in range(60):
        for _ in range(3):
            calls.call(f"{number}", 9_000 if number % 2 else 9_100, 500)
        calls.now += 4_000.0  # none returns
    calls.call("old", 9_000, 500)
    calls.send("new", 9_000)
    calls.send("old", 9_600)
    assert calls.order() == ["old", "new"]


def test_no_program_waits_longer_than_the_bound_for_others() -> None:
    calls = Calls()
    calls.call("long", 50_000)
    calls.now = 10.0
    waiting = calls.send("long", 51_000)
    calls.now += 60.0
    calls.run(waiting)
    calls.end(waiting)
    calls.send("long", 52_000)
    calls.now += OVERTAKING_S - 60.0 - 1.0
    calls.send("new", 100)
    assert calls.order() == ["new", "long"]
    calls.now += 1.0
    assert calls.order() == ["long", "new"]


def test_requests_without_a_program_do_not_starve_behind_programs() -> None:
    calls = Calls()
    calls.call("first", 10)
    for _ in range(40):
        calls.call("", 5_000, 50)
    plain = calls.send("", 5_000)
    calls.now = OVERTAKING_S - 1.0
    for number in range(20):
        calls.call(f"{number}", 10)
    calls.send("new", 10)
    assert calls.order() == ["new", ""]
    calls.now = OVERTAKING_S
    assert next(iter(calls.ordering.ranked(calls.now))) is plain


@pytest.mark.parametrize("program", ["", "long"])
def test_requests_that_have_run_do_not_starve_behind_new_programs(program: str) -> None:
    calls = Calls()
    calls.call(program or "first", 50_000)
    preempted = calls.send(program, 51_000)
    calls.run(preempted, 30)
    calls.ordering.on_preempted(preempted, calls.now)
    for number in range(20):
        calls.call(f"{number}", 10)
    calls.now = OVERTAKING_S - 1.0
    calls.send("new", 10)
    assert calls.order() == ["new", program]
    calls.now = OVERTAKING_S
    assert calls.order() == [program, "new"]
    calls.end(preempted)
    assert calls.order() == ["new"]


def test_requests_without_a_program_keep_the_order_of_the_recipe() -> None:
    calls = Calls()
    sent = [calls.send("", prompt) for prompt in (900, 10, 500)]
    assert list(calls.ordering.ranked(0.0)) == sent
    assert not calls.book.has_programs


def test_shared_names_that_clients_did_not_state_begin_another_program_with_a_shorter_prompt() -> None:
    calls = Calls()
    calls.call("app", 30_000, stated=False)
    own, shorter = calls.send("app", 31_000, stated=False), calls.send("app", 300, stated=False)
    assert [calls.book.of(request).calls for request in (own, shorter)] == [2, 1]  # type: ignore[union-attr]
    for request in (shorter, own):
        calls.run(request)
        calls.end(request)
    assert calls.book.of(calls.send("app", 31_100, stated=False)).calls == 2  # type: ignore[union-attr]


def test_a_flood_of_ids_is_bounded_and_leaves_programs_of_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_book, "MAX_IDLE", 50)
    calls = Calls()
    calls.call("mine", 30_000, owner="a")
    for number in range(2_000):
        calls.call(f"{number}", 4, owner="b")
        assert len(calls.book) <= 51
    program = calls.book.of(calls.send("mine", 30_100, owner="a"))
    assert program is not None
    assert program.calls == 2
    assert MAX_IDLE < 10_000


def test_requests_of_clients_with_and_without_programs_have_one_order() -> None:
    book = ProgramBook()
    ordering = Fair(lambda: ByProgram(Fcfs, book, overtaking_s=OVERTAKING_S), lead=1e6, output_weight=2.0)
    plain, call, other = make(0, client="a"), make(1, client="b"), make(2, client="c", arrival=1.0)
    late = changed(make(3, client="d"), program=ProgramId("d", "late"))
    asked = [plain, *(changed(one, program=ProgramId(one.options.client, "run")) for one in (call, other)), late]
    for request, now in zip(asked, (0.0, 0.0, 1.0, 0.0), strict=True):
        ordering.on_arrived(request, now)
    list(ordering.ranked(OVERTAKING_S))
    order = ordering.expected_order(asked[:3], OVERTAKING_S)
    assert [turn for turn, _ in order] == sorted(turn for turn, _ in order)
    assert {request.id for _, request in order} == {0, 1, 2}
    assert ordering.expected_order(asked, OVERTAKING_S)[-1][1] is asked[2], "the other calls have waited for too long"


def test_equal_ids_of_two_keys_are_two_programs() -> None:
    calls = Calls()
    calls.call("same", 30_000, owner="a")
    other = calls.send("same", 31_000, owner="b")
    assert calls.book.of(other).attained == 0  # type: ignore[union-attr]
    calls.now = 500.0
    calls.end(other)
    calls.now += 1.0
    calls.send("same", 31_000, owner="b")  # a pause of one key says nothing about those of another
    name = ProgramId("a", "same")
    assert calls.book.returns_until(name, 0.0) == 30.0
    assert calls.book.returns_until(name._replace(owner="b"), 0.0) == 2.0


@pytest.mark.parametrize("seed", range(4))
def test_what_other_keys_run_changes_nothing_that_is_known_of_a_keys_programs(seed: int) -> None:
    alone, beside = Calls(), Calls()
    for calls in (alone, beside):
        draw, others = Random(seed), Random(seed + 1)
        for _ in range(150):
            calls.now += draw.expovariate(0.1)
            for _ in range(others.randrange(4) if calls is beside else 0):
                # Short programs, or long ones with long pauses, which move levels and pauses of their own key.
                tokens = others.choice((1, 40_000))
                calls.call(f"{others.randrange(40)}", tokens, owner=others.choice("bc"))
            calls.call(f"{draw.randrange(30)}", draw.randrange(1, 9_000), draw.randrange(1, 5), owner="a")
        for number in range(30):
            calls.send(f"{number}", 9_000, owner="a")
    assert beside.book.index_of("a").levels == alone.book.index_of("a").levels != ProgramBook().index_of("a").levels
    assert beside.book.index_of("b").levels != alone.book.index_of("a").levels
    name = ProgramId("a", "0")
    assert beside.book.returns_until(name, 0.0) == alone.book.returns_until(name, 0.0)
    assert beside.book.held_until(name, 5.0, 0.0) == alone.book.held_until(name, 5.0, 0.0)
    assert beside.order() == alone.order()


def test_what_is_learned_of_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_book, "MAX_OWNERS", 20)
    calls = Calls()
    waiting = [calls.send("one", 10, owner=f"{number}") for number in range(60)]
    assert len(list(calls.ordering.ranked(0.0))) == 60
    for request in waiting:
        calls.run(request)
        calls.end(request)
    calls.now = 100.0  # all are finished
    calls.call("one", 10, owner="last")
    assert len(calls.book._habits) <= 20
    assert len(calls.book._pending) == 1


def test_idle_programs_are_forgotten() -> None:
    calls = Calls()
    calls.call("one", 100)
    calls.now = program_book.FORGET_S + 1.0
    calls.call("two", 100)
    assert len(calls.book) == 1


# -- KV ---------------------------------------------------------------------------------------------------


class Leases:
    """A ledger of 10 blocks, of which an idle program has 6."""

    def __init__(self) -> None:
        self.calls = Calls()
        self.policy = ProgramLeases(OnDemand(), self.calls.book, COST)
        self.kv = KVLedger(10, 0, BLOCK_SIZE)
        self.policy.on_begin(0.0, self.kv)
        self.ended = self.hold("idle", 6 * BLOCK_SIZE)
        self.release(self.ended)

    def hold(self, program: str, prompt: int) -> Request:
        request = self.of(program, prompt)
        self.kv.grow(request, prompt)
        self.calls.run(request)
        self.kv.cache.offer(request)
        return request

    def of(self, program: str, prompt: int) -> Request:
        request = self.calls.send(program, prompt)
        self.policy.on_arrived(request, self.calls.now)
        return request

    def release(self, request: Request) -> None:
        self.calls.end(request)
        name = request.options.program
        assert name is not None
        if (until := self.policy.keep_until(request, self.calls.now)) is not None:
            self.kv.cache.lease(name, request, until)
        self.kv.release(request)
        self.kv.check()

    def asks(self, request: Request) -> Allocation | Deferral:
        return self.policy.reserve(request, len(request.prompt), self.kv)


def test_calls_that_do_not_precede_an_idle_program_leave_its_kv() -> None:
    leases = Leases()
    assert leases.kv.cache.leased_blocks == 6
    assert isinstance(leases.asks(leases.of("new", 4 * BLOCK_SIZE)), Allocation)
    large = leases.of("large", 5 * BLOCK_SIZE)
    assert leases.asks(large) is Deferral.INCOMING
    # It may evict after as long as it takes to compute what the pool holds.
    leases.policy.on_begin(0.01 + 0.001 * 10 * BLOCK_SIZE + 0.001, leases.kv)
    assert isinstance(leases.asks(large), Allocation)


def test_leased_blocks_are_reused_after_others_until_the_lease_ends() -> None:
    leases = Leases()
    kv, keys = leases.kv, leases.ended.keys(6 * BLOCK_SIZE)
    for _ in range(4):  # other cached blocks go first, however recently they were used
        plain = leases.hold("", 4 * BLOCK_SIZE)
        leases.calls.end(plain)
        kv.release(plain)
        kv.check()
    assert all(kv.device.find(key) is not None for key in keys)
    kv.cache.end_leases(29.0)
    assert kv.cache.leased_blocks == 6
    kv.cache.end_leases(30.0)
    assert kv.cache.leased_blocks == 0
    kv.check()


def test_a_flood_of_leases_is_bounded() -> None:
    leases = Leases()
    for number in range(400):
        request = leases.hold(f"{number}", BLOCK_SIZE)
        leases.release(request)
        assert leases.kv.cache.leased_blocks <= leases.kv.device_total
    assert len(leases.policy._held) <= 256
    assert len(leases.kv.cache._leases) <= leases.kv.device_total
    assert len(leases.kv.cache._ends) <= 100
    leases.kv.check()


def test_a_lease_is_no_leak() -> None:
    leases = Leases()
    whole = leases.of("whole", 10 * BLOCK_SIZE - 1)
    leases.kv.grow(whole, 10 * BLOCK_SIZE - 1)
    leases.kv.check()
    assert leases.kv.available == 0
    leases.kv.release(whole)
    leases.kv.cache.end_leases(math.inf)
    leases.kv.check()
    assert leases.kv.available == 10


def test_an_aborted_call_leaves_no_lease() -> None:
    leases = Leases()
    request = leases.of("aborted", 8)
    request.progress.finish(FinishReason.ABORT)
    assert leases.policy.keep_until(request, 0.0) is None
