"""Stalled engines: requests wait although no work is in flight."""

from __future__ import annotations

import os
import signal
from itertools import count

import pytest

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy import Callbacks
from skipjoin.core.policy_set import Policies
from skipjoin.core.refusals import HELD, Refusal
from skipjoin.core.request import Request
from skipjoin.core.step import StepResult
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.batching import ChunkedBuilder
from skipjoin.policies.eviction import Recompute
from skipjoin.policies.ordering import Fcfs
from skipjoin.server.engines.engine_program import describe_end, describe_error
from skipjoin.server.engines.heartbeat import HEARTBEAT_INTERVAL_S, HeartbeatReader
from skipjoin.server.engines.self_checks import RESTART_AFTER_S, StallError, StallWatch
from support.load import make

LIMIT_S = 5.0


class Stubborn(Callbacks, ChunkedBuilder):
    """Defective batcher that refuses all requests or those with KV."""

    cap = 8

    def __init__(self, *, refuses_all: bool) -> None:
        super().__init__(8, 100)
        self.refuses_all = refuses_all

    def open(self, context: object) -> Stubborn:
        return self

    def offer(self, request: Request, pending: int) -> int | Refusal:
        return HELD if self.refuses_all or request.progress.computed else pending

    def take(self, request: Request, tokens: int) -> None:
        pass


def stalled(*, refuses_all: bool) -> EngineCore:
    policies = Policies(Fcfs(), Stubborn(refuses_all=False), OnDemand(), Recompute())
    core = EngineCore(Scheduler(policies, KVLedger(8, 0, 4)))
    core.add(make(0, 8, 4), 0.0)
    plan = core.start_step(0.0)
    assert plan is not None
    assert not core.is_stalled
    core.finish_step(StepResult(plan, [1], 0.01), 0.01)
    policies.batcher.refuses_all = refuses_all
    assert core.start_step(0.02) is None
    assert core.is_stalled
    return core


def watch() -> StallWatch:
    return StallWatch(LIMIT_S, clock=count(0.0, RESTART_AFTER_S / 2).__next__)


def test_stalled_engine_drops_all_kv_and_continues(caplog: pytest.LogCaptureFixture) -> None:
    core, stalls = stalled(refuses_all=False), watch()
    for _ in range(2):
        stalls.check(core)
        assert core.start_step(1.0) is None
    stalls.check(core)
    assert "all KV is dropped: 1 requests wait" in caplog.text
    plan = core.start_step(1.0)
    assert [item.start for item in plan.slices] == [0]
    stalls.check(core)


def test_engine_that_stays_stalled_raises() -> None:
    core, stalls = stalled(refuses_all=True), watch()
    for _ in range(int(2 * LIMIT_S / RESTART_AFTER_S)):
        stalls.check(core)
        assert core.start_step(1.0) is None
    with pytest.raises(StallError, match="no step could be planned for 5 s: 1 requests wait"):
        stalls.check(core)


def test_silence_excludes_time_when_reader_did_not_run() -> None:
    now = 0.0
    reader = HeartbeatReader(clock=lambda: now)
    os.write(reader.engine_fd, b".")
    assert reader.wait()
    for _ in range(10):
        now += HEARTBEAT_INTERVAL_S
        silent_s = reader.silent_s()
    assert silent_s == 10 * HEARTBEAT_INTERVAL_S
    now += 3600
    assert reader.silent_s() == silent_s + 2 * HEARTBEAT_INTERVAL_S
    os.write(reader.engine_fd, b"...")
    assert reader.silent_s() == 0
    reader.started()
    now += HEARTBEAT_INTERVAL_S
    assert reader.silent_s() == HEARTBEAT_INTERVAL_S  # exits are detected elsewhere
    reader.close()
    reader.close()


@pytest.mark.parametrize(
    ("code", "is_out_of_memory", "parts"),
    [
        (7, True, ("exit code 7",)),
        (-signal.SIGKILL, True, ("memory ran out", "SIGKILL", "lower --kv-cache-gib")),
        (-signal.SIGKILL, False, ("SIGKILL", "or by another process", "dmesg", "lower --kv-cache-gib")),
        (-signal.SIGSEGV, True, ("SIGSEGV", "native code")),
        (-signal.SIGUSR2, False, ("SIGUSR2",)),
    ],
)
def test_exit_description_names_cause_and_remedy(code: int, is_out_of_memory: bool, parts: tuple[str, ...]) -> None:
    text = describe_end(code, is_out_of_memory=is_out_of_memory)
    assert not [part for part in parts if part not in text]


def test_out_of_memory_error_names_remedy() -> None:
    errors = [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")]
    assert all("lower --kv-cache-gib" in describe_error(error) for error in errors)
    assert describe_error(ValueError("no")) == "ValueError: no"
