from __future__ import annotations

from dataclasses import dataclass

from skipjoin.model.attention.base import AttentionBackend
from skipjoin.model.batch import PackedBatch
from skipjoin.model.kv_cache import PagedKV


@dataclass(slots=True)
class LayerInputs:
    batch: PackedBatch
    kv: PagedKV
    attention: AttentionBackend
