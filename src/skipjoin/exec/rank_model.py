from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from skipjoin.adapters import Adapter
from skipjoin.config.profile import Transfer
from skipjoin.core.step import Direction, StateSizes
from skipjoin.exec.adapters import load_adapter
from skipjoin.exec.base import LargestStep, RankError
from skipjoin.exec.graphs import DecodeGraphs, graph_bytes, record_graphs, replays
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.memory import measure_peak
from skipjoin.exec.rank_spec import make_store, measure_transfers, memory_budget_of, rank_spec_of, touch
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model
from skipjoin.model.parallel import Group


def warm_up(
    model: CausalLM, pool: PagedKV, largest: LargestStep, on_progress: Callable[[float], None] = lambda share: None
) -> None:
    """Compile the kernels of all batches that the back end distinguishes, on all ranks. Writes into block 0."""
    seqs = min(largest.seqs, largest.tokens)
    batches = model.attention.versions(model.config, pool.block_size, seqs, largest.positions, model.shard)
    for done, (lengths, width) in enumerate(batches):
        on_progress(done / len(batches))
        if sum(lengths) <= largest.tokens:
            # Reversed, because a back end may use a library for other segments, which compiles nothing.
            segments = [Segment([0] * length, 0, [0] * width, reverse=True) for length in lengths]
            model.forward(PackedBatch.build(segments, pool.block_size, model.device), pool)


LOADING = "loading weights"
# Called with the current activity and its completed fraction, in [0, 1].
OnProgress = Callable[[str, float], None]


class RankModel(NamedTuple):
    folder: str
    load: LoadSpec
    largest: LargestStep
    block_size: int
    threads: int | None = None
    swap_dtype: str = "auto"
    link_bytes_per_s: float | None = None
    gpu_share: float = 0.9
    graph_sizes: tuple[int, ...] = ()
    adapters: tuple[Adapter, ...] = ()


class LoadedRank:
    """A rank's weights and, after `make_pools`, its KV pools and CUDA graphs; `ranks_here` share the machine's RAM."""

    def __init__(
        self, of: RankModel, threads: int, on_progress: OnProgress, *, group: Group | None = None, ranks_here: int = 1
    ) -> None:
        self._of, self.threads, self._on_progress = of, threads, on_progress
        torch.set_num_threads(threads)
        self.model = load_model(
            of.folder, of.load, progress=lambda done, total: on_progress(LOADING, done / total), group=group
        )
        model = self.model
        for adapter in of.adapters:
            load_adapter(model, adapter)
        if model.device.type == "cuda":
            on_progress("tuning kernels", 0.0)
        model.attention.tune(model.config, model.dtype, model.device, of.block_size, model.shard)
        peak = measure_peak(model, of.largest, of.block_size)
        self.spec = rank_spec_of(model, of.block_size, threads, of.swap_dtype)
        self._graph_sizes = of.graph_sizes if replays(model) else ()
        graphs_take = graph_bytes(model, self._graph_sizes, peak.decodes)
        self.budget = memory_budget_of(model, of.gpu_share, ranks_here, peak=peak.all, graph_bytes=graphs_take)
        self.graphs: DecodeGraphs | None = None
        self._store: KVStore | None = None

    @property
    def store(self) -> KVStore:
        assert self._store is not None
        return self._store

    def make_pools(self, device_blocks: int, cpu_blocks: int, states: StateSizes | None = None) -> bool:
        """Allocate the KV pools and capture CUDA graphs; return False if no rank may use graphs."""
        of, model = self._of, self.model
        try:
            self._store = make_store(
                model,
                device_blocks,
                cpu_blocks,
                of.block_size,
                of.swap_dtype,
                link_bytes_per_s=of.link_bytes_per_s,
                states=states,
            )
        except (RuntimeError, OSError) as error:  # from torch and from mmap
            here, there = device_blocks * self.spec.block_bytes, cpu_blocks * self.spec.cpu_block_bytes
            pools = f"{here / (1 << 30):.4g} GiB and, in CPU memory, {there / (1 << 30):.4g} GiB"
            why = str(error).partition("\n")[0]
            raise RankError(f"{model.shard.name} cannot allocate {pools} of KV: {why}") from None
        warm_up(model, self._store.device, of.largest, partial(self._on_progress, "compiling kernels"))
        if self._graph_sizes:
            on_record = partial(self._on_progress, "recording decode steps")
            self.graphs = record_graphs(model, self._store.device, self._graph_sizes, of.largest.positions, on_record)
        return self.graphs is not None or not self._graph_sizes

    def forget_graphs(self) -> None:
        self.graphs = None

    def touch(self, blocks: Sequence[int]) -> None:
        touch(self.store.device, blocks)

    def transfers(self, seconds: float) -> dict[Direction, Transfer]:
        return measure_transfers(self.model, self._of.block_size, seconds, self._of.swap_dtype)
