from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request, RequestOptions, Target
from skipjoin.core.step import StepResult
from skipjoin.recipes import Settings, build
from support.policies import COST

RUNNING, WAITING, STEPS = 64, 40, 16
# Their first tokens no longer precede decodes.
MISSED = RequestOptions(target=Target(ttft_s=1e-6))


def bytecodes_of(call: Callable[[], Any]) -> tuple[int, Any]:
    count = 0

    def within(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return within

    def entered(frame: FrameType, _event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return within

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        found = call()
    finally:
        sys.settrace(before)
    return count, found


def min_cost(recipe: str, limit: str) -> float:
    """Return the bytecodes of a decision for a full batch in decode, with a queue that `limit` blocks."""
    slots = RUNNING if limit == "slots" else 2 * RUNNING
    kv = KVLedger(RUNNING * (8 if limit == "memory" else 400), 0, 16)
    core = EngineCore(Scheduler(build(recipe, Settings(COST, max_seqs=slots, max_tokens=1024)), kv))
    for number in range(RUNNING):
        core.add(Request(number, 0.0, range(64), STEPS + 40), 0.0)
    now, costs = 0.0, []
    for step in range(STEPS + 10):
        if step == 10:
            for number in range(RUNNING, RUNNING + WAITING):
                core.add(Request(number, now, range(5000), 100, options=MISSED), now)
        now += 0.02
        cost, plan = bytecodes_of(lambda now=now: core.start_step(now))
        assert plan is not None
        core.finish_step(StepResult(plan, [7 if piece.samples else None for piece in plan.slices], 0.02), now)
        core.take_events()
        if all(piece.tokens == 1 for piece in plan.slices) and len(plan.slices) == RUNNING:
            costs.append(cost)
    assert len(costs) > STEPS // 2
    return min(costs)


@pytest.mark.parametrize(
    ("recipe", "limit", "most"),
    [("adaptive", "slots", 1.06), ("adaptive", "memory", 1.06), ("bros", "slots", 4.7), ("bros", "memory", 2.25)],
)
def test_a_decision_in_which_nothing_changes_costs_little_more_than_fcfs(recipe: str, limit: str, most: float) -> None:
    assert min_cost(recipe, limit) <= most * min_cost("fcfs", limit)
