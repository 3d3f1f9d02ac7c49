from __future__ import annotations

import math
from collections.abc import Sequence

from skipjoin.config import ConfigError, EngineConfig
from skipjoin.core.step import STATE_SHARE, StateSizes
from skipjoin.exec.rank_spec import MemoryBudget, RankSpec
from skipjoin.kv_format import SWAP_FORMATS

_GIB = 1 << 30
# On a CPU, the fraction of free memory for the KV pools, since other programs share it, and their maximum size.
_CPU_SHARE, _CPU_MOST = 0.25, 8 * _GIB
# The same for the CPU tier's pools, and the RAM that stays free for the engine and other programs.
_SWAP_SHARE, _SWAP_MOST, _SWAP_SPARE = 0.25, 4 * _GIB, 1 * _GIB


def state_sizes(config: EngineConfig, spec: RankSpec, budget: MemoryBudget) -> StateSizes | None:
    """Return the slots for a model's states, which take a part of each KV pool, or None."""
    size = spec.state_bytes
    if not size:
        return None
    pool = _usual(spec, budget) if config.kv_cache_gib is None else int(config.kv_cache_gib * _GIB)
    asked = config.swap_space_gib
    found = StateSizes.fitting(
        size,
        pool_bytes=pool,
        swap_bytes=min(_SWAP_MOST, budget.ram * _SWAP_SHARE) if asked is None else asked * _GIB,
        block_bytes=spec.cpu_block_bytes,
        seqs=config.max_num_seqs,
        snapshots=config.state_snapshots if config.enable_prefix_caching else 0,
    )
    if not found.device:
        need = size / STATE_SHARE / _GIB
        raise ConfigError(
            f"the KV pool of {pool / _GIB:.3g} GiB has no room for a request's state of {size / _GIB:.3g} GiB: set "
            f"kv_cache_gib to at least {need:.4g}"
        )
    return found


def device_blocks(
    config: EngineConfig, rank_specs: Sequence[RankSpec], budgets: Sequence[MemoryBudget], max_len: int, taken: int = 0
) -> int:
    """Return the device blocks that every rank has memory for after `taken` bytes of states, at most what is used."""
    block_bytes = sum(spec.block_bytes for spec in rank_specs)
    one_request = -(-max_len // config.block_size)
    if config.kv_cache_gib is not None:
        blocks = (int(config.kv_cache_gib * _GIB) - taken) // block_bytes
        _check_free(config.kv_cache_gib, rank_specs, budgets, blocks)
    else:
        pairs = zip(rank_specs, budgets, strict=True)
        found = min((_usual(spec, budget) - taken) // spec.block_bytes for spec, budget in pairs)
        blocks = min(found, one_request * config.max_num_seqs)
    if blocks < one_request:
        need = one_request * block_bytes / _GIB
        helps = f"set kv_cache_gib to at least {need:.4g}"
        if config.kv_cache_gib is None and rank_specs[0].device_kind == "cuda":
            helps = _what_is_left(config, rank_specs, budgets, need)
        shorter = f", or max_model_len to at most {blocks * config.block_size}" if blocks else ""
        raise ConfigError(
            f"the KV pool of {blocks} blocks is too small for one request of {max_len} tokens: {helps}{shorter}"
        )
    return blocks


def _check_free(asked: float, rank_specs: Sequence[RankSpec], budgets: Sequence[MemoryBudget], blocks: int) -> None:
    pairs = list(zip(rank_specs, budgets, strict=True))
    spec, budget = min(pairs, key=lambda pair: pair[1].largest_pool // pair[0].block_bytes)
    most = budget.largest_pool // spec.block_bytes
    if blocks > most:
        # Rounded to a value that works.
        limit = math.floor(most * sum(spec.block_bytes for spec in rank_specs) / _GIB * 10) / 10
        where = "GPU" if spec.device_kind == "cuda" else "machine"
        whose = f"the {where} has" if len(pairs) == 1 else f"the {where} of a rank has"
        raise ConfigError(
            f"kv_cache_gib must be at most {limit:g} ({whose} {budget.largest_pool / _GIB:.1f} GiB free), got {asked:g}"
        )


def _what_is_left(
    config: EngineConfig, rank_specs: Sequence[RankSpec], budgets: Sequence[MemoryBudget], need: float
) -> str:
    spec, budget = min(zip(rank_specs, budgets, strict=True), key=lambda pair: pair[1].device // pair[0].block_bytes)
    need *= spec.block_bytes / sum(spec.block_bytes for spec in rank_specs)
    return (
        f"gpu_memory_utilization {config.gpu_memory_utilization:g} leaves {budget.device / _GIB:.3g} GiB after weights "
        f"of {spec.weight_bytes / _GIB:.3g} GiB, activations of {budget.steps / _GIB:.3g} GiB and other programs, and "
        f"{need:.3g} GiB are needed; set gpu_memory_utilization higher, or max_num_batched_tokens or max_num_seqs lower"
    )


def cpu_blocks(
    config: EngineConfig,
    rank_specs: Sequence[RankSpec],
    budgets: Sequence[MemoryBudget],
    device_blocks: int,
    taken: int = 0,
) -> int:
    block_bytes = sum(spec.cpu_block_bytes for spec in rank_specs)
    pairs = list(zip(rank_specs, budgets, strict=True))
    spec, budget = min(
        pairs, key=lambda pair: _max_cpu_bytes(pair[0], pair[1], device_blocks) // pair[0].cpu_block_bytes
    )
    left = _max_cpu_bytes(spec, budget, device_blocks)
    asked = config.swap_space_gib
    if asked is None:
        allowed = min(int(budget.ram * _SWAP_SHARE), left)
        blocks = min((_SWAP_MOST - taken) // block_bytes, max(0, allowed - taken) // spec.cpu_block_bytes)
        if not blocks and not SWAP_FORMATS[config.swap_dtype].is_exact:
            have = _have(spec, budget, device_blocks, len(rank_specs))
            raise ConfigError(
                f"swap_dtype {config.swap_dtype} is for KV in CPU memory, which has no room for it: {have}"
            )
        return blocks
    # Over the pools of all ranks.
    scale = block_bytes / spec.cpu_block_bytes
    size, most = int(asked * _GIB), int(left * scale)
    if size > most:
        # Rounded to a value that works, here and below.
        limit, have = math.floor(most / _GIB * 10) / 10, _have(spec, budget, device_blocks, len(rank_specs))
        raise ConfigError(f"swap_space_gib must be at most {limit:g} ({have}), got {asked:g}")
    if asked > 0 and size < block_bytes:
        least = math.ceil(block_bytes / _GIB * 1e6) / 1e6
        raise ConfigError(f"swap_space_gib must be 0 or at least {least:g}, one KV block, got {asked:g}")
    return max(0, size - taken) // block_bytes


def _usual(spec: RankSpec, budget: MemoryBudget) -> int:
    return budget.device if spec.device_kind == "cuda" else min(_CPU_MOST, int(budget.device * _CPU_SHARE))


def _max_cpu_bytes(spec: RankSpec, budget: MemoryBudget, device_blocks: int) -> int:
    # A CPU's device pool is in RAM too, but its untouched blocks still count as free.
    taken = 0 if spec.device_kind == "cuda" else device_blocks * spec.block_bytes
    return max(0, budget.ram - taken - _SWAP_SPARE)


def _have(spec: RankSpec, budget: MemoryBudget, device_blocks: int, ranks: int) -> str:
    have = f"{'the machine has' if ranks == 1 else 'a rank can have'} {budget.ram / _GIB:.1f} GiB free"
    if spec.device_kind == "cuda":
        return have
    return f"{have}, {device_blocks * spec.block_bytes / _GIB:.4g} of them for the KV pool"
