from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

import torch

from skipjoin.config import ConfigError, EngineConfig, bytes_per_s
from skipjoin.config.profile import ProfileKey
from skipjoin.engine.profiling.profiler import profile_key
from skipjoin.engine.sizing import cpu_blocks, device_blocks
from skipjoin.exec.base import LargestStep, RankError
from skipjoin.exec.graphs import graph_batch_sizes, graph_bytes, record_graphs, replays
from skipjoin.exec.local import LocalExecutor
from skipjoin.exec.memory import measure_peak
from skipjoin.exec.rank_spec import (
    MemoryBudget,
    ModelExecutor,
    RankSpec,
    free_ram,
    make_store,
    memory_budget_of,
    rank_spec_of,
)
from skipjoin.exec.warm_up import warm_up
from skipjoin.model.config import ModelConfig
from skipjoin.model.folder import check_model, model_folder
from skipjoin.model.grammars import grammars_of
from skipjoin.model.loader import load_model, planned_model, read_config
from skipjoin.model.ops.build import will_compile
from skipjoin.model.ops.threads import default_threads
from skipjoin.model.parallel import Shard, check_shards
from skipjoin.version import VERSION

if TYPE_CHECKING:
    from skipjoin.exec.ranks.ranks import RankedExecutor

_GIB = 1 << 30
_COMPILING = "compiling CPU operations, once per machine (up to a minute)"
# Called with the current activity and its completed fraction, in [0, 1].
OnProgress = Callable[[str, float], None]


class Loaded(NamedTuple):
    """A loaded model. The caller of `load` closes the executor."""

    folder: Path
    config: ModelConfig
    executor: ModelExecutor
    max_len: int
    key: ProfileKey


def check_load(config: EngineConfig) -> tuple[ModelConfig, int]:
    """Raise what `load` raises that is known without the weights. Return the model's configuration and context.

    Raises:
        ConfigError: If a setting does not fit the model or the machine.
        ModelError: If the model cannot run.
    """
    model_config = read_config(check_model(config.model, config.load_format, has_tokenizer=False), config.load_format)
    max_len = _max_model_len(config, model_config)
    check_shards(model_config, config.tensor_parallel_size, config.pipeline_parallel_size)
    if config.ray_address is None:
        _check_memory(config, model_config, max_len)
    return model_config, max_len


def _check_memory(config: EngineConfig, model_config: ModelConfig, max_len: int) -> None:
    """Raise `ConfigError` if this machine has too little memory, apart from that of steps."""
    sizes = config.tensor_parallel_size, config.pipeline_parallel_size
    models = [
        planned_model(
            model_config,
            dtype=config.dtype,
            device=config.device,
            attention=config.attention,
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
            batch_invariant=config.batch_invariant,
            shard=Shard.of_rank(rank, *sizes),
        )
        for rank in range(config.ranks)
    ]
    if config.ranks > 1 and models[0].device.type == "cuda":
        return  # each rank has a GPU of its own, which Ray chooses
    threads = default_threads(config.threads)
    specs = [rank_spec_of(model, config.block_size, threads, config.swap_dtype) for model in models]
    total = sum(spec.weight_bytes for spec in specs)
    budgets = [
        memory_budget_of(model, config.gpu_memory_utilization, config.ranks, to_load=spec.weight_bytes)
        for model, spec in zip(models, specs, strict=True)
    ]
    if models[0].device.type == "cpu" and total > (free := free_ram()):
        raise ConfigError(
            f"the weights of {config.model} need {total / _GIB:.1f} GiB, and {free / _GIB:.1f} GiB of memory are free: "
            "end other programs, choose a smaller model, or set dtype bfloat16 or quantization int8"
        )
    _pools(config, specs, budgets, max_len)


def load(config: EngineConfig, on_progress: OnProgress = lambda what, share: None) -> Loaded:
    model_config, max_len = check_load(config)
    folder = model_folder(config.model, config.load_format)
    executor: ModelExecutor = (_load_ranks if config.is_distributed else _load_here)(
        config, folder, max_len, on_progress
    )
    key = profile_key(config.model, model_config, executor.rank_specs, VERSION)
    return Loaded(folder, model_config, executor, max_len, key)


def _load_here(config: EngineConfig, folder: Path, max_len: int, on_progress: OnProgress) -> LocalExecutor:
    threads = default_threads(config.threads)
    torch.set_num_threads(threads)
    grammars = grammars_of(folder, ModelConfig.from_folder(folder))
    # Takes a second for a large vocabulary, with the GIL for most of it.
    loading = Thread(target=grammars.load, daemon=True)
    loading.start()
    compiles = config.device != "cuda" and will_compile()
    if compiles:
        on_progress(_COMPILING, 0.0)
    model = load_model(
        folder,
        dtype=config.dtype,
        device=config.device,
        attention=config.attention,
        load_format=config.load_format,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        progress=lambda done, total: on_progress("loading weights", done / total),
        batch_invariant=config.batch_invariant,
    )
    if compiles:
        on_progress(_COMPILING, 1.0)
    if model.device.type == "cuda":
        on_progress("tuning kernels", 0.0)
    model.attention.tune(model.config, model.dtype, model.device, config.block_size, model.shard)
    largest = _largest_step(config, max_len)
    peak = measure_peak(model, largest, config.block_size)
    sizes = _graph_sizes(config) if replays(model) else ()
    graphs_take = graph_bytes(model, sizes, peak.decodes)
    budget = memory_budget_of(model, config.gpu_memory_utilization, peak=peak.all, graph_bytes=graphs_take)
    rank_specs = (rank_spec_of(model, config.block_size, threads, config.swap_dtype),)
    blocks, cpu_blocks = _pools(config, rank_specs, (budget,), max_len)
    limit = bytes_per_s(config.swap_bandwidth_gbps)
    store = make_store(model, blocks, cpu_blocks, config.block_size, config.swap_dtype, link_bytes_per_s=limit)
    warm_up(model, store.device, largest, partial(on_progress, "compiling kernels"))
    on_record = partial(on_progress, "recording decode steps")
    loading.join()
    graphs = record_graphs(model, store.device, sizes, max_len, on_record) if sizes else None
    # On a CPU, nothing runs well beside the model, which computes on all cores.
    is_deferred = model.device.type == "cpu" and config.plans_in_flight("cpu") == 1
    return LocalExecutor(model, store, threads=threads, graphs=graphs, grammars=grammars, is_deferred=is_deferred)


def _load_ranks(config: EngineConfig, folder: Path, max_len: int, on_progress: OnProgress) -> RankedExecutor:
    # Imported lazily: Ray is optional.
    from skipjoin.exec.ranks.cluster import ClusterError  # noqa: PLC0415
    from skipjoin.exec.ranks.rank_model import RankModel  # noqa: PLC0415
    from skipjoin.exec.ranks.ranks import GroupSizes, RankedExecutor  # noqa: PLC0415

    model = RankModel(
        folder=str(folder),
        dtype=config.dtype,
        device=config.device,
        attention=config.attention,
        load_format=config.load_format,
        quantization=config.quantization,
        threads=config.threads,
        block_size=config.block_size,
        swap_dtype=config.swap_dtype,
        link_bytes_per_s=bytes_per_s(config.swap_bandwidth_gbps),
        kv_cache_dtype=config.kv_cache_dtype,
        gpu_share=config.gpu_memory_utilization,
        largest=_largest_step(config, max_len),
        graph_sizes=_graph_sizes(config),
        batch_invariant=config.batch_invariant,
    )
    sizes = GroupSizes(config.tensor_parallel_size, config.pipeline_parallel_size)
    try:
        return RankedExecutor(
            model,
            sizes,
            lambda rank_specs, budgets: _pools(config, rank_specs, budgets, max_len),
            address=config.ray_address,
            max_restarts=config.max_restarts,
            on_progress=on_progress,
        )
    except (ClusterError, RankError) as error:
        raise ConfigError(str(error)) from error


def _largest_step(config: EngineConfig, max_len: int) -> LargestStep:
    return LargestStep(config.max_num_batched_tokens, config.max_num_seqs, max_len)


def _graph_sizes(config: EngineConfig) -> tuple[int, ...]:
    return () if config.enforce_eager else tuple(graph_batch_sizes(config.max_num_seqs))


def _pools(
    config: EngineConfig, rank_specs: Sequence[RankSpec], budgets: Sequence[MemoryBudget], max_len: int
) -> tuple[int, int]:
    blocks = device_blocks(config, rank_specs, budgets, max_len)
    return blocks, cpu_blocks(config, rank_specs, budgets, blocks)


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    most = model.max_positions
    if config.max_model_len is None:
        return most
    if config.max_model_len > most:
        raise ConfigError(f"max_model_len must be at most the model's {most} positions, got {config.max_model_len}")
    return config.max_model_len
