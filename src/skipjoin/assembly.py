"""From a configuration to a running engine: the one place that knows all the parts."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from skipjoin import __version__
from skipjoin.builtin import MODEL_NAME, builtin_model_path
from skipjoin.config import ConfigError, EngineConfig
from skipjoin.core.engine import EngineCore
from skipjoin.core.kv import KVLedger
from skipjoin.core.policy import CostModel, Policies
from skipjoin.core.request import Request
from skipjoin.core.scheduler import Scheduler
from skipjoin.exec.base import Handle, RankError
from skipjoin.exec.cases import Limits
from skipjoin.exec.graphs import graph_bytes, ladder, record_graphs
from skipjoin.exec.guess import guess_cost
from skipjoin.exec.local import LocalExecutor
from skipjoin.exec.memory import LargestStep, measure_peak
from skipjoin.exec.part import ModelExecutor, Part, Room, make_store, part_of, room_of
from skipjoin.exec.profiler import FIRST_START, Effort, measure_profile, profile_key
from skipjoin.exec.sampling import Sampling
from skipjoin.model.config import ModelConfig
from skipjoin.model.loader import load_model, resolve_folder
from skipjoin.model.parallel import check_shards
from skipjoin.policies.cost import LearningCost, LinearCost
from skipjoin.policies.predictors import MaxTokens
from skipjoin.policies.pressure import Swap
from skipjoin.policies.starvation import Extremes, least_bound, most_requests, starvation_after, starvation_within
from skipjoin.pools import device_blocks, host_blocks
from skipjoin.profile import Profile, ProfileKey, cache_path, cached_profile, one_at_a_time, read_profile, write_profile
from skipjoin.recipes import RECIPES, Settings, build
from skipjoin.sampling import SamplingParams

if TYPE_CHECKING:
    from skipjoin.exec.ranks import RankedExecutor

# Called with (what is being done, share done between 0 and 1).
Progress = Callable[[str, float], None]

_log = logging.getLogger(__name__)
# Steps and requests in them that the engine's own time is measured on, and the share of the measuring they may take.
_HOST_STEPS, _HOST_REQUESTS, _HOST_SHARE = 48, 16, 0.05


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What there is to know about an assembled engine.

    folder: where model and tokenizer lie. max_model_len: most tokens of prompt and output together.
    device_blocks, host_blocks: KV blocks of block_size tokens and block_bytes bytes on each tier. weight_bytes: size of
    the weights. Both over all ranks.
    cost: what the scheduler takes steps to cost; it learns from those that run. starvation_s: seconds without running
    after which recipes that promote do so.
    """

    model: str
    folder: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device_blocks: int
    host_blocks: int
    block_size: int
    block_bytes: int
    recipe: str
    dtype: str
    device: str
    weight_bytes: int
    cost: LearningCost
    starvation_s: float


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts that a driver needs. seed: from which requests without a seed draw theirs."""

    core: EngineCore
    executor: ModelExecutor
    info: EngineInfo
    seed: int


def model_folder(name: str, load_format: str = "auto") -> Path:
    """The folder of a model: the built-in one by its name, a path, or a hub id, of which "dummy" fetches no weights.
    Raises `ModelError`."""
    return builtin_model_path() if name == MODEL_NAME else resolve_folder(name, weights=load_format != "dummy")


def assemble(config: EngineConfig, on_progress: Progress = lambda what, share: None) -> Engine:
    """Load the model, size the KV pools, learn what steps cost, build the scheduler.

    Raises `ModelError` for a model that cannot be used and `ConfigError` for a setting that cannot be met.
    """
    if config.recipe not in RECIPES:
        raise ConfigError(f"recipe must be one of {', '.join(sorted(RECIPES))}, got {config.recipe!r}")
    loaded = load(config, on_progress)
    try:
        return engine_around(loaded, config, on_progress)
    except BaseException:
        loaded.executor.close()
        raise


def engine_around(loaded: Loaded, config: EngineConfig, on_progress: Progress = lambda what, share: None) -> Engine:
    """An engine on a model that is loaded, with all of its KV pools. config: as it was loaded with, but for what
    concerns the scheduler. Engines that follow each other may share a model, each when the one before it is idle.

    Raises `ConfigError`.
    """
    executor = loaded.executor
    blocks, host_blocks, block_size = executor.pools
    cost = LearningCost(_start_cost(config, loaded, on_progress))
    settings = _settings(config, loaded, cost)
    ledger = KVLedger(blocks, host_blocks, block_size)
    scheduler = _scheduler(config, build(config.recipe, settings), ledger, _depth(config, executor))
    part = executor.parts[0]
    info = EngineInfo(
        model=config.model,
        folder=str(loaded.folder),
        max_model_len=loaded.max_len,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=loaded.config.eos_token_ids,
        device_blocks=blocks,
        host_blocks=host_blocks,
        block_size=block_size,
        block_bytes=sum(part.block_bytes for part in executor.parts),
        recipe=config.recipe,
        dtype=part.dtype,
        device=part.device_kind,
        weight_bytes=sum(part.weight_bytes for part in executor.parts),
        cost=cost,
        starvation_s=settings.starvation_s,
    )
    return Engine(EngineCore(scheduler), executor, info, config.seed)


def _depth(config: EngineConfig, executor: ModelExecutor) -> int:
    """Plans in flight."""
    return config.plans_in_flight(executor.parts[0].device_kind)


def _scheduler(config: EngineConfig, policies: Policies, kv: KVLedger, depth: int) -> Scheduler:
    # Which token a stage samples, the stage that embeds it learns with the next plan.
    return Scheduler(policies, kv, depth=depth, overlap=config.pipeline_parallel_size == 1)


def _plain_settings(config: EngineConfig, cost: CostModel) -> Settings:
    """What the recipe is built from, as far as it is said."""
    predictor = MaxTokens() if config.oracle == "max-tokens" else None
    return Settings(
        cost,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        quantum_s=config.quantum_s,
        predictor=predictor,
        stages=config.pipeline_parallel_size,
    )


def _settings(config: EngineConfig, loaded: Loaded, cost: LearningCost) -> Settings:
    """What the recipe is built from. Raises `ConfigError` for a bound on waiting that cannot be kept."""
    settings = _plain_settings(config, cost)
    if config.starvation_bound_s is None:
        alpha = starvation_after(config.slo_s) if config.starvation_s is None else config.starvation_s
        return replace(settings, starvation_s=alpha)
    bound, most = config.starvation_bound_s, _extremes(config, loaded, settings)
    if bound < (least := least_bound(most)):
        fits = most_requests(bound, most)
        hint = f"it would hold with max_num_queued_reqs <= {fits}" if fits else "a smaller max_model_len may help"
        raise ConfigError(
            f"starvation_bound_s must be at least {math.ceil(least * 10) / 10:.1f} s "
            f"with max_num_queued_reqs {most.requests}, got {bound:g}; {hint}"
        )
    return replace(settings, starvation_s=starvation_within(bound, most), paced=False)


def _extremes(config: EngineConfig, loaded: Loaded, settings: Settings) -> Extremes:
    """The most that can come together in this engine."""
    if config.max_live_requests is None:
        raise ConfigError("starvation_bound_s needs max_live_requests, which the server sets to max_num_queued_reqs")
    pressure = build(config.recipe, settings).pressure
    blocks, host_blocks, block_size = loaded.executor.pools
    return Extremes(
        settings.cost,
        requests=config.max_live_requests,
        max_len=loaded.max_len,
        max_seqs=settings.max_seqs,
        max_tokens=settings.max_tokens,
        device_blocks=blocks,
        host_blocks=host_blocks if isinstance(pressure, Swap) else 0,
        block_size=block_size,
        depth=_depth(config, loaded.executor),
        moves_beside=pressure.returns_beside,
        stages=config.pipeline_parallel_size,
    )


def profile_model(config: EngineConfig, effort: Effort, on_progress: Progress = lambda what, share: None) -> Profile:
    """Load the model and measure what steps and transfers cost. Raises as `assemble` does."""
    loaded = load(config, on_progress)
    try:
        return measure(loaded, config, effort, on_progress)
    finally:
        loaded.executor.close()


class Loaded(NamedTuple):
    """A model that can run. folder: where it lies. max_len: most tokens of prompt and output together. key: of its
    profile. Whoever loads it closes its executor."""

    folder: Path
    config: ModelConfig
    executor: ModelExecutor
    max_len: int
    key: ProfileKey


def load(config: EngineConfig, on_progress: Progress = lambda what, share: None) -> Loaded:
    """Load the model and make its KV pools. Raises `ModelError` and `ConfigError` as `assemble` does."""
    folder = model_folder(config.model, config.load_format)
    model_config = ModelConfig.from_folder(folder)
    max_len = _max_model_len(config, model_config)
    check_shards(model_config, config.tensor_parallel_size, config.pipeline_parallel_size)
    executor: ModelExecutor = (_load_ranks if config.is_distributed else _load_here)(
        config, folder, max_len, on_progress
    )
    key = profile_key(config.model, model_config, executor.parts, __version__)
    return Loaded(folder, model_config, executor, max_len, key)


def _load_here(config: EngineConfig, folder: Path, max_len: int, on_progress: Progress) -> LocalExecutor:
    """All of the model in this process."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model = load_model(
        folder,
        dtype=config.dtype,
        device=config.device,
        attention=config.attention,
        load_format=config.load_format,
        progress=lambda done, total: on_progress("loading weights", done / total),
    )
    if model.device.type == "cuda":
        on_progress("tuning kernels", 0.0)
    model.attention.tune(model.config, model.dtype, model.device, config.block_size, model.shard)
    peak = measure_peak(model, _largest_step(config, max_len), config.block_size)
    # Graphs need attention whose grids follow from shapes alone.
    sizes = ladder(config.max_num_seqs) if model.attention.name == "triton" and not config.enforce_eager else []
    room = room_of(model, config.gpu_memory_utilization, peak=peak, graph_bytes=graph_bytes(model, sizes, peak))
    parts = (part_of(model, config.block_size, torch.get_num_threads()),)
    blocks, host_blocks = _pools(config, parts, (room,), max_len)
    store = make_store(model, blocks, host_blocks, config.block_size)
    on_record = partial(on_progress, "recording decode steps")
    graphs = record_graphs(model, store.device, sizes, max_len, on_record) if sizes else None
    return LocalExecutor(model, store, threads=config.threads, graphs=graphs)


def _load_ranks(config: EngineConfig, folder: Path, max_len: int, on_progress: Progress) -> RankedExecutor:
    """The model on ranks that Ray places. Raises `ConfigError` for a cluster that cannot have them."""
    # What ranks need, Ray and its messages, an engine in one process can do without.
    from skipjoin.exec.cluster import ClusterError  # noqa: PLC0415
    from skipjoin.exec.rank_actor import RankModel  # noqa: PLC0415
    from skipjoin.exec.ranks import GroupSizes, RankedExecutor  # noqa: PLC0415

    model = RankModel(
        folder=str(folder),
        dtype=config.dtype,
        device=config.device,
        attention=config.attention,
        load_format=config.load_format,
        threads=config.threads,
        block_size=config.block_size,
        gpu_share=config.gpu_memory_utilization,
        largest=_largest_step(config, max_len),
    )
    sizes = GroupSizes(config.tensor_parallel_size, config.pipeline_parallel_size)
    try:
        return RankedExecutor(
            model,
            sizes,
            lambda parts, rooms: _pools(config, parts, rooms, max_len),
            address=config.ray_address,
            max_restarts=config.max_restarts,
            on_progress=on_progress,
        )
    except (ClusterError, RankError) as error:
        raise ConfigError(str(error)) from error


def _largest_step(config: EngineConfig, max_len: int) -> LargestStep:
    return LargestStep(config.max_num_batched_tokens, config.max_num_seqs, max_len)


def _pools(config: EngineConfig, parts: Sequence[Part], rooms: Sequence[Room], max_len: int) -> tuple[int, int]:
    """KV blocks on the device and on the host."""
    blocks = device_blocks(config, parts, rooms, max_len)
    return blocks, host_blocks(config, parts, rooms, blocks)


def _start_cost(config: EngineConfig, loaded: Loaded, on_progress: Progress) -> LinearCost:
    """What steps cost until steps have told."""
    if config.profile == "off":
        return guess_cost(loaded.executor.parts, config.block_size)
    if config.profile == "auto":
        with one_at_a_time(loaded.key):
            profile = cached_profile(loaded.key)
            if profile is None:
                profile = measure(loaded, config, FIRST_START, on_progress)
                _cache(profile)
    else:
        profile = read_profile(Path(config.profile))
        _check_profile(profile, loaded.key, config.profile)
    return profile.cost_for(config.block_size)


def measure(
    loaded: Loaded, config: EngineConfig, effort: Effort, on_progress: Progress = lambda what, share: None
) -> Profile:
    """What steps and transfers of a loaded model cost. It writes into KV blocks: no engine may be at work."""
    blocks, _, block_size = loaded.executor.pools
    limits = Limits(
        tokens=config.max_num_batched_tokens,
        requests=config.max_num_seqs,
        positions=min(loaded.max_len, blocks * block_size),
        kv_tokens=blocks * block_size,
    )
    began = time.perf_counter()
    host_s = _host_seconds(config, loaded.executor, began + effort.seconds * _HOST_SHARE)
    left = effort._replace(seconds=effort.seconds - (time.perf_counter() - began))
    return measure_profile(
        loaded.executor, loaded.config, loaded.key, limits, left, host_s=host_s, on_progress=on_progress
    )


def _host_seconds(config: EngineConfig, executor: ModelExecutor, deadline: float) -> float:
    """What the engine adds to a decode step: deciding, handing over, settling, as far as none of it is hidden behind
    another step; the median of some steps.

    Writes into KV blocks that nobody holds yet.
    """
    cost = guess_cost(executor.parts, config.block_size)
    policies = build(config.recipe, _plain_settings(config, cost))
    kv = KVLedger(executor.pools[0], 0, config.block_size)
    # Stages hide nothing of it from each other, and their seconds are the sum of all.
    depth = _depth(config, executor) if config.pipeline_parallel_size == 1 else 1
    core = EngineCore(_scheduler(config, policies, kv, depth))
    tokens = max(1, min(_HOST_STEPS, core.largest_request - 1))
    sampling = Sampling(SamplingParams(temperature=0, max_tokens=tokens), 0, ())
    for number in range(min(_HOST_REQUESTS, config.max_num_seqs)):
        core.add(Request(number, 0.0, [0], tokens, sampling=sampling), 0.0)
    times: list[float] = []
    in_flight: deque[Handle] = deque()
    begin = time.perf_counter()
    while not times or ((core.requests or in_flight) and time.perf_counter() < deadline):
        while (plan := core.start_step(begin)) is not None:
            in_flight.append(executor.submit(plan, begin))
        result = in_flight.popleft().result()
        core.finish_step(result, begin)
        core.take_events()
        before, begin = begin, time.perf_counter()
        times.append(begin - before - result.seconds)
    for handle in in_flight:
        handle.result()
    return max(0.0, statistics.median(times))


def _cache(profile: Profile) -> None:
    try:
        write_profile(profile, cache_path(profile.key))
    except ConfigError as error:
        _log.warning("steps will be measured again at the next start: %s", error)


def _check_profile(profile: Profile, key: ProfileKey, name: str) -> None:
    """Refuse a profile of something else; one of another machine of the same kind is better than none."""
    for field, what in (("shape", "model"), ("dtype", "dtype"), ("device_kind", "device")):
        theirs, ours = getattr(profile.key, field), getattr(key, field)
        if theirs != ours:
            if field == "shape":
                theirs, ours = profile.key.model, f"{key.model}, which has another shape"
            raise ConfigError(f"profile {name} is of {what} {theirs}, but the engine runs {ours}")
    for field in ("device", "threads", "attention", "tp", "pp"):
        theirs, ours = getattr(profile.key, field), getattr(key, field)
        if theirs != ours:
            _log.warning("profile %s was measured with %s %s, here it is %s", name, field, theirs, ours)


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    most = model.max_positions
    if config.max_model_len is None:
        return most
    if config.max_model_len > most:
        raise ConfigError(f"max_model_len must be at most the model's {most} positions, got {config.max_model_len}")
    return config.max_model_len
