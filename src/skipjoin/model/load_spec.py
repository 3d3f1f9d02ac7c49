from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    dtype: str = "auto"
    device: str = "cpu"
    attention: str = "auto"
    load_format: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    batch_invariant: bool = False
    task: str = "auto"
