from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

import torch

from skipjoin.model.batch import GraphBuffers, PackedBatch, Segment
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.family import family_named
from skipjoin.model.kv_cache import PagedKV

_log = logging.getLogger(__name__)

# Device memory of one graph's nodes. Assumed, not measured on a GPU yet.
_NODE_BYTES = 16 << 20
# Runs before the capture: they compile and tune kernels and allocate the libraries' workspaces.
_WARM_UPS = 2

# Reads fixed tensors and returns a fixed tensor.
Run = Callable[[], torch.Tensor]
# Called with the completed fraction, in [0, 1].
OnProgress = Callable[[float], None]


class CudaRecorder:
    """Captures CUDA graphs in one pool: a graph's result is valid until another graph runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, run: Run) -> Run:
        """Capture `run`, which reads tensors at fixed addresses. The replay returns the same tensor each time."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                run()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA during the capture; their work is not recorded.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = run()

        def again() -> torch.Tensor:
            graph.replay()
            return result

        return again


def graph_batch_sizes(most: int) -> list[int]:
    """Return batch sizes to capture, such that padding is less than a fifth."""
    return [*takewhile(lambda size: size < most, _sizes()), most]


def _sizes() -> Iterator[int]:
    yield from (1, 2, 3, 4, 6, 8)
    step, size = 2, 8
    while True:
        for _ in range(4):
            size += step
            yield size
        step *= 2


class DecodeGraphs:
    """CUDA graphs of decode steps, padded to the next size: one launch instead of hundreds.

    All ranks must have graphs of the same sizes, or none.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: PagedKV,
        recorder: CudaRecorder,
        *,
        sizes: Sequence[int],
        longest: int,
        on_progress: OnProgress = lambda share: None,
    ) -> None:
        self._sizes = list(sizes)
        self._model, self._pool = model, pool
        # Shared by all graphs: the previous step's tokens by row, the logits, and the block tables.
        self._sampled = torch.zeros(self._sizes[-1], dtype=torch.int64, device=model.device)
        # In the model's type: the likeliest token is the same in float32, into which only the other draws convert them.
        shape = self._sizes[-1], model.config.vocab_size
        self._logits = torch.zeros(shape, dtype=model.logits_dtype, device=model.device)
        tables = (self._sizes[-1], -(-longest // pool.block_size))
        self._tables = torch.zeros(tables, dtype=torch.int64, device=model.device)
        # Hidden states from the previous pipeline stage.
        self._received = None if model.shard.is_first else model.hidden_buffer(self._sizes[-1]).zero_()
        self._buffers: dict[int, GraphBuffers] = {}
        self._runs: dict[int, Run] = {}
        # The largest graph comes first, so that smaller ones reuse its memory.
        for done, size in enumerate(reversed(self._sizes)):
            on_progress(done / len(self._sizes))
            buffers = GraphBuffers(size, self._tables)
            # No request holds a block yet, so the capture may write this token into block 0.
            batch = PackedBatch.build([Segment([0], 0, [0])], pool.block_size, model.device, graph_buffers=buffers)

            def step(batch: PackedBatch = batch) -> torch.Tensor:
                return self._step(batch)

            self._buffers[size], self._runs[size] = buffers, recorder.record(step)

    def fits(self, segments: Sequence[Segment], sampled: torch.Tensor | None) -> bool:
        # With FlashAttention, a graph of plain segments has no kernels for others.
        if self._model.attention.name == "flash" and any(segment.reverse for segment in segments):
            return False
        largest = self._buffers[self._sizes[-1]]
        return (sampled is None or len(sampled) <= largest.capacity) and largest.holds(segments)

    def _step(self, batch: PackedBatch) -> torch.Tensor:
        batch.fill_in(self._sampled)
        received = None if self._received is None else self._received[: batch.num_tokens]
        found = self._model.compute(received, batch, self._pool)
        if not self._model.shard.is_last:
            return found
        return self._logits[: batch.num_rows].copy_(self._model.logits(found))

    def run(self, segments: Sequence[Segment], sampled: torch.Tensor | None) -> tuple[PackedBatch, torch.Tensor]:
        """Replay the smallest fitting graph. Logits are valid until the next call, and empty before the last stage."""
        size = self._sizes[bisect_left(self._sizes, len(segments))]
        if sampled is not None:
            self._sampled[: len(sampled)].copy_(sampled)
        batch = PackedBatch.build(
            segments, self._pool.block_size, self._model.device, graph_buffers=self._buffers[size]
        )
        self._model.check(batch, self._pool)
        if self._received is not None:
            self._model.receive(self._received[:size])
        found = self._runs[size]()
        if self._model.shard.is_last:
            return batch, found[: len(segments)]
        self._model.group.send(found.clone())  # cloned because the next step overwrites it while it is being sent
        return batch, self._logits[:0]


def replays(model: CausalLM) -> bool:
    # transformers' modeling code may wait for the device, which a graph cannot. Slots of states are not in its buffers.
    is_native = family_named(model.config.family).is_native and model.config.states is None
    return is_native and model.attention.name in ("triton", "triton-invariant", "flash")


def graph_bytes(model: CausalLM, sizes: Sequence[int], peak: int) -> int:
    if not sizes:
        return 0
    return len(sizes) * _NODE_BYTES + peak + sizes[-1] * model.config.vocab_size * model.logits_dtype.itemsize


def record_graphs(
    model: CausalLM, pool: PagedKV, sizes: Sequence[int], longest: int, on_progress: OnProgress = lambda share: None
) -> DecodeGraphs | None:
    try:
        recorder = CudaRecorder(model.device)
        return DecodeGraphs(model, pool, recorder, sizes=sizes, longest=longest, on_progress=on_progress)
    except Exception as error:  # any error of the driver or the compiler
        _log.warning(
            "decode steps cannot be recorded as CUDA graphs and are launched kernel by kernel, which is slower for "
            "small models and batches: %s", error,
        )  # fmt: skip
        return None
