from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event, Finished
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.step import StepPlan, StepResult
from skipjoin.engine.loop import EngineLoop
from skipjoin.exec.base import RankError, RankMemoryError
from skipjoin.policies.cost import LearningCost, LinearCost
from skipjoin.recipes import Settings
from skipjoin.sampling import SamplingParams
from support.recipes import build

COST = LinearCost(floor=0.01, prefill_token=1e-5, decode=1e-3)


class LosingExecutor:
    """Executor that loses its ranks in each step with a request for which `is_fatal` is true."""

    def __init__(self, error: RankError, is_fatal: Any) -> None:
        self.error, self.is_fatal, self.restarts, self.ahead = error, is_fatal, 0, None

    def submit(self, plan: StepPlan, now: float) -> SimpleNamespace:
        return SimpleNamespace(result=lambda: self._result(plan))

    def _result(self, plan: StepPlan) -> StepResult:
        if any(self.is_fatal(item.request) for item in plan.slices):
            raise self.error
        return StepResult(plan, [7 if item.samples else None for item in plan.slices], 0.01)

    def on_finished(self, request: Request) -> None:
        pass

    def check(self) -> None:
        pass

    def restart(self, reason: Exception) -> None:
        assert reason is self.error
        self.restarts += 1


def run(executor: LosingExecutor, requests: int = 4) -> dict[int, tuple[str, int, str]]:
    """Return finish reason, number of tokens and error of each request. The third one asks for prompt logprobs."""
    policies = build("fcfs", Settings(COST, 8, 256))
    core = EngineCore(Scheduler(policies, KVLedger(64, 0, 16)))
    info = SimpleNamespace(eos_token_ids=(), vocab_size=99, max_model_len=256, cost=LearningCost(COST))
    info.check_pooling = lambda pooling: None
    unused = {"seed": 0, "jct_scale": None, "caches_prefixes": False, "adapter_bytes": {}, "learned": None}
    engine = SimpleNamespace(core=core, executor=executor, info=info, **unused)
    loop = EngineLoop(engine)  # type: ignore[arg-type]
    events: list[Event] = []
    for number in range(requests):
        scores = 1 if number == 2 else None
        loop.add(number, [1] * (4 + number % 2), SamplingParams(max_tokens=6, logprobs=scores, prompt_logprobs=scores))
        if number == 1:
            events += loop.step()
    while core.requests:
        events += loop.step()
    core.kv.check()
    assert core.kv.device_free == 64
    finished = [event for event in events if isinstance(event, Finished)]
    return {
        event.request.id: (event.reason.value, len(event.request.progress.output), event.detail) for event in finished
    }


def test_request_that_crashes_ranks_fails_alone_at_the_third_crash() -> None:
    executor = LosingExecutor(RankError("rank 1 was lost"), lambda request: request.id == 3)
    outcomes = run(executor)
    message = "ranks ended 3 times while they ran this request, which is not tried again"
    assert outcomes.pop(3) == ("error", 0, message)
    assert set(outcomes.values()) == {("length", 6, "")}
    assert executor.restarts == 3


def test_crashes_with_progress_in_between_fail_no_request() -> None:
    crashes = [True, False, False, True, False, True]
    executor = LosingExecutor(
        RankError("rank 1 was lost"), lambda request: request.id == 0 and crashes and crashes.pop()
    )
    assert set(run(executor).values()) == {("length", 6, "")}
    assert executor.restarts == 3


@pytest.mark.parametrize("fatal", [1, 2])
def test_out_of_memory_step_fails_its_largest_request(fatal: int) -> None:
    """A request with prompt logprobs counts as larger."""
    error = RankMemoryError("rank 0 failed: OutOfMemoryError")
    executor = LosingExecutor(error, lambda request: request.id == fatal and len(request.progress.output) < 2)
    outcomes = run(executor, requests=2 if fatal == 1 else 4)
    reason, _, message = outcomes.pop(fatal)
    assert reason == "error"
    assert "out of memory in a step with" in message
    assert set(outcomes.values()) == {("length", 6, "")}
    assert executor.restarts == 1
