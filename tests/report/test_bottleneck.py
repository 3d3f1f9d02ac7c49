from __future__ import annotations

import pytest

from skipjoin.core.waits import WaitReason
from skipjoin.report import bottleneck
from skipjoin.report.bottleneck import limit_of
from skipjoin.report.results import Record


def record(at_target: float = 0.0, **wait_s: float) -> Record:
    return {"wait_s": wait_s, "jct_s": {"mean": 10.0}, "forward": {"at_target": at_target}}


@pytest.mark.parametrize(
    ("records", "limit", "share"),
    [
        ([record(no_slot=4.0, no_kv=1.0, dispatch=5.0)], "slots", 0.5),
        ([record(no_slot=2.0, behind_memory=2.0, kv_on_cpu=1.0)], "KV", 0.5),
        ([record(token_budget=1.0), record(token_budget=3.0)], "tokens per step", 0.2),
        ([record(at_target=0.9, no_slot=0.01)], "compute", 0.001),
        ([record(dispatch=9.0)], "nothing", 0.0),
    ],
)
def test_the_limit_is_what_requests_wait_for_most(records: list[Record], limit: str, share: float) -> None:
    found = limit_of(records)
    assert found[0] == limit
    assert found[1] == pytest.approx(share)


def test_records_of_clients_have_no_limit() -> None:
    assert limit_of([{"wait_s": None, "jct_s": {"mean": 1.0}}]) is None


def test_limits_name_wait_reasons() -> None:
    assert {reason for reasons in bottleneck._LIMITS.values() for reason in reasons} <= {*map(str, WaitReason)}
