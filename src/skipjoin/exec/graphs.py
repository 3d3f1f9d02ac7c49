"""Decode steps as recorded graphs: one launch in place of hundreds, for batches of any size up to the largest."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Protocol

import torch

from skipjoin.model.batch import GraphBuffers, PackedBatch, Segment
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.kv_cache import PagedKV

_log = logging.getLogger(__name__)

# Device memory that a graph's nodes take. An assumption that no card has shown yet.
_NODE_BYTES = 16 << 20
# Runs before a recording: kernels are compiled and tuned, and libraries take their workspace.
_WARM_UPS = 2

# Computes something from fixed tensors into fixed tensors, which it returns.
Run = Callable[[], torch.Tensor]
# Called with the share done.
OnProgress = Callable[[float], None]


class GraphRecorder(Protocol):
    """Records what a function computes, so that it can be computed again at less cost."""

    def record(self, run: Run) -> Run:
        """`run` reads tensors that stay where they are. What is returned computes the same from what they hold then,
        into the same tensor every time."""
        ...


class CudaRecorder:
    """CUDA graphs that share one pool of memory: what one returns is valid until another runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, run: Run) -> Run:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                run()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile; what they do is none of this.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = run()

        def again() -> torch.Tensor:
            graph.replay()
            return result

        return again


def graph_batch_sizes(most: int) -> list[int]:
    """Batch sizes to record, up to `most`: under a fifth of a batch is padding."""
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
    """The model's decode steps for batches of the sizes given; smaller batches are padded to the next.

    A step fits if a `GraphBuffers` holds it. Padding computes something in rows of its own, which are
    never read, and writes no keys and values: its slot is -1. Attention must know such slots.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: PagedKV,
        recorder: GraphRecorder,
        *,
        sizes: Sequence[int],
        longest: int,
        on_progress: OnProgress = lambda share: None,
    ) -> None:
        """sizes: rising. longest: tokens of the longest request."""
        self._sizes = list(sizes)
        self._model, self._pool = model, pool
        # One tensor for all graphs each: tokens of the step before, by row, what is computed, and block tables.
        self._sampled = torch.zeros(self._sizes[-1], dtype=torch.int64, device=model.device)
        self._logits = torch.zeros((self._sizes[-1], model.config.vocab_size), device=model.device)
        tables = (self._sizes[-1], -(-longest // pool.block_size))
        self._tables = torch.zeros(tables, dtype=torch.int64, device=model.device)
        self._frames: dict[int, GraphBuffers] = {}
        self._runs: dict[int, Run] = {}
        # From the largest on, so that the smaller ones find room in its memory.
        for done, size in enumerate(reversed(self._sizes)):
            on_progress(done / len(self._sizes))
            frame = GraphBuffers(size, self._tables)
            # Nobody holds a block yet, so that this token may be written into the first.
            batch = PackedBatch.build([Segment([0], 0, [0])], pool.block_size, model.device, frame=frame)

            def step(batch: PackedBatch = batch) -> torch.Tensor:
                batch.fill_in(self._sampled)
                return model.forward(batch, pool, self._logits[: batch.num_rows])

            self._frames[size], self._runs[size] = frame, recorder.record(step)

    def fits(self, segments: Sequence[Segment], sampled: torch.Tensor | None) -> bool:
        """Whether `run` can compute these. sampled: see there."""
        largest = self._frames[self._sizes[-1]]
        return (sampled is None or len(sampled) <= largest.seats) and largest.holds(segments)

    def run(self, segments: Sequence[Segment], sampled: torch.Tensor | None) -> tuple[PackedBatch, torch.Tensor]:
        """The batch and its logits [len(segments), vocab_size], which are valid until the next call. sampled: tokens of
        the step before, for segments that await theirs. Raises as `CausalLM.check` does."""
        size = self._sizes[bisect_left(self._sizes, len(segments))]
        if sampled is not None:
            self._sampled[: len(sampled)].copy_(sampled)
        batch = PackedBatch.build(segments, self._pool.block_size, self._model.device, frame=self._frames[size])
        self._model.check(batch, self._pool)
        return batch, self._runs[size]()[: len(segments)]


def graph_bytes(model: CausalLM, sizes: Sequence[int], peak: int) -> int:
    """Device memory that graphs of these sizes take. peak: what a step takes beside weights and KV at most: the tensors
    of all graphs lie in one pool, which nobody else uses."""
    if not sizes:
        return 0
    return len(sizes) * _NODE_BYTES + peak + sizes[-1] * model.config.vocab_size * 4


def record_graphs(
    model: CausalLM, pool: PagedKV, sizes: Sequence[int], longest: int, on_progress: OnProgress = lambda share: None
) -> DecodeGraphs | None:
    """Graphs of the decode steps with up to `sizes` requests of up to `longest` tokens. None, with a warning, where
    they cannot be recorded."""
    try:
        recorder = CudaRecorder(model.device)
        return DecodeGraphs(model, pool, recorder, sizes=sizes, longest=longest, on_progress=on_progress)
    except Exception as error:  # whatever a driver or a compiler raises
        _log.warning(
            "decode steps cannot be recorded as CUDA graphs and are launched kernel by kernel, which is slower for "
            "small models and batches: %s", error,
        )  # fmt: skip
        return None
