from __future__ import annotations

import msgspec

from skipjoin.pooling import Task


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Properties of a built engine. Bytes are totals over all ranks; `dimensions` are those of its vectors.

    Attributes:
        cpu_block_bytes: Differs from `block_bytes` if `swap_dtype` is not "auto".
        asks_pairs: Whether it judges a pair of texts in a conversation, with yes or no.
    """

    model: str
    folder: str
    max_model_len: int
    vocab_size: int
    device_blocks: int
    cpu_blocks: int
    block_size: int
    block_bytes: int
    cpu_block_bytes: int
    swap_dtype: str
    recipe: str
    dtype: str
    device: str
    task: Task = Task.GENERATE
    dimensions: int = 0
    asks_pairs: bool = False
