from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papers.econoserve.coupled import WholeReservations
from papers.fastserve.static import WholeMaximum
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy import AdmissionPolicy, Allocation, Deferral
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.econo import PaddedLengths
from skipjoin.policies.exact_reservations import ExactReservations, GroupGate
from skipjoin.policies.nesting import ParentRequests
from support.load import make

ADMISSIONS: dict[str, AdmissionPolicy] = {
    "on demand": OnDemand(),
    "whole maximum": WholeMaximum(),
    "whole reservations": WholeReservations(PaddedLengths(0.15)),
    "exact reservations": ExactReservations(PaddedLengths(0.15), group=None, reserve=0.1, parents=None),
    "exact reservations, nested": ExactReservations(
        PaddedLengths(0.0), group=None, reserve=0.0, parents=ParentRequests(0.1)
    ),
    "exact reservations, gated": ExactReservations(
        PaddedLengths(0.0), group=lambda request, now: 0, reserve=0.1, parents=None, gate=GroupGate()
    ),
}
every_admission = pytest.mark.parametrize("admission", ADMISSIONS.values(), ids=ADMISSIONS.keys())


@every_admission
@given(prompt=st.integers(1, 60), more=st.integers(1, 40), blocks=st.integers(1, 30))
def test_an_empty_device_admits_every_request_that_can_fit(
    admission: AdmissionPolicy, prompt: int, more: int, blocks: int
) -> None:
    kv = KVLedger(blocks, 0, 4)
    request = make(0, prompt, more)
    if request.max_total_tokens <= blocks * 4:
        grant = admission.reserve(request, request.progress.known, kv)
        assert isinstance(grant, Allocation)
        assert max(grant.now, grant.blocks) + grant.spare <= kv.available


@every_admission
@given(prompt=st.integers(1, 60), more=st.integers(1, 40), others=st.integers(0, 30))
def test_a_reservation_never_exceeds_the_pool(admission: AdmissionPolicy, prompt: int, more: int, others: int) -> None:
    """Otherwise the request could not be admitted even after all others were preempted."""
    kv = KVLedger(30, 0, 4)
    if others:
        kv.grow(make(1), others * 4)
    grant = admission.reserve(make(0, prompt, more), prompt, kv)
    if isinstance(grant, Allocation):
        assert kv.blocks_for(prompt) <= max(grant.now, grant.blocks)
        assert max(grant.now, grant.blocks) + grant.spare <= kv.device_total


@every_admission
@given(prompt=st.integers(1, 60), others=st.integers(0, 30))
def test_claim_has_no_side_effects(admission: AdmissionPolicy, prompt: int, others: int) -> None:
    kv = KVLedger(30, 0, 4)
    if others:
        kv.grow(make(1), others * 4)
    before = kv.available
    request = make(0, prompt)
    assert admission.reserve(request, request.progress.known, kv) == admission.reserve(
        request, request.progress.known, kv
    )
    assert kv.blocks_of(request) is None
    assert kv.available == before


def test_on_demand_leaves_blocks_for_running_requests() -> None:
    kv = KVLedger(1000, 0, 4)
    kv.grow(make(1), 4)
    assert OnDemand().reserve(make(0, 8), 8, kv) == Allocation(now=2, blocks=2, spare=10)


def test_on_demand_counts_known_tokens_only() -> None:
    request = make(0, 8, 100)
    request.progress.known += 4
    grant = OnDemand().reserve(request, request.progress.known, KVLedger(99, 0, 4))
    assert grant == Allocation(now=3, blocks=3)


def test_whole_maximum_waits_until_the_maximum_length_fits() -> None:
    kv = KVLedger(10, 0, 4)
    kv.reserve(make(1), 5)
    assert WholeMaximum().reserve(make(0, 8, 12), 8, kv) == Allocation(now=5, blocks=5)
    assert WholeMaximum().reserve(make(0, 8, 13), 8, kv) is Deferral.INCOMING


@pytest.mark.parametrize(("others", "expected"), [(0, Allocation(10, 10, tokens=40)), (5, Allocation(5, 5, tokens=20))])
def test_an_exhausted_whole_claim_grows_to_the_forecast_or_by_one_block(others: int, expected: Allocation) -> None:
    kv = KVLedger(10, 0, 4)
    request = make(0, 8, 33)
    admission = WholeReservations(PaddedLengths(0, lambda _: 9))
    assert admission.reserve(request, 8, kv) == Allocation(4, 4, tokens=16)
    kv.reserve(request, 4, tokens=16)
    if others:
        kv.reserve(make(1), others)
    assert admission.reserve(request, 17, kv) == expected
