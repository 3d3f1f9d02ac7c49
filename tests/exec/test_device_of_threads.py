"""The current device of each thread that launches kernels, with simulated GPUs."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import CONFIGS, make_store, tiny_model

from skipjoin.builtin import builtin_model_path
from skipjoin.config import ConfigError, EngineConfig
from skipjoin.core.step import StepPlan
from skipjoin.exec import local
from skipjoin.exec.local import LocalExecutor
from skipjoin.exec.model_threads import CallerThread
from skipjoin.model import cuda, loader
from skipjoin.model.attention.torch_backend import TorchAttention
from skipjoin.model.config import ModelConfig
from skipjoin.model.cuda import Card, CudaFacts
from skipjoin.model.errors import ModelError
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.ops.torch_ops import TorchOps
from skipjoin.model.weight_format import Dummy

SECOND = torch.device("cuda", 1)


class Current(threading.local):
    """Current device as CUDA keeps it: one per thread, initially device 0."""

    index = 0

    def set_device(self, device: torch.device) -> None:
        self.index = device.index


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Current:
    found = Current()
    monkeypatch.setattr(torch.cuda, "set_device", found.set_device)
    return found


def test_kernels_are_checked_and_models_loaded_on_the_configured_device(
    monkeypatch: pytest.MonkeyPatch, current: Current
) -> None:
    card, seen = Card("H100", (9, 0)), []

    def implementations(*args: object, **options: object) -> tuple[TorchOps, TorchAttention]:
        seen.append(current.index)
        return TorchOps(), TorchAttention()

    monkeypatch.setattr(cuda, "cuda_facts", lambda: CudaFacts(runtime="13.0", cards=(card, card), present=True))
    monkeypatch.setattr(loader, "implementations", implementations)
    monkeypatch.setattr(loader, "expand_segments", lambda: None)
    config = ModelConfig.from_dict(CONFIGS["llama"])
    for name, expected in (("cuda:1", 1), ("cuda:0", 0)):
        loader._choose(config, LoadSpec(dtype="float32", device=name), Dummy())
        assert seen.pop() == current.index == expected


def test_the_model_thread_launches_on_the_model_device(monkeypatch: pytest.MonkeyPatch, current: Current) -> None:
    class Worker:
        def __init__(self, *args: object, **options: object) -> None:
            pass

        def begin(self, plan: StepPlan) -> int:
            return current.index

        def close(self) -> None:
            pass

    monkeypatch.setattr(local, "Worker", Worker)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    model = tiny_model("llama")
    store = make_store(model, 2)
    measured = []
    monkeypatch.setattr(local, "measure_transfers", lambda *args: measured.append(current.index))
    for device, expected in ((SECOND, 1), (torch.device("cuda"), 0), (torch.device("cpu"), 0)):
        monkeypatch.setattr(model, "device", device)  # other tests share the model
        executor = LocalExecutor(model, store, threads=1)
        try:
            assert executor.submit(StepPlan(0, ()), 0.0)._in_flight.result() == expected
        finally:
            executor.close()
    monkeypatch.setattr(model, "device", SECOND)
    executor.transfers(0.1)
    assert measured == [1]


def test_device_names_are_validated() -> None:
    assert EngineConfig(device="cuda:1").device == "cuda:1"
    for name in ("gpu", "cuda:", "cuda:-1", "cuda:1 "):
        with pytest.raises(ConfigError, match="device must be auto, cpu, cuda or cuda:N, got"):
            EngineConfig(device=name)
    with pytest.raises(ConfigError, match=r"device must be auto, cpu or cuda where Ray places .* got cuda:1"):
        EngineConfig(device="cuda:1", tensor_parallel_size=2)


def test_expandable_segments_are_enabled_unless_the_allocator_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    applied = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", applied.append)
    for name, value, expected in (
        ("PYTORCH_CUDA_ALLOC_CONF", "", ["expandable_segments:True"]),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64", []),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", []),
    ):
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        monkeypatch.setenv(name, value)
        applied.clear()
        cuda.expand_segments()
        assert applied == expected


def test_weights_that_do_not_fit_report_free_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    shutil.copy(builtin_model_path() / "config.json", tmp_path)
    chosen = loader._Choice(torch.float32, torch.float32, SECOND, TorchOps(), TorchAttention())
    monkeypatch.setattr(loader, "_choose", lambda *args, **options: chosen)
    monkeypatch.setattr(loader, "CausalLM", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 29, 80 << 30))
    with pytest.raises(ModelError, match=r"weights do not fit on device cuda:1: .* 1\.50 of 80\.00 GiB are free; end"):
        loader.load_model(tmp_path, LoadSpec(load_format="dummy"))


MODEL: Any = SimpleNamespace(ops=SimpleNamespace(use_threads=lambda count: torch.set_num_threads(1)))


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_calls_run_in_order_on_the_thread_that_asks() -> None:
    thread, ran = CallerThread(MODEL, 2), list[tuple[int, int]]()

    def call(number: int) -> int:
        ran.append((number, threading.get_ident()))
        return number

    first, second = (thread.submit(lambda number=number: call(number)) for number in (1, 2))
    thread.after_these(lambda: call(3))
    assert not ran
    with ThreadPoolExecutor(1) as another:
        assert another.submit(second.result).result() == 2
    assert first.result() == 1
    thread.after_these(lambda: call(4))
    assert [number for number, _ in ran] == [1, 2, 3, 4]
    assert len({ident for _, ident in ran[:3]} | {threading.get_ident()}) == 2


def test_result_raises_the_error_and_later_calls_run() -> None:
    thread = CallerThread(MODEL, 2)
    failing, later = thread.submit(lambda: 1 // 0), thread.submit(lambda: 1)
    with pytest.raises(ZeroDivisionError):
        failing.result()
    assert later.result() == 1


@pytest.mark.usefixtures("torch_threads")
def test_the_caller_keeps_its_number_of_torch_threads() -> None:
    thread = CallerThread(MODEL, 2)
    for _ in range(2):
        assert thread.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 2
