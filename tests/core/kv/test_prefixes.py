from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from skipjoin.core.decide.candidates import MAX_BEHIND_S
from skipjoin.core.events import Admitted
from skipjoin.core.kv.block_pool import BlockPool
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.prefixes import ContentPrefix, NamedPrefix
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.waits import WaitReason
from skipjoin.policies.batching import Greedy
from support.load import changed, make
from support.watch import Scene, Stepper

BLOCK = 4
TEXT = range(100, 200)


def stepper(blocks: int = 100, *, max_tokens: int = 64, depth: int = 1) -> Stepper:
    """Return a stepper that ranks requests by id and cuts prompts into chunks of `max_tokens`."""
    ranks, batcher = dict.fromkeys(range(100), 0), Greedy(8, max_tokens, chunked=True)
    return Scene(ranks, blocks=blocks, batcher=batcher, depth=depth)


def request_for(
    number: int, prompt: Sequence[int], max_tokens: int = 3, *, salt: bytes = b"", **options: bool
) -> Request:
    request = make(number, 1, max_tokens, **options)  # type: ignore[arg-type]
    return changed(request, prompt=prompt, prefix=ContentPrefix(BLOCK, salt))


def computed(steps: Stepper, number: int) -> int:
    return sum(piece[2] for _, plan in steps.core.trace for piece in plan[1] if piece[0] == number)


def cached(steps: Stepper) -> list[int]:
    return [event.cached for event in steps.events if isinstance(event, Admitted)]


@pytest.mark.parametrize(("length", "found"), [(16, 12), (17, 16), (3, 0)])
def test_a_cache_hit_covers_the_full_blocks_before_the_last_prompt_token(length: int, found: int) -> None:
    steps = stepper()
    for number in range(2):
        steps.add(request_for(number, TEXT[:length]))
        steps.drain()
    assert cached(steps) == [0, found]
    assert steps.tokens[0] == steps.tokens[1]


def test_a_cache_hit_includes_generated_tokens() -> None:
    steps = stepper()
    first = request_for(0, TEXT[:6], 20)
    steps.add(first)
    steps.drain()
    steps.add(request_for(1, [*first.prompt, *first.progress.output, 7]))
    steps.drain()
    assert cached(steps) == [0, 24]  # the last token of an output is never computed


@pytest.mark.parametrize("other", [{"salt": b"other"}, {"prompt": [1, *TEXT[1:20]]}])
def test_another_salt_or_first_token_is_a_cache_miss(other: dict[str, Any]) -> None:
    steps = stepper()
    for number, other_fields in enumerate(({}, other)):
        steps.add(request_for(number, **{"prompt": TEXT[:20]} | other_fields))
        steps.drain()
    assert cached(steps) == [0, 0]


def test_concurrent_requests_compute_their_common_prompt_once() -> None:
    steps = stepper(max_tokens=16)
    steps.add(*(request_for(number, TEXT[:41]) for number in range(8)))
    steps.step()
    assert steps.core.scheduler.waits[steps.core.requests[1]].reason is WaitReason.BEHIND_PREFIX
    steps.drain()
    assert [computed(steps, number) for number in range(8)] == [43, *[3] * 7]


def test_requests_that_wait_for_a_prefix_compute_it_when_its_request_is_aborted() -> None:
    steps = stepper(max_tokens=16)
    steps.add(*(request_for(number, TEXT[:41]) for number in range(3)))
    steps.step()
    steps.core.abort(0, steps.now, FinishReason.ABORT)
    steps.drain()
    assert [computed(steps, number) for number in range(3)] == [16, 27, 3]


def test_no_request_waits_for_the_prefix_of_a_lower_class_or_longer_than_the_limit() -> None:
    steps = stepper(max_tokens=4)
    steps.add(request_for(0, TEXT, best_effort=True))
    steps.step()
    steps.add(request_for(1, TEXT), request_for(2, TEXT, best_effort=True))
    steps.core.scheduler.policies.ordering.numbers |= {0: -1, 1: -2}
    steps.step()
    assert computed(steps, 1) == 4
    assert computed(steps, 2) == 0
    steps.core.abort(1, steps.now)
    steps.now += MAX_BEHIND_S
    steps.core.scheduler.policies.ordering.numbers |= {2: -3}
    steps.step()
    assert computed(steps, 2) == 4


def test_a_failed_slice_registers_no_keys() -> None:
    steps = stepper()
    steps.fails_slice = lambda piece: True
    steps.add(request_for(0, TEXT[:20]))
    steps.step()
    steps.fails_slice = lambda piece: False
    steps.add(request_for(1, TEXT[:20]))
    steps.drain()
    assert cached(steps) == [0, 0]


def test_slices_in_flight_of_a_failed_request_register_no_keys() -> None:
    """The KV of a later chunk depends on KV that was never computed."""
    steps = stepper(max_tokens=4, depth=2)
    steps.add(request_for(0, TEXT[:20]))
    steps.start()
    steps.start()
    steps.fails_slice = lambda piece: piece.start == 0
    steps.finish()
    steps.fails_slice = lambda piece: False
    steps.finish()
    steps.add(request_for(1, TEXT[:20]))
    steps.drain()
    assert cached(steps) == [0, 0]


@pytest.mark.parametrize("depth", [1, 2])
def test_an_aborted_request_registers_the_keys_of_committed_slices_only(depth: int) -> None:
    steps = stepper(max_tokens=4, depth=depth)
    steps.add(request_for(0, TEXT[:20]))
    steps.step()
    for _ in range(depth):
        steps.start()
    steps.core.abort(0, steps.now)
    for _ in range(depth):
        steps.finish()
    steps.add(request_for(1, TEXT[:20]))
    steps.drain()
    assert cached(steps) == [0, 4]


def test_blocks_that_a_waiting_request_can_use_are_reused_last() -> None:
    kv = KVLedger(6, 0, BLOCK)
    old, new = (request_for(number, range(start, start + 13)) for number, start in ((0, 100), (1, 200)))
    for request in (old, new):
        request.progress.finish_reason = None
        kv.grow(request, 12)
        request.progress.computed = request.progress.planned = 12
        kv.cache.offer(request)
        request.progress.finish_reason = FinishReason.STOP
        kv.release(request)
    again, filler = request_for(2, range(100, 113)), make(3, 12)
    kv.cache.await_prefix(again)
    kv.grow(filler, 12)
    assert kv.hit(again).tokens == 12
    assert kv.hit(request_for(4, range(200, 213))).tokens == 0
    kv.check()


def test_the_prefix_of_a_waiting_request_is_not_looked_up_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are not held and released again at each step, either."""
    steps = stepper(1000, max_tokens=5000)
    steps.add(request_for(0, range(3600)))
    steps.drain()
    steps.add(make(1, 360, 30))
    steps.step()
    late = request_for(2, range(3800))
    steps.add(late)
    steps.step()
    calls = Counter[str]()

    def counted(name: str) -> None:
        method = getattr(BlockPool, name)

        def call(pool: BlockPool, *args: Any) -> Any:
            calls[name] += 1
            return method(pool, *args)

        monkeypatch.setattr(BlockPool, name, call)

    for name in ("find", "find_free", "revive", "want"):
        counted(name)
    for _ in range(20):
        steps.step()
    assert steps.core.scheduler.waits[late].reason is WaitReason.NO_KV
    assert sum(calls.values()) <= 20 * 5
    steps.drain()
    assert cached(steps)[-1] == 3600


def test_keys_do_not_depend_on_whether_they_are_computed_in_parts_or_in_a_copy() -> None:
    one, two = request_for(0, TEXT), request_for(1, TEXT)
    begun = list(one.keys(30))
    copy = one.prefix.copy()
    assert list(one.keys(100)) == list(two.keys(100))
    other = request_for(2, [*TEXT[:30], *range(50)])
    assert [list(copy.keys(other.tokens, 80))[index] in begun for index in range(8)] == [True] * 7 + [False]


def test_keys_of_reversed_blocks_do_not_depend_on_earlier_calls() -> None:
    requests = [request_for(number, TEXT[:4]) for number in range(2)]
    for request in requests:
        request.progress.fill_down()
    requests[0].keys(3)
    first, second = (list(request.keys(4)) for request in requests)
    assert first == second != list(request_for(2, TEXT[:4]).keys(4))


def test_names_of_a_trace_cover_whole_blocks() -> None:
    keys = NamedPrefix([7, 8], 8, BLOCK).keys(make(0).tokens, 16)
    assert len(set(keys)) == 4
    assert keys[:2] == NamedPrefix([7, 9], 8, BLOCK).keys(make(0).tokens, 16)[:2]
    with pytest.raises(ValueError, match="whole blocks of 4"):
        NamedPrefix([7], 6, BLOCK)


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_share_all_their_blocks_can_be_evicted(depth: int) -> None:
    """Shared blocks become free with their last holder, and count in no footprint.

    With two plans in flight, one of the holders is always running unless it pauses.
    """
    steps = stepper(8, depth=depth)
    for number in range(2):
        steps.add(request_for(number, TEXT[:17], 9))
        steps.step()
        steps.step()
    assert [steps.core.kv.footprint(request) for request in steps.core.kv.holders()] == [1, 1]
    if depth == 2:
        steps.start()
    steps.core.scheduler.policies.ordering.numbers[2] = -1
    steps.add(make(2, 28, 2))
    for _ in range(depth):
        steps.start()
        steps.finish()
    ran = [piece[0] for _, plan in steps.core.trace for piece in plan[1]]
    assert 2 in ran
    steps.drain()
    assert steps.tokens.keys() == {0, 1, 2}
