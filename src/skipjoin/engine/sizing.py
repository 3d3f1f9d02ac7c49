"""How many KV blocks each tier gets, from what was asked for and what the ranks have."""

from __future__ import annotations

import math
from collections.abc import Sequence

from skipjoin.config import ConfigError, EngineConfig
from skipjoin.exec.rank_spec import MemoryBudget, RankSpec

_GIB = 1 << 30
# Share of free memory that the KV pools take on a CPU, where other programs live beside us, and their most.
_CPU_SHARE, _CPU_MOST = 0.25, 8 * _GIB
# The same of the host pools; and the RAM that they must leave to the engine's own needs and to other programs.
_SWAP_SHARE, _SWAP_MOST, _SWAP_SPARE = 0.25, 4 * _GIB, 1 * _GIB


def device_blocks(config: EngineConfig, parts: Sequence[RankSpec], rooms: Sequence[MemoryBudget], max_len: int) -> int:
    """Blocks of the KV pool: what the memory of every rank allows, and never more than all running requests can fill.

    max_len: tokens of the longest request, which must fit. Raises `ConfigError`.
    """
    block_bytes = sum(part.block_bytes for part in parts)
    one_request = -(-max_len // config.block_size)
    if config.kv_cache_gib is not None:
        blocks = int(config.kv_cache_gib * _GIB) // block_bytes
    else:
        found = min(_usual(part, room) // part.block_bytes for part, room in zip(parts, rooms, strict=True))
        blocks = min(found, one_request * config.max_num_seqs)
    if blocks < one_request:
        need = one_request * block_bytes / _GIB
        helps = f"set kv_cache_gib to at least {need:.4g}"
        if config.kv_cache_gib is None and parts[0].device_kind == "cuda":
            helps = _what_is_left(config, parts, rooms, need)
        shorter = f", or max_model_len to at most {blocks * config.block_size}" if blocks else ""
        raise ConfigError(
            f"the KV pool of {blocks} blocks is too small for one request of {max_len} tokens: {helps}{shorter}"
        )
    return blocks


def _what_is_left(config: EngineConfig, parts: Sequence[RankSpec], rooms: Sequence[MemoryBudget], need: float) -> str:
    """Why the GPU with the least room has no more, and what helps. need: GiB of the smallest pool, of all ranks."""
    part, room = min(zip(parts, rooms, strict=True), key=lambda pair: pair[1].device // pair[0].block_bytes)
    need *= part.block_bytes / sum(part.block_bytes for part in parts)
    return (
        f"gpu_memory_utilization {config.gpu_memory_utilization:g} leaves {room.device / _GIB:.3g} GiB beside weights "
        f"of {part.weight_bytes / _GIB:.3g} GiB, activations of {room.steps / _GIB:.3g} GiB and what others use, and "
        f"{need:.3g} GiB are needed; set gpu_memory_utilization higher, or max_num_batched_tokens or max_num_seqs lower"
    )


def host_blocks(
    config: EngineConfig, parts: Sequence[RankSpec], rooms: Sequence[MemoryBudget], device_blocks: int
) -> int:
    """Blocks of the host pool: what was asked for, if the RAM of every rank holds it beside all else, or a share of
    what is free. Raises `ConfigError`."""
    block_bytes = sum(part.block_bytes for part in parts)
    pairs = list(zip(parts, rooms, strict=True))
    part, room = min(pairs, key=lambda pair: _host_room(pair[0], pair[1], device_blocks) // pair[0].block_bytes)
    left = _host_room(part, room, device_blocks)
    asked = config.swap_space_gib
    if asked is None:
        return min(_SWAP_MOST // block_bytes, int(room.ram * _SWAP_SHARE) // part.block_bytes, left // part.block_bytes)
    # Of the pools of all ranks together.
    scale = block_bytes / part.block_bytes
    size, most = int(asked * _GIB), int(left * scale)
    if size > most:
        # Rounded towards what works, here and below.
        told = math.floor(most / _GIB * 10) / 10
        raise ConfigError(
            f"swap_space_gib must be at most {told:g} ({_have(part, room, device_blocks, len(parts))}), got {asked:g}"
        )
    if asked > 0 and size < block_bytes:
        least = math.ceil(block_bytes / _GIB * 1e6) / 1e6
        raise ConfigError(f"swap_space_gib must be 0 or at least {least:g}, one KV block, got {asked:g}")
    return size // block_bytes


def _usual(part: RankSpec, room: MemoryBudget) -> int:
    """Bytes that a rank's KV pool takes if nothing else is said."""
    return room.device if part.device_kind == "cuda" else min(_CPU_MOST, int(room.device * _CPU_SHARE))


def _host_room(part: RankSpec, room: MemoryBudget, device_blocks: int) -> int:
    """Most bytes of a rank's host pool."""
    # A CPU's device pool lies in RAM too, and takes none of it until blocks are used.
    taken = 0 if part.device_kind == "cuda" else device_blocks * part.block_bytes
    return max(0, room.ram - taken - _SWAP_SPARE)


def _have(part: RankSpec, room: MemoryBudget, device_blocks: int, ranks: int) -> str:
    have = f"{'the machine has' if ranks == 1 else 'a rank can have'} {room.ram / _GIB:.1f} GiB free"
    if part.device_kind == "cuda":
        return have
    return f"{have}, {device_blocks * part.block_bytes / _GIB:.4g} of them for the KV pool"
