from __future__ import annotations

from typing import NamedTuple

from skipjoin.exec.base import LargestStep


class RankModel(NamedTuple):
    """Model and settings that every rank loads."""

    folder: str
    dtype: str
    device: str
    attention: str
    load_format: str
    quantization: str
    threads: int | None
    block_size: int
    swap_dtype: str
    kv_cache_dtype: str
    gpu_share: float
    largest: LargestStep
    graph_sizes: tuple[int, ...] = ()
    batch_invariant: bool = False
    link_bytes_per_s: float | None = None
