from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from skipjoin.adapters import Adapter
from skipjoin.config.profile import Transfer
from skipjoin.core.request import Request
from skipjoin.core.step import LINK, Direction, Move, StateSizes
from skipjoin.exec.base import Executor, Handle
from skipjoin.exec.fit import fit_times
from skipjoin.exec.grammars_ahead import MasksAhead
from skipjoin.exec.kv_store import KVStore
from skipjoin.kv_format import SWAP_FORMATS
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.errors import ModelError
from skipjoin.model.grammars import Grammars
from skipjoin.model.kv_cache import PagedKV, kv_heads
from skipjoin.model.state_cache import StateCache
from skipjoin.system.container import free_memory
from skipjoin.system.machine import cpu_name

# Blocks per measured transfer, and bytes of each pool used.
_TRANSFER_BLOCKS = tuple(2**power for power in range(9))
_TRANSFER_BYTES = 64 << 20
# Runs per size; the first two ignore the deadline.
_TRANSFER_RUNS = 12


class RankSpec(NamedTuple):
    """A rank's share of a model.

    Attributes:
        attention_width: Query heads of all its layers times the head dimension.
        parameters: Those that a token uses.
        expert_bytes: Part of `weight_bytes` of which a token uses the share `expert_use`.
        adapter_bytes: By number, of adapters loaded with the model; no part of `weight_bytes`.
        state_bytes: Of a request's state in layers without KV.
    """

    stage: int
    weight_bytes: int
    block_bytes: int
    cpu_block_bytes: int
    attention_width: int
    dtype: str
    kv_cache_dtype: str
    swap_dtype: str
    parameters: int
    device_kind: str
    device: str
    attention: str
    operators: str
    threads: int
    expert_bytes: int = 0
    expert_use: float = 0.0
    adapter_bytes: Mapping[int, int] = {}
    state_bytes: int = 0


class MemoryBudget(NamedTuple):
    """Bytes available to a rank's KV pools after its weights are loaded.

    Attributes:
        device: Within the configured fraction.
        ram: Of its machine; the same memory if the device is a CPU.
        free: Device memory for a pool of configured size, regardless of the fraction.
    """

    device: int
    ram: int
    steps: int = 0
    free: int = 0

    @property
    def largest_pool(self) -> int:
        return max(self.device, self.free)


class ModelExecutor(Executor[Handle], Protocol):
    @property
    def rank_specs(self) -> Sequence[RankSpec]: ...

    @property
    def pools(self) -> tuple[int, int, int]:
        """Device KV blocks, CPU KV blocks, and tokens per block."""
        ...

    @property
    def states(self) -> StateSizes | None: ...

    def touch(self, blocks: Sequence[int]) -> None: ...

    def transfers(self, seconds: float) -> dict[Direction, Transfer]: ...

    @property
    def grammars(self) -> Grammars | None:
        """Grammars compiled in this process; None if ranks compile their own."""
        ...

    @property
    def ahead(self) -> MasksAhead | None: ...

    def load_adapter(self, adapter: Adapter) -> int:
        """Load an adapter after the plans in flight, and return its bytes.

        Raises:
            AdapterError: It cannot be loaded.
            RankError: A rank was lost.
        """
        ...

    def unload_adapter(self, number: int) -> None:
        """Unload an adapter that no later plan uses, after the plans in flight."""

    def check(self) -> None:
        """Raise `RankError` if a rank was lost while no plan was in flight."""

    def restart(self, reason: Exception) -> None:
        """Restart after the `RankError` `reason`, with empty pools, or raise `RankError`."""
        ...

    def close(self) -> None: ...


def rank_spec_of(model: CausalLM, block_size: int, threads: int, swap_dtype: str = "auto") -> RankSpec:
    config, shard, of = model.config, model.shard, model.kv_format
    if config.has_position_keys and not SWAP_FORMATS[swap_dtype].is_exact:
        raise ModelError(
            f"swap_dtype {swap_dtype} rounds keys, and those of {config.architecture} have positions: leave swap_dtype "
            "auto"
        )
    swap = SWAP_FORMATS[swap_dtype]
    if not (config.has_plain_kv or swap.is_exact):
        raise ModelError(
            f"swap_dtype {swap_dtype} needs keys and values of equal heads, which {config.architecture} has not: leave "
            "swap_dtype auto"
        )
    heads = kv_heads(config, shard)
    shape = 2 * sum(count for count, _ in heads), block_size, config.head_dim
    block_bytes = PagedKV.bytes_per_block(config, block_size, model.dtype, shard, of)
    row_bytes = of.row_bytes(config.head_dim, model.dtype.itemsize)
    widths = [config.heads_of(layer)[1] for layer in shard.layers(config)]
    return RankSpec(
        stage=shard.pp_rank,
        weight_bytes=model.weight_bytes,
        block_bytes=block_bytes,
        cpu_block_bytes=swap.block_bytes(shape, row_bytes) if config.has_plain_kv else block_bytes,
        attention_width=len(shard.heads(config)) * sum(widths),
        dtype=str(model.dtype).removeprefix("torch.")
        + (f", {model.weight_label} weights" if model.weight_label else ""),
        kv_cache_dtype=of.name,
        swap_dtype=swap_dtype,
        parameters=model.parameters,
        device_kind=model.device.type,
        device=torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else cpu_name(),
        attention=model.attention.name,
        operators=model.ops.path,
        threads=threads,
        expert_bytes=model.expert_bytes,
        expert_use=0.0 if config.experts is None else config.experts.per_token / config.experts.count,
        adapter_bytes=dict(model.adapters.bytes),
        state_bytes=StateCache.bytes_per_slot(config, model.dtype, shard),
    )


def memory_budget_of(
    model: CausalLM, gpu_share: float, ranks_here: int = 1, *, peak: int = 0, graph_bytes: int = 0, to_load: int = 0
) -> MemoryBudget:
    """Return the memory available to this rank's KV pools.

    Args:
        peak: Result of `measure_peak`, which must have run unless `to_load` is set.
        to_load: Bytes of weights that are not loaded yet.
    """
    ram = free_ram() // ranks_here
    if model.device.type != "cuda":
        ram = max(0, ram - to_load)
        return MemoryBudget(ram, ram)
    # The allocator's cache is available to this process but counts as used on the device.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    steps = peak + graph_bytes
    free = max(0, free - to_load)
    return MemoryBudget(max(0, int(free - total * (1 - gpu_share)) - steps), ram, steps, max(0, free - steps))


def free_ram() -> int:
    """Return the bytes of RAM within the container's limit; reclaimable page cache counts as free."""
    limit = free_memory()
    return _free_here() if limit is None else min(limit, _free_here())


def _free_here() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return int(amount.split()[0]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def make_store(
    model: CausalLM,
    device_blocks: int,
    cpu_blocks: int,
    block_size: int,
    swap_dtype: str = "auto",
    *,
    link_bytes_per_s: float | None = None,
    states: StateSizes | None = None,
) -> KVStore:
    return KVStore(
        model.config,
        model.dtype,
        model.device,
        device_blocks=device_blocks,
        cpu_blocks=cpu_blocks,
        block_size=block_size,
        shard=model.shard,
        of=model.kv_format,
        swap_dtype=swap_dtype,
        link_bytes_per_s=link_bytes_per_s,
        states=states,
    )


def touch(kv: PagedKV, blocks: Sequence[int]) -> None:
    """Write blocks, because untouched memory maps to one zero page and reads faster."""
    for block in blocks:
        kv.tensor[block].fill_(0.01)


def measure_transfers(
    model: CausalLM, block_size: int, seconds: float, swap_dtype: str = "auto"
) -> dict[Direction, Transfer]:
    deadline = time.perf_counter() + seconds
    block_bytes = PagedKV.bytes_per_block(model.config, block_size, model.dtype, model.shard, model.kv_format)
    most = max(_TRANSFER_BLOCKS[2], min(_TRANSFER_BLOCKS[-1], _TRANSFER_BYTES // block_bytes))
    store = make_store(model, most, most, block_size, swap_dtype)
    owner = Request(0, 0.0, [0], 1)
    moves = [
        Move(direction, owner, tuple(range(count)), tuple(reversed(range(count))), count * block_size)
        for count in _TRANSFER_BLOCKS
        if count <= most
        for direction in LINK
    ]
    times: dict[Move, list[float]] = {move: [] for move in moves}
    for turn in range(_TRANSFER_RUNS):
        if turn > 1 and time.perf_counter() > deadline:
            break
        for move in moves:
            times[move].append(_seconds_of(move, store, model.device))
    found = {}
    for direction in LINK:
        runs = [
            (len(move.source), float(np.quantile(times[move][1:], 0.25)))
            for move in moves
            if move.direction is direction
        ]
        features = np.array([(1.0, count) for count, _ in runs])
        floor, block = fit_times(features, np.array([seconds for _, seconds in runs])).tolist()
        found[direction] = Transfer(floor, block)
    return found


def _seconds_of(move: Move, store: KVStore, device: torch.device) -> float:
    start = time.perf_counter()
    store.copy(move)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def by_stage(rank_specs: Sequence[RankSpec]) -> list[list[RankSpec]]:
    stages: list[list[RankSpec]] = [[] for _ in range(rank_specs[-1].stage + 1)]
    for spec in rank_specs:
        stages[spec.stage].append(spec)
    return stages
