from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """How a model is loaded. Fields are named as those of `EngineConfig`.

    Attributes:
        dtype: float32, bfloat16, float16, or auto: as config.json says, else the type of most weights.
        device: auto, cpu, cuda or cuda:N.
        load_format: auto, or dummy for random weights, which need no weight file.
        quantization: none, or int8 for 8-bit weights of linear layers (CPU).
        kv_cache_dtype: auto for the model's type, or int8 for codes with a scale per token and head.
    """

    dtype: str = "auto"
    device: str = "cpu"
    attention: str = "auto"
    load_format: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    batch_invariant: bool = False
