"""From a configuration to a running engine: the one place that knows all the parts."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from skipjoin import __version__
from skipjoin.builtin import MODEL_NAME, builtin_model_path
from skipjoin.config import ConfigError, EngineConfig
from skipjoin.core.engine import EngineCore
from skipjoin.core.kv import KVLedger
from skipjoin.core.policy import CostModel
from skipjoin.core.request import Request
from skipjoin.core.scheduler import Scheduler
from skipjoin.exec.cases import Limits
from skipjoin.exec.guess import guess_cost
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.local import LocalExecutor
from skipjoin.exec.profiler import FIRST_START, Effort, measure_profile, profile_key
from skipjoin.exec.worker import Sampling
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.loader import load_model, resolve_folder
from skipjoin.policies.cost import LearningCost, LinearCost
from skipjoin.policies.predictors import MaxTokens
from skipjoin.policies.pressure import Swap
from skipjoin.policies.starvation import Extremes, least_bound, most_requests, starvation_after, starvation_within
from skipjoin.profile import Profile, ProfileKey, cache_path, cached_profile, read_profile, write_profile
from skipjoin.recipes import RECIPES, Settings, build
from skipjoin.sampling import SamplingParams

# Called with (what is being done, share done between 0 and 1).
Progress = Callable[[str, float], None]

_log = logging.getLogger(__name__)
_GIB = 1 << 30
# Steps and requests in them that the engine's own time is measured on, and the share of the measuring they may take.
_HOST_STEPS, _HOST_REQUESTS, _HOST_SHARE = 48, 16, 0.05
# Share of free memory that the KV pool takes on a CPU, where other programs live beside us, and its most.
_CPU_SHARE, _CPU_MOST = 0.25, 8 * _GIB
# The same of the host pool; and the RAM that it must leave to the engine's own needs and to other programs.
_SWAP_SHARE, _SWAP_MOST, _SWAP_SPARE = 0.25, 4 * _GIB, 1 * _GIB


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What there is to know about an assembled engine.

    folder: where model and tokenizer lie. max_model_len: most tokens of prompt and output together.
    device_blocks, host_blocks: KV blocks of block_size tokens on each tier. weight_bytes: size of the weights.
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
    executor: LocalExecutor
    info: EngineInfo
    seed: int


def model_folder(name: str) -> Path:
    """The folder of a model: the built-in one by its name, a path, or a hub id. Raises `ModelError`."""
    return builtin_model_path() if name == MODEL_NAME else resolve_folder(name)


def assemble(config: EngineConfig, on_progress: Progress = lambda what, share: None) -> Engine:
    """Load the model, size the KV pools, learn what steps cost, build the scheduler.

    Raises `ModelError` for a model that cannot be used and `ConfigError` for a setting that cannot be met.
    """
    if config.recipe not in RECIPES:
        raise ConfigError(f"recipe must be one of {', '.join(sorted(RECIPES))}, got {config.recipe!r}")
    loaded = _load(config, on_progress)
    executor, store = loaded.executor, loaded.executor.store
    blocks, host_blocks = store.device.num_blocks, store.host.num_blocks if store.host else 0
    cost = LearningCost(_start_cost(config, loaded, on_progress))
    settings = _settings(config, loaded, cost)
    scheduler = Scheduler(
        build(config.recipe, settings),
        KVLedger(blocks, host_blocks, config.block_size),
        depth=config.pipeline_depth,
        overlap=config.pipeline_depth > 1,
    )
    model = executor.model
    info = EngineInfo(
        model=config.model,
        folder=str(loaded.folder),
        max_model_len=loaded.max_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.config.eos_token_ids,
        device_blocks=blocks,
        host_blocks=host_blocks,
        block_size=config.block_size,
        recipe=config.recipe,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        weight_bytes=model.weight_bytes,
        cost=cost,
        starvation_s=settings.starvation_s,
    )
    return Engine(EngineCore(scheduler), executor, info, config.seed)


def _plain_settings(config: EngineConfig, cost: CostModel) -> Settings:
    """What the recipe is built from, as far as it is said."""
    predictor = MaxTokens() if config.oracle == "max-tokens" else None
    return Settings(
        cost, config.max_num_seqs, config.max_num_batched_tokens, quantum_s=config.quantum_s, predictor=predictor
    )


def _settings(config: EngineConfig, loaded: _Loaded, cost: LearningCost) -> Settings:
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


def _extremes(config: EngineConfig, loaded: _Loaded, settings: Settings) -> Extremes:
    """The most that can come together in this engine."""
    if config.max_live_requests is None:
        raise ConfigError("starvation_bound_s needs max_live_requests, which the server sets to max_num_queued_reqs")
    pressure, store = build(config.recipe, settings).pressure, loaded.executor.store
    return Extremes(
        settings.cost,
        requests=config.max_live_requests,
        max_len=loaded.max_len,
        max_seqs=settings.max_seqs,
        max_tokens=settings.max_tokens,
        device_blocks=store.device.num_blocks,
        host_blocks=store.host.num_blocks if store.host and isinstance(pressure, Swap) else 0,
        block_size=config.block_size,
        depth=config.pipeline_depth,
        moves_beside=pressure.returns_beside,
    )


def profile_model(config: EngineConfig, effort: Effort, on_progress: Progress = lambda what, share: None) -> Profile:
    """Load the model and measure what steps and transfers cost. Raises as `assemble` does."""
    loaded = _load(config, on_progress)
    try:
        return _measure(config, loaded, effort, on_progress)
    finally:
        loaded.executor.close()


class _Loaded(NamedTuple):
    """A model that can run. max_len: most tokens of prompt and output together."""

    folder: Path
    executor: LocalExecutor
    max_len: int
    key: ProfileKey


def _load(config: EngineConfig, on_progress: Progress) -> _Loaded:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folder = model_folder(config.model)
    device = _device(config.device)
    model = load_model(
        folder,
        dtype=config.dtype,
        device=device,
        attention=config.attention,
        progress=lambda done, total: on_progress("loading weights", done / total),
    )
    max_len = _max_model_len(config, model)
    blocks = _device_blocks(config, model, max_len)
    store = KVStore(
        model.config,
        model.dtype,
        model.device,
        device_blocks=blocks,
        host_blocks=_host_blocks(config, model, blocks),
        block_size=config.block_size,
        shard=model.shard,
    )
    executor = LocalExecutor(model, store, threads=config.threads)
    return _Loaded(folder, executor, max_len, profile_key(config.model, model, __version__))


def _start_cost(config: EngineConfig, loaded: _Loaded, on_progress: Progress) -> LinearCost:
    """What steps cost until steps have told."""
    model = loaded.executor.model
    if config.profile == "off":
        return guess_cost(model, config.block_size)
    if config.profile == "auto":
        profile = cached_profile(loaded.key)
        if profile is None:
            profile = _measure(config, loaded, FIRST_START, on_progress)
            _cache(profile)
    else:
        profile = read_profile(Path(config.profile))
        _check_profile(profile, loaded.key, config.profile)
    return profile.cost_for(config.block_size)


def _measure(config: EngineConfig, loaded: _Loaded, effort: Effort, on_progress: Progress) -> Profile:
    store = loaded.executor.store.device
    limits = Limits(
        tokens=config.max_num_batched_tokens,
        requests=config.max_num_seqs,
        positions=min(loaded.max_len, store.num_blocks * store.block_size),
        kv_tokens=store.num_blocks * store.block_size,
    )
    began = time.perf_counter()
    host_s = _host_seconds(config, loaded.executor, began + effort.seconds * _HOST_SHARE)
    left = effort._replace(seconds=effort.seconds - (time.perf_counter() - began))
    return measure_profile(loaded.executor, loaded.key, limits, left, host_s=host_s, on_progress=on_progress)


def _host_seconds(config: EngineConfig, executor: LocalExecutor, deadline: float) -> float:
    """What the engine adds to a decode step: deciding, handing over, settling; the median of some steps.

    Writes into KV blocks that nobody holds yet.
    """
    cost = guess_cost(executor.model, config.block_size)
    policies = build(config.recipe, _plain_settings(config, cost))
    kv = KVLedger(executor.store.device.num_blocks, 0, config.block_size)
    core = EngineCore(Scheduler(policies, kv))
    tokens = max(1, min(_HOST_STEPS, core.largest_request - 1))
    sampling = Sampling(SamplingParams(temperature=0, max_tokens=tokens), 0, ())
    for number in range(min(_HOST_REQUESTS, config.max_num_seqs)):
        core.add(Request(number, 0.0, [0], tokens, sampling=sampling), 0.0)
    times: list[float] = []
    while not times or (core.requests and time.perf_counter() < deadline):
        begin = time.perf_counter()
        plan = core.start_step(begin)
        assert plan is not None
        result = executor.submit(plan, begin).result()
        core.finish_step(result, begin)
        core.take_events()
        times.append(time.perf_counter() - begin - result.seconds)
    return statistics.median(times)


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


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def _max_model_len(config: EngineConfig, model: CausalLM) -> int:
    most = model.config.max_positions
    if config.max_model_len is None:
        return most
    if config.max_model_len > most:
        raise ConfigError(f"max_model_len must be at most the model's {most} positions, got {config.max_model_len}")
    return config.max_model_len


def _device_blocks(config: EngineConfig, model: CausalLM, max_len: int) -> int:
    """Blocks of the KV pool: what memory allows, and never more than all running requests can fill."""
    block_bytes = PagedKV.bytes_per_block(model.config, config.block_size, model.dtype, model.shard)
    one_request = -(-max_len // config.block_size)
    if config.kv_cache_gib is not None:
        blocks = int(config.kv_cache_gib * _GIB) // block_bytes
    else:
        blocks = min(_memory_for_kv(config, model) // block_bytes, one_request * config.max_num_seqs)
    if blocks < one_request:
        need = one_request * block_bytes / _GIB
        raise ConfigError(
            f"the KV pool of {blocks} blocks is too small for one request of {max_len} tokens: "
            f"set kv_cache_gib to at least {need:.4g}, or max_model_len to at most {blocks * config.block_size}"
        )
    return blocks


def _memory_for_kv(config: EngineConfig, model: CausalLM) -> int:
    """Bytes that the KV pool may take. The weights are loaded already."""
    if model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        return max(0, int(free - total * (1 - config.gpu_memory_utilization)))
    return min(_CPU_MOST, int(_free_ram() * _CPU_SHARE))


def _host_blocks(config: EngineConfig, model: CausalLM, device_blocks: int) -> int:
    """Blocks of the host pool: what was asked for, if RAM holds it beside all else, or a share of what is free."""
    block_bytes = PagedKV.bytes_per_block(model.config, config.block_size, model.dtype, model.shard)
    free = _free_ram()
    if model.device.type == "cuda":
        # torch rounds page-locked memory up to a power of two, and all of it is taken at once.
        left = max(0, free - _SWAP_SPARE)
        room, beside = 1 << (left.bit_length() - 1) if left else 0, ", and page-locked memory comes in powers of two"
    else:
        # The device pool lies in RAM too, and takes none of it until blocks are used.
        room = max(0, free - device_blocks * block_bytes - _SWAP_SPARE)
        beside = f", {device_blocks * block_bytes / _GIB:.4g} of them for the KV pool"
    asked = config.swap_space_gib
    if asked is None:
        return min(_SWAP_MOST, int(free * _SWAP_SHARE), room) // block_bytes
    size = int(asked * _GIB)
    if size > room:
        # Rounded towards what works, here and below.
        most = math.floor(room / _GIB * 10) / 10
        have = f"the machine has {free / _GIB:.1f} GiB free{beside}"
        raise ConfigError(f"swap_space_gib must be at most {most:g} ({have}), got {asked:g}")
    if asked > 0 and size < block_bytes:
        least = math.ceil(block_bytes / _GIB * 1e6) / 1e6
        raise ConfigError(f"swap_space_gib must be 0 or at least {least:g}, one KV block, got {asked:g}")
    return size // block_bytes


def _free_ram() -> int:
    """Bytes of RAM that programs can have; what lies in the page cache is theirs when they ask."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return int(amount.split()[0]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
