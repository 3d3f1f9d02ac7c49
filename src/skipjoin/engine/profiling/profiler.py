from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from skipjoin.config.profile import FitErrors, Profile, ProfileKey, Sample, Transfer
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Slice, StepPlan, StepShape
from skipjoin.engine.profiling.cases import Case, Limits, SliceShapes, cases
from skipjoin.engine.profiling.guess import guess_cost
from skipjoin.exec.fit import cost_errors, fit_cost
from skipjoin.exec.rank_spec import ModelExecutor, RankSpec, by_stage
from skipjoin.exec.sampling import Sampling
from skipjoin.model.config import ModelConfig
from skipjoin.policies.cost import LinearCost, scaled
from skipjoin.sampling import SamplingParams
from skipjoin.system.machine import cpu_name

# Called with the current activity and its completed fraction, in [0, 1].
OnProgress = Callable[[str, float], None]

_PER_KIND = 12
# Minimum number of runs of a step after its warm-up run.
_FEWEST_RUNS = 6
# Steps without a run once this fraction of the time has passed are skipped: half as many steps, each measured several
# times, give a better fit than all of them measured once.
_NEW_STEPS_SHARE = 0.3
# Maximum fraction of the remaining time for one run.
_RUN_SHARE = 0.25
# All runs of a step may take this multiple of its fair share of the time: long steps get fewer runs.
_FAIR_PARTS = 2
# With fewer measured shapes than this for five coefficients, the estimate is scaled instead of fitted.
_FEWEST_SHAPES = 8
# Runs longer than this multiple of the median are clipped to it, as outliers.
_HICCUP = 3.0
# Size of the KV that measured steps read: larger than caches, so that it comes from memory.
_KV_BYTES = 256 << 20
# Transfer size in blocks for deciding which direction is slower.
_COMPARED_BLOCKS = 16
# Fraction of the time for measuring transfers.
_TRANSFER_SHARE = 0.1

# Model attributes that do not affect step times.
_NOT_SHAPE = ("eos_token_ids", "dtype_name")


class Effort(NamedTuple):
    seconds: float
    precision: float


# Used by an idle server without a profile, and for `skipjoin profile`.
FIRST_START = Effort(20.0, 0.05)
THOROUGH_PRECISION = 0.03


class _Measured(NamedTuple):
    shape: StepShape
    seconds: float
    mean: float
    shares: tuple[float, ...]
    runs: int
    held_out: bool


def profile_key(name: str, config: ModelConfig, rank_specs: Sequence[RankSpec], version: str) -> ProfileKey:
    spec, stages = rank_specs[0], by_stage(rank_specs)
    return ProfileKey(
        model=Path(name).resolve().name if Path(name).exists() else name,
        shape=shape_hash(config),
        device_kind=spec.device_kind,
        device=spec.device,
        threads=spec.threads,
        dtype=spec.dtype,
        kv_cache_dtype=spec.kv_cache_dtype,
        swap_dtype=spec.swap_dtype,
        attention=spec.attention,
        operators=spec.operators,
        tp=len(stages[0]),
        pp=len(stages),
        version=version,
    )


def shape_hash(config: ModelConfig) -> str:
    values = {name: value for name, value in dataclasses.asdict(config).items() if name not in _NOT_SHAPE}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


class Measurement:
    """Measures steps one run at a time, so that requests can be served in between, and fits a cost model to them.

    In a pipeline, each stage is measured while the others are busy.
    """

    def __init__(self, executor: ModelExecutor, limits: Limits, effort: Effort) -> None:
        self._executor, self._precision, self._vocab_size = executor, effort.precision, limits.vocab_size
        self._times: dict[Case, list[float]] = {case: [] for case in cases(limits, _PER_KIND)}
        self._stages: dict[Case, list[tuple[float, ...]]] = {case: [] for case in self._times}
        self._clock = _Clock(effort.seconds)
        self._shapes: dict[Case, StepShape] = {}
        self._blocks: Sequence[int] = ()
        self._plans: dict[Case, StepPlan] = {}
        self._cases = self._remaining()
        self._next = next(self._cases, None)

    @property
    def share(self) -> float:
        return 1.0 if self._next is None else min(1.0, self._clock.share)

    @property
    def is_done(self) -> bool:
        return self._next is None

    def run(self, blocks: Sequence[int]) -> None:
        """Run the next step in KV blocks that hold nothing."""
        case = self._next
        assert case is not None, "the measurement is done"
        if blocks != self._blocks:
            self._executor.touch([*{*blocks}.difference(self._blocks)])
            self._blocks, self._plans = blocks, {}
        if (plan := self._plans.get(case)) is None:
            plan = self._plans[case] = _plan(case.slices, self._executor.pools[-1], blocks, self._vocab_size)
            self._shapes[case] = StepShape.of(plan.slices)
        began = time.perf_counter()
        self._stages[case].append(_run(self._executor, plan))
        for slice_ in plan.slices:
            self._executor.on_finished(slice_.request)
        runs = self._times[case]
        runs.append(sum(self._stages[case][-1]))
        self._clock.note(_tokens(case), runs, time.perf_counter() - began)
        self._next = next(self._cases, None)

    def profile(
        self, config: ModelConfig, key: ProfileKey, transfers: Mapping[Direction, Transfer], host_s: float
    ) -> Profile:
        rank_specs, block_size = self._executor.rank_specs, self._executor.pools[-1]
        # The first run is a warm-up and counts only if there is no other. Interference only adds time, so the lower
        # quartile is closer to the step's own time than the median.
        steps = [
            _measured(self._shapes[case], runs[1:] or runs, case.held_out)
            for case, runs in self._stages.items()
            if runs
        ]
        fit, errors = _fit_steps(steps, guess_cost(rank_specs, block_size))
        # The fit uses undisturbed times, for the relative costs of steps. Scaled by the disturbance seen in these runs,
        # it predicts mean times.
        unrest = statistics.median(step.mean / step.seconds for step in steps)
        slower = max(transfers.values(), key=lambda transfer: transfer.floor + transfer.block * _COMPARED_BLOCKS)
        return Profile(
            key=key,
            cost=dataclasses.replace(scaled(fit, unrest), block=slower.block, transfer_floor=slower.floor),
            transfer_out=transfers[Direction.OUT],
            transfer_in=transfers[Direction.IN],
            unrest=unrest,
            host_s=host_s,
            block_size=block_size,
            kv_bytes_per_block=sum(spec.block_bytes for spec in rank_specs),
            cpu_bytes_per_block=sum(spec.cpu_block_bytes for spec in rank_specs),
            weight_bytes=sum(spec.weight_bytes for spec in rank_specs),
            state_bytes=sum(spec.state_bytes for spec in rank_specs),
            vocab_size=config.vocab_size,
            max_positions=config.max_positions,
            stage_shares=tuple(np.mean([step.shares for step in steps], axis=0).tolist()),
            errors=errors,
            samples=tuple(Sample(*step.shape, step.seconds, step.runs, step.held_out) for step in steps),
            machine=_machine(rank_specs[0].device_kind),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _remaining(self) -> Iterator[Case]:
        has_run = True
        while has_run and _imprecision(self._times.values()) > self._precision:
            has_run = False
            for case, runs in self._times.items():
                if self._clock.allows(_tokens(case), runs):
                    has_run = True
                    yield case


def measure_profile(
    executor: ModelExecutor,
    config: ModelConfig,
    key: ProfileKey,
    limits: Limits,
    effort: Effort,
    *,
    host_s: float,
    on_progress: OnProgress,
) -> Profile:
    """Measure steps and transfers while no engine runs."""
    began = time.perf_counter()
    transfers = executor.transfers(effort.seconds * _TRANSFER_SHARE)
    seconds = effort.seconds - (time.perf_counter() - began)
    measurement = Measurement(executor, limits, effort._replace(seconds=seconds))
    blocks = range(used_blocks(executor, limits))
    what = f"measuring step costs (up to {seconds:.0f} s)"
    while not measurement.is_done:
        measurement.run(blocks)
        on_progress(what, measurement.share)
    return measurement.profile(config, key, transfers, host_s)


# -- steps ----------------------------------------------------------------------------------------------------------


class _Clock:
    def __init__(self, budget_s: float) -> None:
        self._budget = max(1e-9, budget_s)
        self._used = 0.0
        self._heaviest, self._heaviest_s = 0, 0.0
        self._steps = 0

    @property
    def share(self) -> float:
        return self._used / self._budget

    def allows(self, tokens: int, runs: Sequence[float]) -> bool:
        if not self._steps:
            return True
        share = self.share
        if not runs:
            # Later runs of larger steps may lower the estimate, so the step is reconsidered in the next round.
            expected = self._heaviest_s * max(1.0, tokens / self._heaviest)
            is_fair = share < _NEW_STEPS_SHARE
        else:
            expected = runs[-1]
            is_fair = sum(runs) + expected < self._budget * _FAIR_PARTS / self._steps
        return is_fair and expected < (1 - share) * self._budget * _RUN_SHARE

    def note(self, tokens: int, runs: Sequence[float], used_s: float) -> None:
        self._used += used_s
        self._steps += len(runs) == 1
        if tokens >= self._heaviest:
            self._heaviest, self._heaviest_s = tokens, runs[-1]


def _tokens(case: Case) -> int:
    return sum(tokens for _, tokens in case.slices)


def _run(executor: ModelExecutor, plan: StepPlan) -> tuple[float, ...]:
    others = executor.rank_specs[-1].stage
    # Keeps all other stages busy while the middle plan is on any stage.
    handles = [executor.submit(plan, 0.0) for _ in range(2 * others + 1)]
    result = [handle.result() for handle in handles][others]
    return tuple(stage.busy for stage in result.stages) or (result.seconds,)


def _measured(shape: StepShape, stages: Sequence[tuple[float, ...]], held_out: bool) -> _Measured:
    runs = np.sum(stages, axis=1)
    quiet, middle = np.quantile(runs, (0.25, 0.5)).tolist()
    medians = np.median(stages, axis=0)
    shares = tuple((medians / medians.sum()).tolist())
    mean = float(np.minimum(runs, _HICCUP * middle).mean())
    return _Measured(shape, quiet, mean, shares, len(runs), held_out)


def _imprecision(times: Iterable[Sequence[float]]) -> float:
    return statistics.median([_spread(runs[1:]) for runs in times if runs] or [math.inf])


def _spread(runs: Sequence[float]) -> float:
    if len(runs) < _FEWEST_RUNS:
        return math.inf
    low, middle, high = np.quantile(runs, (0.25, 0.5, 0.75)).tolist()
    spread: float = (high - low) / middle / math.sqrt(len(runs))
    return spread


def used_blocks(executor: ModelExecutor, limits: Limits) -> int:
    blocks, _, block_size = executor.pools
    block_bytes = sum(spec.block_bytes for spec in executor.rank_specs)
    return min(blocks, max(_KV_BYTES // block_bytes, -(-limits.positions // block_size)))


def _plan(shapes: SliceShapes, block_size: int, usable: Sequence[int], vocab_size: int) -> StepPlan:
    sampling = Sampling(SamplingParams(temperature=0), 0, ())
    slices, next_block = [], 0
    for number, (start, tokens) in enumerate(shapes):
        blocks = -(-(start + tokens) // block_size)
        table = tuple(usable[(next_block + index) % len(usable)] for index in range(blocks))
        next_block += blocks
        # Different tokens use different experts.
        ids = [(number + position) % vocab_size for position in range(start + tokens)]
        request = Request(number, 0.0, ids, 1, sampling=sampling)
        slices.append(Slice(request, start, tokens, samples=True, awaits=False, blocks=table))
    return StepPlan(0, tuple(slices))


def _fit_steps(steps: Sequence[_Measured], guess: LinearCost) -> tuple[LinearCost, FitErrors]:
    fitted = [step for step in steps if not step.held_out]
    held_out = [step for step in steps if step.held_out]
    if len(fitted) < _FEWEST_SHAPES:
        cost = scaled(guess, statistics.median(step.seconds / guess.step(step.shape) for step in steps))
    else:
        cost = fit_cost(
            [step.shape for step in fitted],
            [step.seconds for step in fitted],
            expert_part=guess.expert_part,
            expert_use=guess.expert_use,
        )
    assessed = held_out or fitted
    errors = cost_errors(cost, [step.shape for step in assessed], [step.seconds for step in assessed])
    median, p95 = np.quantile(errors, (0.5, 0.95)).tolist()
    return cost, FitErrors(median, p95, len(fitted), len(held_out))


# -- the machine ----------------------------------------------------------------------------------------------------


def _machine(device_kind: str) -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    described = {
        "cpu": cpu_name(),
        "cores": str(os.cpu_count()),
        "memory_gib": f"{memory / 2**30:.1f}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device_kind == "cuda":
        described["gpu_memory_gib"] = (
            f"{torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 2**30:.1f}"
        )
    return described
