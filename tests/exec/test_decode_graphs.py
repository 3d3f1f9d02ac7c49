"""Decode steps in frames of fixed tensors, as CUDA graphs replay them; here the recorder keeps and calls functions."""

from __future__ import annotations

import copy

import pytest
import torch
from engines import CONFIGS, GRAMMARS, SwapAll, engine, make_store, mixed_requests, run, shortened, tiny_model

from skipjoin.exec.graphs import DecodeGraphs, Run, graph_batch_sizes, graph_bytes, record_graphs
from skipjoin.exec.local import LocalExecutor
from skipjoin.model.batch import GraphBuffers, PackedBatch, Segment
from skipjoin.model.loader import random_model
from skipjoin.model.sampler import Sampler, SampleRow
from skipjoin.policies.eviction import Recompute
from skipjoin.sampling import SamplingParams
from support.policies import SpillAll

pytest.importorskip("triton")

from skipjoin.model.attention.triton_backend import TritonAttention
from skipjoin.model.kernels.paged import INTERPRETED
from support.worlds import exhaustive

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="Triton is not interpreted")


class FunctionRecorder:
    """Recorder that keeps the function and requires it to compute into the same tensor every time."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, run: Run) -> Run:
        first = run()

        def again() -> torch.Tensor:
            self.replays += 1
            first.fill_(torch.nan)
            result = run()
            assert result.data_ptr() == first.data_ptr()
            return result

        return again


def interpreted(family: str):
    """Return a small model whose attention supports padding."""
    model = copy.copy(tiny_model(family, "torch"))
    model.attention = TritonAttention()
    return model


@pytest.mark.parametrize(
    ("family", "depth", "eviction"),
    [("qwen3", 2, SwapAll), exhaustive("llama", 1, SpillAll)],
)
def test_graphs_produce_the_tokens_of_eager_steps(family: str, depth: int, eviction: type[Recompute]) -> None:
    plain, graphed = (shortened(mixed_requests()[:4], 8) for _ in range(2))
    core, executor = engine(tiny_model(family), eviction(), device_blocks=15, cpu_blocks=40, slots=3, depth=depth)
    run(core, executor, plain)
    model, recorder = interpreted(family), FunctionRecorder()
    core, _ = engine(model, eviction(), device_blocks=15, cpu_blocks=40, slots=3, depth=depth)
    store = make_store(model, 15, 40)
    graphs = DecodeGraphs(model, store.device, recorder, sizes=[1, 3], longest=28)
    run(core, LocalExecutor(model, store, graphs=graphs, grammars=GRAMMARS), graphed)
    assert [request.progress.output for request in graphed] == [request.progress.output for request in plain]
    assert recorder.replays > 10


def test_padding_writes_no_kv_and_changes_no_other_rows() -> None:
    model = random_model(CONFIGS["llama"], seed=5, attention="torch")
    model.attention = TritonAttention()
    store = make_store(model, 6)
    store.device.tensor.normal_()
    graphs = DecodeGraphs(model, store.device, FunctionRecorder(), sizes=[4], longest=12)
    segments = [Segment([3], 5, [4, 1], reverse=True), Segment([], 2, [3], awaits=1)]
    before = store.device.tensor.clone()
    batch, logits = graphs.run(segments, torch.tensor([50, 60]))
    known = [segments[0], Segment([60], 2, [3])]
    changed = (store.device.tensor != before).flatten(1).any(1)
    assert changed.tolist() == [False, True, False, True, False, False]
    assert len(logits) == 2
    assert batch.token_ids[:2].tolist() == [3, 60]
    with pytest.raises(ValueError, match="the batch has block 6 of 4 tokens, the cache 6 of 4"):
        graphs.run([Segment([1], 0, [6])], None)
    store.device.tensor.copy_(before)
    alone = model.forward(PackedBatch.build(known, 4), store.device)
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)


def test_logits_keep_their_type_and_greedy_tokens_those_of_float32() -> None:
    """Rounded to bfloat16, several logits are the largest: the first of them must be chosen in either type."""
    model = random_model(CONFIGS["llama"], seed=5, dtype="bfloat16", attention="torch")
    model.attention = TritonAttention()
    graphs = DecodeGraphs(model, make_store(model, 6).device, FunctionRecorder(), sizes=[2], longest=12)
    _, logits = graphs.run([Segment([3], 0, [4]), Segment([60], 0, [3])], None)
    assert logits.dtype == torch.bfloat16
    logits = logits.clone()
    logits[:, [9, 4, 11]] = logits.max() + 1
    greedy = [SampleRow(Sampler(logits.shape[1]).start(SamplingParams(temperature=0.0), 0, [1], ()), 0)] * 2
    found, wide = (Sampler(logits.shape[1]).sample(rows, greedy).tokens.tolist() for rows in (logits, logits.float()))
    assert found == wide == [4, 4]


def test_graphs_accept_only_decodes_that_fit() -> None:
    model = random_model(CONFIGS["llama"], seed=5, attention="torch")
    model.attention = TritonAttention()
    graphs = DecodeGraphs(model, make_store(model, 6).device, FunctionRecorder(), sizes=[1, 2], longest=11)
    one = Segment([1], 4, [0, 1])
    assert graphs.fits([one, one], None)
    assert graphs.fits([one], torch.tensor([1, 2]))
    assert not graphs.fits([one], torch.tensor([1, 2, 3]))
    for other in (
        Segment([1, 2], 4, [0, 1]),
        Segment([1], 4, [0, 1], awaits=0),
        Segment([1], 4, [0, 1], sample=False),
        Segment([1], 4, [0, 1, 2, 3]),
    ):
        assert not graphs.fits([one, other], None), other
    assert not graphs.fits([one] * 3, None)
    shared = Segment([1], 4, [0, 1, 2], reverse=True)
    assert graphs.fits([one, shared], None)
    model.attention.name = "flash"
    assert graphs.fits([one, one], None)
    assert not graphs.fits([one, shared], None), "the graph's kernels would read its blocks in the other direction"


def test_a_frame_rejects_batches_that_do_not_fit() -> None:
    buffers = GraphBuffers(2, torch.zeros((2, 2), dtype=torch.int64))
    with pytest.raises(ValueError, match="hold 2 decodes, with tables of 2 blocks"):
        PackedBatch.build([Segment([1, 2], 0, [0])], 4, graph_buffers=buffers)


def test_batches_of_one_frame_share_tensors() -> None:
    tables = torch.zeros((5, 4), dtype=torch.int64)
    buffers = GraphBuffers(3, tables)
    first = PackedBatch.build([Segment([7], 5, [3, 2]), Segment([8], 0, [1])], 4, graph_buffers=buffers)
    second = PackedBatch.build([Segment([], 9, [6, 5, 4], awaits=2)], 4, graph_buffers=buffers)
    assert first.slots.data_ptr() == second.slots.data_ptr()
    assert second.slots.tolist() == first.slots.tolist() == [17, -1, -1]
    assert second.context_lens.tolist() == [10, 0, 0]
    assert second.query_start.tolist() == [0, 1, 2, 3]
    assert second.block_tables.tolist() == [[6, 5, 4, 0], [0] * 4, [0] * 4]
    assert second.block_tables.data_ptr() == first.block_tables.data_ptr() == tables.data_ptr()
    second.fill_in(torch.tensor([11, 12, 13]))
    assert second.token_ids.tolist() == [13, 0, 0]


def test_failed_recording_falls_back_to_eager_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refuses:
        def __init__(self, device: torch.device) -> None:
            pass

        def record(self, run: Run) -> Run:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("skipjoin.exec.graphs.CudaRecorder", Refuses)
    model = interpreted("llama")
    assert record_graphs(model, make_store(model, 6).device, [1, 2], 12) is None
    assert "launched kernel by kernel" in caplog.text
    assert "not permitted when stream is capturing" in caplog.text


def test_memory_of_graphs_is_reserved() -> None:
    model = tiny_model("llama")
    assert graph_bytes(model, [], 1000) == 0
    one, two = graph_bytes(model, [4], 1000), graph_bytes(model, [2, 4], 1000)
    assert one >= 1000 + 4 * model.config.vocab_size * 4
    assert two > one


@pytest.mark.parametrize("max_batch", [1, 2, 5, 8, 13, 128, 200, 256, 1024])
def test_frame_sizes_waste_less_than_a_fifth(max_batch: int) -> None:
    sizes = graph_batch_sizes(max_batch)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_batch
    for batch in range(1, max_batch + 1):
        size = next(size for size in sizes if size >= batch)
        assert (size - batch) / size < 0.2, (batch, size)
