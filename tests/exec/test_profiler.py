from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import BLOCK_SIZE, CONFIGS, tiny_model
from rank_links import thread_executor

from skipjoin.config.profile import Profile, Transfer
from skipjoin.core.step import Direction, StageTime, StepPlan, StepShape
from skipjoin.engine.profiling.cases import Limits, cases
from skipjoin.engine.profiling.guess import guess_cost
from skipjoin.engine.profiling.profiler import Effort, measure_profile, profile_key, shape_hash
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.local import LocalExecutor, LocalHandle
from skipjoin.exec.rank_spec import RankSpec, rank_spec_of
from skipjoin.exec.ranks.sharded import ShardedExecutor
from skipjoin.model.config import ModelConfig
from skipjoin.policies.cost import STEP_TERMS, LinearCost

LIMITS = Limits(tokens=64, requests=8, positions=128, kv_tokens=64 * BLOCK_SIZE)
# Durations that the executor reports for steps.
STEP_TIMES = LinearCost(
    floor=2e-3, prefill_token=3e-5, attention_pair=1e-7, decode=4e-5, context_token=1e-6, weights=3e-4
)


class RecordingExecutor(LocalExecutor):
    """Executor that keeps its plans and reports times of `STEP_TIMES`, whatever the machine does."""

    plans: list[StepPlan]
    first_run_factor = 1.0

    def submit(self, plan: StepPlan, now: float) -> LocalHandle:
        seen = any(plan is known for known in self.plans)
        self.plans.append(plan)
        result = super().submit(plan, now).result()
        factor = 1.0 if seen else self.first_run_factor
        seconds = STEP_TIMES.step(StepShape.of(plan.slices)) * factor
        handle: LocalHandle = _FixedResult(type(result)(plan, result.tokens, seconds))  # type: ignore[assignment]
        return handle


class _FixedResult:
    def __init__(self, result: object) -> None:
        self._result = result

    def result(self) -> object:
        return self._result


@pytest.fixture
def executor() -> Iterator[RecordingExecutor]:
    model = tiny_model("llama")
    store = KVStore(
        model.config,
        torch.float32,
        torch.device("cpu"),
        device_blocks=LIMITS.kv_tokens // BLOCK_SIZE,
        cpu_blocks=0,
        block_size=BLOCK_SIZE,
    )
    watched = RecordingExecutor(model, store)
    watched.plans = []
    yield watched
    watched.close()


def measured(
    executor: RecordingExecutor, effort: Effort, on_share: Callable[[float], object] = lambda share: None
) -> Profile:
    config = executor.model.config
    key = profile_key("some/model", config, executor.rank_specs, "1.2.3")
    return measure_profile(
        executor, config, key, LIMITS, effort, host_s=1e-4, on_progress=lambda what, share: on_share(share)
    )


def test_profile_reports_measured_times_and_fit_errors(executor: RecordingExecutor) -> None:
    executor.first_run_factor = 50.0  # the warm-up must not count
    shares: list[float] = []
    profile = measured(executor, Effort(60.0, 0.05), shares.append)
    for name in STEP_TERMS:
        assert getattr(profile.cost, name) == pytest.approx(getattr(STEP_TIMES, name), rel=1e-3)
    assert profile.errors.median < 1e-3
    assert profile.errors.p95 < 1e-3
    assert profile.errors.held_out == sum(sample.held_out for sample in profile.samples) > 5
    assert profile.errors.fitted == sum(not sample.held_out for sample in profile.samples) > 10
    expected = {StepShape.of(plan.slices) for plan in executor.plans}
    assert {StepShape(s.prefill, s.attention, s.decodes, s.context) for s in profile.samples} == expected
    assert len(profile.samples) == len(cases(LIMITS, 12))
    assert all(0 <= share <= 1 for share in shares)
    assert shares[-1] == 1
    assert profile.key == profile_key("some/model", executor.model.config, executor.rank_specs, "1.2.3")
    assert profile.block_size == BLOCK_SIZE
    assert profile.kv_bytes_per_block == executor.store.device.block_bytes


def test_transfer_cost_is_the_slower_direction(executor: RecordingExecutor) -> None:
    profile = measured(executor, Effort(1.0, 1.0))
    both = [profile.transfer_out.floor + 16 * profile.transfer_out.block]
    both.append(profile.transfer_in.floor + 16 * profile.transfer_in.block)
    assert min(both) > 0
    assert profile.cost.transfer(16) == pytest.approx(max(both))


def test_short_measurement_scales_the_default_cost(executor: RecordingExecutor) -> None:
    profile = measured(executor, Effort(1e-9, 0.0))
    assert [StepShape.of(plan.slices) for plan in executor.plans] == [StepShape(decodes=1, context=1)]
    assert profile.errors.held_out == 0
    smallest = StepShape(decodes=1, context=1)
    assert profile.cost.step(smallest) == pytest.approx(STEP_TIMES.step(smallest))
    guess = guess_cost(executor.rank_specs, BLOCK_SIZE)
    scale = STEP_TIMES.step(smallest) / guess.step(smallest)
    assert profile.cost.prefill_token == pytest.approx(scale * guess.prefill_token)


def test_steps_that_exceed_the_remaining_time_are_skipped(
    executor: RecordingExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With half a second per token, prompts are not measured within two seconds."""
    slow = LinearCost(floor=0.01, prefill_token=0.5, decode=0.5)
    monkeypatch.setattr("test_profiler.STEP_TIMES", slow)
    profile = measured(executor, Effort(2.0, 0.3))
    assert executor.plans
    assert {sum(piece.tokens for piece in plan.slices) for plan in executor.plans} == {1}
    assert profile.cost.step(StepShape(decodes=1, context=1)) == pytest.approx(0.51, rel=0.1)


def test_models_of_one_shape_share_a_key() -> None:
    config = ModelConfig.from_dict(CONFIGS["llama"])
    other_end = ModelConfig.from_dict({**CONFIGS["llama"], "eos_token_id": 7, "dtype": "bfloat16"})
    wider = ModelConfig.from_dict({**CONFIGS["llama"], "intermediate_size": 96})
    assert shape_hash(config) == shape_hash(other_end) != shape_hash(wider)


def test_the_key_contains_no_path(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("a-model")
    model = tiny_model("llama")
    known = model.config, [rank_spec_of(model, BLOCK_SIZE, 1)], "1.2.3"
    assert profile_key(str(folder), *known).model == folder.name
    assert profile_key("org/name", *known).model == "org/name"


@pytest.mark.parametrize("family", CONFIGS)
def test_default_cost_is_positive_and_grows_with_every_term(family: str) -> None:
    model = tiny_model(family)
    part = rank_spec_of(model, BLOCK_SIZE, 1)
    cost = guess_cost([part], BLOCK_SIZE)
    assert all(getattr(cost, name) > 0 for name in (*STEP_TERMS, "block", "transfer_floor"))
    assert guess_cost([rank_spec_of(model, 2 * BLOCK_SIZE, 1)], 2 * BLOCK_SIZE).block == pytest.approx(2 * cost.block)


def test_default_cost_adds_stages_but_not_tensor_ranks() -> None:
    part = rank_spec_of(tiny_model("llama"), BLOCK_SIZE, 1)
    one = guess_cost([part], BLOCK_SIZE)
    assert guess_cost([part, part], BLOCK_SIZE) == one
    two = guess_cost([part, part, part._replace(stage=1), part._replace(stage=1)], BLOCK_SIZE)
    assert two.decode == pytest.approx(2 * one.decode)
    assert two.floor == pytest.approx(2 * one.floor)


class FixedTimeRanks(ShardedExecutor):
    """Ranks that report times of `STEP_TIMES`.

    The first stage takes three times as long as the second, and twice as long in plans that run while some stages idle.
    """

    plans: list[StepPlan]
    pools = (LIMITS.kv_tokens // BLOCK_SIZE, 0, BLOCK_SIZE)
    touched = 0

    @property
    def rank_specs(self) -> list[RankSpec]:
        spec = rank_spec_of(tiny_model("llama"), BLOCK_SIZE, 1)
        return [spec._replace(stage=stage, weight_bytes=500, block_bytes=32) for stage in range(2)]

    def touch(self, blocks: Sequence[int]) -> None:
        self.touched += len(blocks)

    def transfers(self, seconds: float) -> dict[Direction, Transfer]:
        return {Direction.OUT: Transfer(1e-5, 2e-6), Direction.IN: Transfer(1e-5, 3e-6)}

    def submit(self, plan: StepPlan, now: float) -> Any:
        self.plans.append(plan)
        result = super().submit(plan, now).result()
        slow = 1.0 if len(self.plans) % 3 == 2 else 2.0
        seconds = STEP_TIMES.step(StepShape.of(plan.slices)) * slow
        stages = (StageTime(0.75 * seconds, 0.0), StageTime(0.25 * seconds, 0.0))
        return _FixedResult(replace(result, seconds=seconds, stages=stages))


def test_pipelines_are_profiled_with_all_stages_busy() -> None:
    executor = thread_executor(1, 2, "llama", device_blocks=FixedTimeRanks.pools[0])
    executor.__class__ = FixedTimeRanks
    assert isinstance(executor, FixedTimeRanks)
    executor.plans = []
    model = tiny_model("llama")
    key = profile_key("some/model", model.config, executor.rank_specs, "1.2.3")
    assert (key.tp, key.pp) == (1, 2)
    effort = Effort(30.0, 0.05)
    shown: dict[str, Any] = {"host_s": 0.0, "on_progress": lambda what, share: None}
    profile = measure_profile(executor, model.config, key, LIMITS, effort, **shown)
    executor.close()
    assert executor.touched == FixedTimeRanks.pools[0]
    thrice = [executor.plans[number : number + 3] for number in range(0, len(executor.plans), 3)]
    assert all(one is two is three for one, two, three in thrice)
    assert profile.stage_shares == pytest.approx((0.75, 0.25))
    assert profile.cost.step(StepShape(prefill=64)) == pytest.approx(STEP_TIMES.step(StepShape(prefill=64)), rel=1e-3)
    assert (profile.weight_bytes, profile.kv_bytes_per_block) == (1000, 64)
    assert profile.cost.block == 3e-6
