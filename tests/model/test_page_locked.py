"""Page-locked memory that CUDA registers, and the fallbacks where it cannot, with a fake CUDA runtime."""

from __future__ import annotations

import gc
import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skipjoin.model import page_locked
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.page_locked import page_locked_bytes

SIZE = 3 * 4096 + 5
TINY = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
SHAPE = TINY | {"num_attention_heads": 2, "max_position_embeddings": 8}


class FakeRuntime:
    """Fake CUDA runtime."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
        self.code = code
        self.locked: dict[int, int] = {}
        names = {"cudaHostRegister": self.register, "cudaHostUnregister": self.unregister}
        monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(**names))

    def unregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def register(self, address: int, size: int, flags: int) -> int:
        assert address % 4096 == 0
        assert flags == 3
        if not self.code:
            self.locked[address] = size
        return self.code


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    zeros = torch.zeros

    def recording_zeros(size: Any, *, pin_memory: bool = False, **rest: Any) -> torch.Tensor:
        if pin_memory:
            sizes.append(size)
        return zeros(size, **rest)

    monkeypatch.setattr(torch, "zeros", recording_zeros)
    return sizes


def test_memory_is_locked_in_place_with_its_exact_size(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(monkeypatch)
    memory, unlock = page_locked_bytes(SIZE)
    assert memory.shape == (SIZE,)
    assert not memory.any()
    assert runtime.locked == {memory.data_ptr(): SIZE}
    memory.fill_(7)
    unlock()
    assert runtime.locked == {}


def test_deleted_caches_unlock_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(monkeypatch)
    cache = PagedKV(5, 4, ModelConfig.from_dict(SHAPE), torch.bfloat16, "cpu", pin=True)
    view = cache.block_view()
    assert list(runtime.locked.values()) == [5 * cache.block_bytes]
    assert view.data_ptr() in runtime.locked
    del cache
    gc.collect()
    assert runtime.locked == {}
    view.fill_(1)  # the memory itself lives as long as its views


@pytest.mark.parametrize("code", [2, 801, RuntimeError("no CUDA")])
def test_torch_locks_memory_that_cuda_rejects(
    monkeypatch: pytest.MonkeyPatch, pinned: list[int], code: int | RuntimeError
) -> None:
    if isinstance(code, int):
        FakeRuntime(monkeypatch, code)
    else:

        def no_cuda() -> Any:
            raise code

        monkeypatch.setattr(torch.cuda, "cudart", no_cuda)
    memory, unlock = page_locked_bytes(SIZE)
    assert pinned == [SIZE]
    assert memory.shape == (SIZE,)
    unlock()


@pytest.mark.parametrize("cuts", [False, True])
def test_memory_that_cannot_be_locked_is_pageable_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, pinned: list[int], caplog: pytest.LogCaptureFixture, *, cuts: bool
) -> None:
    """Torch would round the size up to more than is available, or fails."""
    FakeRuntime(monkeypatch, 2)
    if cuts:
        pages = {"SC_AVPHYS_PAGES": 4 - 1, "SC_PAGE_SIZE": 4096}  # torch would take four
        monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    else:

        def fails(*args: Any, **rest: Any) -> torch.Tensor:
            raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(torch, "zeros", fails)
    with caplog.at_level(logging.WARNING, page_locked.__name__):
        memory, unlock = page_locked_bytes(SIZE)
    assert pinned == []
    assert memory.shape == (SIZE,)
    assert not memory.any()
    unlock()
    assert ["cannot be page-locked" in record.message for record in caplog.records] == [True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_recognizes_locked_memory() -> None:
    for _ in range(3):  # the same addresses, again and again
        memory, unlock = page_locked_bytes(64 << 20)
        assert memory.is_pinned()
        device = torch.arange(64 << 20, device="cuda").to(torch.uint8)
        memory.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(memory, device.cpu())
        unlock()
        assert not memory.is_pinned()
        del memory
