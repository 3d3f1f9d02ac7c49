from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from skipjoin.config import ConfigError, EngineConfig, bytes_per_s
from skipjoin.config.profile import Profile, ProfileKey, cached_profile, read_profile
from skipjoin.core.engine import EngineCore
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.step import StepShape
from skipjoin.engine.driver import StepDriver
from skipjoin.engine.load import Loaded, load
from skipjoin.engine.profiling.calibration import Calibration, fit
from skipjoin.engine.profiling.cases import Limits
from skipjoin.engine.profiling.guess import GUESS_DOUBT, guess_cost
from skipjoin.engine.profiling.profiler import Effort, measure_profile
from skipjoin.engine.scheduling import depth_of, make_scheduler, recipe_settings
from skipjoin.exec.rank_model import OnProgress
from skipjoin.exec.rank_spec import ModelExecutor, by_stage
from skipjoin.exec.sampling import Sampling
from skipjoin.policies.cost import LearningCost, LinearCost, with_link_limit
from skipjoin.recipes import build
from skipjoin.sampling import SamplingParams

_log = logging.getLogger(__name__)
# Steps and requests for measuring the engine's CPU overhead, and the maximum fraction of the measurement.
_HOST_STEPS, _HOST_REQUESTS, _HOST_SHARE = 48, 16, 0.05
# Time of the same steps at a start without a profile.
_START_S = 0.2


def profile_model(config: EngineConfig, effort: Effort, on_progress: OnProgress = lambda what, share: None) -> Profile:
    loaded = load(config, on_progress)
    try:
        return measure(loaded, config, effort, on_progress)
    finally:
        loaded.executor.close()


def start_cost(config: EngineConfig, loaded: Loaded) -> tuple[LearningCost, Calibration | None]:
    """Return a cost model, from a profile or a guess, and what measures it while the engine idles, where needed."""

    def limited(cost: LinearCost) -> LinearCost:
        if (limit := bytes_per_s(config.swap_bandwidth_gbps)) is None:
            return cost
        stages = by_stage(loaded.executor.rank_specs)
        return with_link_limit(cost, sum(max(spec.cpu_block_bytes for spec in stage) / limit for stage in stages))

    def cost_of(profile: Profile) -> LinearCost:
        return limited(profile.cost_for(config.block_size))

    if config.profile not in ("auto", "off"):
        profile = read_profile(Path(config.profile))
        _check_profile(profile, loaded.key, config.profile)
        return LearningCost(cost_of(profile)), None
    found = cached_profile(loaded.key) if config.profile == "auto" else None
    if found is not None:
        if not found.is_poor:
            return LearningCost(cost_of(found)), None
        _log.info("step costs are those of an earlier start, and are measured again while idle: %s", fit(found))
        calibration = Calibration(loaded, _limits(config, loaded), cost_of, host_s=found.host_s, before=found)
        return LearningCost(cost_of(found)), calibration
    cost = LearningCost(limited(guess_cost(loaded.executor.rank_specs, config.block_size)), doubt=GUESS_DOUBT)
    if config.profile == "off":
        return cost, None
    _log.info("step costs are estimated from the first steps, and measured while idle")
    host_s = _host_seconds(config, loaded.executor, time.perf_counter() + _START_S, cost.learn)
    return cost, Calibration(loaded, _limits(config, loaded), cost_of, host_s=host_s)


def measure(
    loaded: Loaded, config: EngineConfig, effort: Effort, on_progress: OnProgress = lambda what, share: None
) -> Profile:
    """Measure costs, once again if the fit is poor. Writes into KV blocks, so no engine may be running."""
    profile = _measure(loaded, config, effort, on_progress)
    if profile.is_poor:
        _log.warning("the step costs are measured again: %s", fit(profile))
        profile = min(profile, _measure(loaded, config, effort, on_progress), key=lambda fit: fit.errors.median)
    return profile


def _measure(loaded: Loaded, config: EngineConfig, effort: Effort, on_progress: OnProgress) -> Profile:
    began = time.perf_counter()
    host_s = _host_seconds(config, loaded.executor, began + effort.seconds * _HOST_SHARE)
    left = effort._replace(seconds=effort.seconds - (time.perf_counter() - began))
    limits = _limits(config, loaded)
    return measure_profile(
        loaded.executor, loaded.config, loaded.key, limits, left, host_s=host_s, on_progress=on_progress
    )


def _limits(config: EngineConfig, loaded: Loaded) -> Limits:
    blocks, _, block_size = loaded.executor.pools
    return Limits(
        tokens=config.max_num_batched_tokens,
        requests=config.max_num_seqs,
        positions=min(loaded.max_len, blocks * block_size),
        kv_tokens=blocks * block_size,
        vocab_size=loaded.config.vocab_size,
    )


def _host_seconds(
    config: EngineConfig,
    executor: ModelExecutor,
    deadline: float,
    on_step: Callable[[StepShape, float], object] = lambda shape, seconds: None,
) -> float:
    """Measure the engine's CPU seconds per decode step that overlap with no other step."""
    cost = guess_cost(executor.rank_specs, config.block_size)
    policies = build(config.recipe, recipe_settings(config, cost), config.recipe_params)
    kv = KVLedger(executor.pools[0], 0, config.block_size, states=executor.states)
    # Stages do not hide CPU time from each other, and their seconds are sums over all stages.
    depth = depth_of(config, executor) if config.pipeline_parallel_size == 1 else 1
    core = EngineCore(make_scheduler(config, policies, kv, depth))
    tokens = max(1, min(_HOST_STEPS, core.largest_request - 1))
    sampling = Sampling(SamplingParams(temperature=0, max_tokens=tokens), 0, ())
    for number in range(min(_HOST_REQUESTS, config.max_num_seqs)):
        core.add(Request(number, 0.0, [0], tokens, sampling=sampling), 0.0)
    times: list[float] = []
    driver = StepDriver(core, executor, time.perf_counter)
    begin = time.perf_counter()
    while not times or ((core.requests or driver.in_flight) and time.perf_counter() < deadline):
        result = driver.turn()
        core.take_events()
        assert result is not None, "requests are left, but no plan is in flight"
        on_step(StepShape.of(result.plan.slices), result.seconds)
        before, begin = begin, time.perf_counter()
        times.append(begin - before - result.seconds)
    for handle in driver.in_flight:
        handle.result()
    for request_id in tuple(core.requests):
        core.abort(request_id, time.perf_counter())
    return max(0.0, statistics.median(times))


def _check_profile(profile: Profile, key: ProfileKey, name: str) -> None:
    for field, what in (
        ("shape", "model"),
        ("dtype", "dtype"),
        ("kv_cache_dtype", "kv_cache_dtype"),
        ("device_kind", "device"),
    ):
        theirs, ours = getattr(profile.key, field), getattr(key, field)
        if theirs != ours:
            if field == "shape":
                theirs, ours = profile.key.model, f"{key.model}, which has another shape"
            raise ConfigError(f"profile {name} is of {what} {theirs}, but the engine runs {ours}")
    for field in ("device", "threads", "swap_dtype", "attention", "operators", "tp", "pp"):
        theirs, ours = getattr(profile.key, field), getattr(key, field)
        if theirs != ours:
            _log.warning("profile %s was measured with %s %s, but the engine uses %s", name, field, theirs, ours)
