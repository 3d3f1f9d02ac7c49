from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from engines import BLOCK_SIZE, CONFIGS, make_store, tiny_model

from skipjoin.config import ConfigError, EngineConfig
from skipjoin.engine.sizing import device_blocks
from skipjoin.exec import memory, rank_spec
from skipjoin.exec.base import LargestStep
from skipjoin.exec.memory import largest_steps, measure_peak, peak_of
from skipjoin.exec.rank_spec import MemoryBudget, RankSpec, memory_budget_of
from skipjoin.exec.worker import Worker
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.errors import ModelError
from skipjoin.model.loader import random_model

GIB = 1 << 30
CUDA = torch.device("cuda", 0)
LARGEST = LargestStep(tokens=37, seqs=6, positions=20)


class FakeGpu:
    """Replacement of torch.cuda."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, free: int = 70 * GIB, total: int = 80 * GIB) -> None:
        self.free, self.total = free, total
        self.allocated = self.peak = 16 * GIB
        self.cached = 0
        self.calls: list[str] = []
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free - self.cached, self.total))

    def use(self, size: int, *, cached: int = 0) -> None:
        """Allocate `size` bytes and free them, except `cached` bytes that the allocator keeps."""
        self.peak = max(self.peak, self.allocated + size)
        self.cached = cached

    def synchronize(self, device: torch.device) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")
        self.cached = 0

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.calls.append("reset")
        self.peak = self.allocated


def gpu_model() -> CausalLM:
    model = tiny_model("llama")
    facts = {"device": CUDA, "dtype": model.dtype, "kv_format": model.kv_format, "config": model.config}
    return cast(CausalLM, SimpleNamespace(**facts, shard=model.shard, weight_bytes=GIB))


@pytest.mark.parametrize(
    ("largest", "few", "many", "decodes"),
    [
        (LARGEST, [19, 18], [7, 6, 6, 6, 6, 6], (19, 6)),
        (LargestStep(2048, 128, 4096), [2048], [16] * 128, (1023, 128)),
        (LargestStep(10_000, 4, 2000), [2000] * 4, [2000] * 4, (1023, 4)),  # four prompts have at most 8000 tokens
        (LargestStep(3, 8, 1), [1] * 3, [1] * 3, (0, 3)),
    ],
)
def test_largest_steps_are_whole_prompts_and_decodes(
    largest: LargestStep, few: list[int], many: list[int], decodes: tuple[int, int]
) -> None:
    steps = largest_steps(largest, BLOCK_SIZE)
    assert [piece.tokens for piece in steps[0].slices] == few
    assert [piece.tokens for piece in steps[1].slices] == many
    start, count = decodes
    assert [(piece.start, piece.tokens) for piece in steps[2].slices] == [(start, 1)] * count
    for piece in (piece for step in steps for piece in step.slices):
        assert piece.samples
        assert set(piece.blocks) == {0}
        assert len(piece.blocks) == -(
            -largest.positions // BLOCK_SIZE
        )  # their number determines the memory of attention
        assert piece.start + piece.tokens == len(piece.request.prompt)


def test_a_worker_runs_the_largest_steps_in_one_block() -> None:
    model = tiny_model("llama")
    store = make_store(model, 1)
    store.device.tensor.zero_()
    worker = Worker(model, store)
    for step in largest_steps(LARGEST, BLOCK_SIZE):
        result = worker.run(step)
        assert all(token is not None for token in result.tokens)
    assert not store.device.tensor.isnan().any()


def test_cpu_models_are_not_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "Worker", None)
    assert measure_peak(tiny_model("llama"), LARGEST, BLOCK_SIZE) == (0, 0)


def test_peak_is_the_memory_of_the_work_plus_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    gpu.use(9 * GIB)  # the peak of loading, which must not count
    assert peak_of(CUDA, lambda: gpu.use(2 * GIB, cached=3 * GIB)) == int(2 * GIB * 1.05)
    assert gpu.cached == 0
    # Cached memory of loading is freed first, and the work is synchronized before the peak is read.
    assert gpu.calls == ["synchronize", "empty_cache", "reset", "synchronize", "empty_cache"]


def test_graph_memory_is_that_of_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts need more, but no graph contains them."""
    gpu = FakeGpu(monkeypatch)

    class Runs:
        halvings = 0

        def __init__(self, *args: Any) -> None:
            pass

        def run(self, plan: Any) -> None:
            gpu.use(sum(piece.tokens for piece in plan.slices) * GIB)

    monkeypatch.setattr(memory, "Worker", Runs)
    monkeypatch.setattr(memory, "make_store", lambda *args, **rest: None)
    peaks = measure_peak(gpu_model(), LARGEST, BLOCK_SIZE)
    assert peaks == (int(37 * GIB * 1.05), int(6 * GIB * 1.05))


@pytest.mark.parametrize("is_reported", [False, True])
def test_out_of_memory_in_the_profile_names_the_settings(monkeypatch: pytest.MonkeyPatch, *, is_reported: bool) -> None:
    """The worker may raise the error or report that it halved the step."""
    gpu = FakeGpu(monkeypatch, free=64 * GIB)

    class Full:
        def __init__(self, *args: Any) -> None:
            pass

        def run(self, plan: Any) -> Any:
            gpu.use(0, cached=5 * GIB)
            self.halvings = 1
            if not is_reported:
                raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")

    monkeypatch.setattr(memory, "Worker", Full)
    monkeypatch.setattr(memory, "make_store", lambda *args, **rest: None)
    expected = r"37 tokens or 6 requests .* weights of 1.00 GiB \(64.00 of 80.00 GiB are free\): lower max_num_batched"
    with pytest.raises(ModelError, match=expected):
        measure_peak(gpu_model(), LARGEST, BLOCK_SIZE)


def test_the_pool_gets_the_remaining_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_spec, "free_ram", lambda: 100 * GIB)
    gpu = FakeGpu(monkeypatch, free=60 * GIB)  # 20 GiB are weights and other processes'
    gpu.use(0, cached=6 * GIB)  # cached by the allocator, hence available
    room = memory_budget_of(gpu_model(), 0.9, 2, peak=3 * GIB, graph_bytes=GIB)
    assert room == MemoryBudget(72 * GIB - 20 * GIB - 4 * GIB, 50 * GIB, 4 * GIB, 56 * GIB)
    gpu.free = 11 * GIB
    assert memory_budget_of(gpu_model(), 0.9, peak=4 * GIB).device == 0
    assert memory_budget_of(tiny_model("llama"), 0.9, peak=4 * GIB) == MemoryBudget(100 * GIB, 100 * GIB)


def parts(weights_gib: float, kind: str = "cuda") -> RankSpec:
    return RankSpec(
        0,
        int(weights_gib * GIB),
        2 << 20,
        2 << 20,
        4096,
        "bfloat16",
        "auto",
        "auto",
        2,
        kind,
        "some device",
        "torch",
        "torch",
        1,
    )


def test_error_of_a_small_pool_itemizes_the_memory() -> None:
    config = EngineConfig(gpu_memory_utilization=0.5, block_size=16)
    ranks = [parts(14.96), parts(15.5)]
    rooms = [MemoryBudget(5 * GIB, GIB, 1 << 29), MemoryBudget(GIB, GIB, int(1.25 * GIB))]
    with pytest.raises(ConfigError) as caught:
        device_blocks(config, ranks, rooms, 16_384)
    text = str(caught.value)
    assert "gpu_memory_utilization 0.5 leaves 1 GiB after weights of 15.5 GiB, activations of 1.25 GiB" in text
    assert "2 GiB are needed; set gpu_memory_utilization higher, or max_num_batched_tokens" in text
    assert text.endswith("or max_model_len to at most 8192")
    assert device_blocks(config, ranks, rooms, 8192) == 512
    # Without any free memory, no max_model_len would fit.
    with pytest.raises(ConfigError, match=r"pool of 0 blocks .* max_num_seqs lower$"):
        device_blocks(config, [parts(15)], [MemoryBudget(0, GIB, GIB)], 4096)


def test_error_of_a_configured_pool_names_its_setting() -> None:
    for kind in ("cuda", "cpu"):
        config = EngineConfig(kv_cache_gib=0.01)
        with pytest.raises(ConfigError, match=r"set kv_cache_gib to at least 0\.5, or max_model_len to at most 80"):
            device_blocks(config, [parts(1, kind)], [MemoryBudget(GIB, GIB)], 4096)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_error_of_a_pool_beyond_free_memory_names_the_maximum(kind: str) -> None:
    """On a GPU the default share does not bound it. Of several ranks the one with the least memory does."""
    ranks, rooms = [parts(1, kind)] * 2, [MemoryBudget(4 * GIB, 9 * GIB, free=6 * GIB), MemoryBudget(3 * GIB, 9 * GIB)]
    for asked in (6.1, 500.0, 1e6):
        with pytest.raises(ConfigError, match=r"kv_cache_gib must be at most 6 \(.* a rank has 3\.0 GiB free\), got"):
            device_blocks(EngineConfig(kv_cache_gib=asked), ranks, rooms, 4096)
    assert device_blocks(EngineConfig(kv_cache_gib=6), ranks, rooms, 4096) == 3 * GIB // (2 << 20)
    assert device_blocks(EngineConfig(kv_cache_gib=6), ranks[:1], rooms[:1], 4096) == 6 * GIB // (2 << 20)


def test_container_limit_bounds_the_free_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, free in ((12345, 12345), (1 << 62, rank_spec.free_ram()), (None, rank_spec.free_ram())):
        monkeypatch.setattr(rank_spec, "free_memory", lambda limit=limit: limit)
        assert rank_spec.free_ram() == pytest.approx(free, rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_stay_within_the_profiled_memory() -> None:
    config = CONFIGS["llama"] | {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 32_000}
    model = random_model(config, seed=3, device="cuda")
    largest = LargestStep(tokens=4096, seqs=64, positions=256)
    measure_peak(model, largest, 16)  # allocates permanent memory, such as cuBLAS's workspace
    before = torch.cuda.memory_allocated()
    peak = measure_peak(model, largest, 16).all
    assert torch.cuda.memory_allocated() == before
    # The logits of all rows alone would take this much.
    assert peak > 64 * 32_000 * 4
    store = rank_spec.make_store(model, 2, 0, 16)
    worker = Worker(model, store)
    assert peak_of(CUDA, lambda: worker.run(largest_steps(largest, 16)[1]) and None) <= peak * 1.05
