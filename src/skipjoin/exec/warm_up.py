from __future__ import annotations

from collections.abc import Callable

from skipjoin.exec.base import LargestStep
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.kv_cache import PagedKV

# Called with the completed fraction, in [0, 1].
OnProgress = Callable[[float], None]


def warm_up(model: CausalLM, pool: PagedKV, largest: LargestStep, on_progress: OnProgress = lambda share: None) -> None:
    """Compile the kernels of all batches that the back end distinguishes, on all ranks. Writes into block 0."""
    seqs = min(largest.seqs, largest.tokens)
    batches = model.attention.versions(model.config, pool.block_size, seqs, largest.positions, model.shard)
    for done, (lengths, width) in enumerate(batches):
        on_progress(done / len(batches))
        if sum(lengths) <= largest.tokens:
            # Reversed, because a back end may use a library for other segments, which compiles nothing.
            segments = [Segment([0] * length, 0, [0] * width, reverse=True) for length in lengths]
            model.forward(PackedBatch.build(segments, pool.block_size, model.device), pool)
