"""What the scheduler relies on in every pressure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.events import Preemption
from skipjoin.core.kv import KVLedger
from skipjoin.core.policy import Pressure
from skipjoin.core.request import Request
from skipjoin.policies.pressure import Recompute, Swap
from support.load import make
from support.policies import Chaos

PRESSURES: dict[str, Pressure] = {"recompute": Recompute(), "swap": Swap(), "chaos": Chaos(0)}
every_pressure = pytest.mark.parametrize("pressure", PRESSURES.values(), ids=PRESSURES.keys())


def holders(kv: KVLedger, sizes: list[int]) -> list[Request]:
    """Decoding requests that hold these many blocks each."""
    requests = []
    for number, blocks in enumerate(sizes):
        request = make(number, blocks * kv.block_size)
        kv.grow(request, request.known)
        request.computed = request.planned = request.known
        request.known += 1
        requests.append(request)
    return requests


@every_pressure
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), data=st.data())
def test_victims_free_enough_in_the_order_given_and_no_more_than_needed(
    pressure: Pressure, sizes: list[int], data: st.DataObject
) -> None:
    kv = KVLedger(100, 100, 4)
    candidates = holders(kv, sizes)
    short = data.draw(st.integers(1, sum(sizes)))
    victims = [victim for victim, _ in pressure.victims(short, candidates, kv)]
    assert victims == candidates[: len(victims)]
    freed = [kv.footprint(victim) for victim in victims]
    assert sum(freed) >= short > sum(freed[:-1])


@every_pressure
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_what_moves_ahead_can_move(pressure: Pressure, sizes: list[int]) -> None:
    kv = KVLedger(100, 20, 4)
    idle = holders(kv, sizes)
    for request in idle[::2]:
        if kv.can_move_out(request):
            kv.land(kv.move_out(request, before=True))
    out, back = pressure.ahead(iter(idle), kv, 0.0)
    assert all(kv.can_move_out(request) for request in out)
    assert all(kv.can_move_in(request) for request in back)
    assert not set(out) & set(back)


def test_recompute_drops_and_moves_nothing_ahead() -> None:
    kv = KVLedger(10, 10, 4)
    requests = holders(kv, [1, 2])
    assert list(Recompute().victims(3, requests, kv)) == [(r, Preemption.DROP) for r in requests]
    assert Recompute().ahead(requests, kv, 0.0) == ((), ())


def test_swap_keeps_what_is_finished_and_drops_an_unfinished_prefill() -> None:
    kv = KVLedger(10, 10, 4)
    decoding, prefilling = holders(kv, [1, 2])
    prefilling.known = prefilling.computed + 2
    assert list(Swap().victims(3, [decoding, prefilling], kv)) == [
        (decoding, Preemption.SWAP),
        (prefilling, Preemption.DROP),
    ]
