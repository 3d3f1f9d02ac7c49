"""The group of ranks on GPUs, with NCCL and the GPUs faked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skipjoin.model import torch_group
from skipjoin.model.parallel import Shard
from skipjoin.model.torch_group import MAX_BYTES, TorchGroup


class Nccl:
    """Fake NCCL whose calls return when queued and take a second on the GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.left_by = 0.0, ""
        queued = dict(init_process_group=None, new_group=None, recv=None, is_initialized=True)
        for name, result in queued.items():
            monkeypatch.setattr(torch_group.dist, name, lambda *args, result=result, **options: result)
        monkeypatch.setattr(torch_group.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=self.wait))
        monkeypatch.setattr(torch_group.dist, "destroy_process_group", lambda: self.leave("in order"))
        monkeypatch.setattr(torch_group.dist.distributed_c10d, "_abort_process_group", lambda: self.leave("at once"))

    def wait(self) -> None:
        self.now += 1.0

    def leave(self, how: str) -> None:
        self.left_by = how


def group_of(backend: str) -> TorchGroup:
    store: Any = None
    return TorchGroup(Shard(pp_rank=1, pp_size=2), store, backend=backend, timeout_s=60.0)


def test_stages_measure_the_wait_for_the_previous_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    Nccl(monkeypatch)
    group = group_of("nccl")
    hidden: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    for seconds in (1.0, 2.0):
        group.receive(hidden)
        assert group.waited_s == seconds


@pytest.mark.parametrize(("backend", "how"), [("nccl", "at once"), ("gloo", "in order")])
def test_leaving_an_nccl_group_does_not_wait_for_lost_ranks(
    monkeypatch: pytest.MonkeyPatch, backend: str, how: str
) -> None:
    found = Nccl(monkeypatch)
    group_of(backend).close()
    assert found.left_by == how


class FakeGpus:
    """Fake GPUs with equal tensors, so that the sum of two is twice a tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, wrong=0.0, refuses=False, other_works=True, gpus=2) -> None:
        from torch.distributed import _symmetric_memory as symmetric  # noqa: PLC0415

        self.one_shot, self.nccl, self.wrong, self.other_works = 0, 0, wrong, other_works
        Nccl(monkeypatch)
        stage = SimpleNamespace(group_name="7", rank=lambda: 0, size=lambda: gpus)
        monkeypatch.setattr(torch_group.dist, "new_group", lambda *args, **options: stage)
        monkeypatch.setattr(torch_group.dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(torch_group.dist, "all_gather", lambda parts, x, group: [part.copy_(x) for part in parts])
        monkeypatch.setattr(torch_group.dist, "all_to_all_single", lambda found, x, group: found.copy_(x))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch_group.torch, "device", lambda *args: "cpu")

        def empty(size: int, dtype: torch.dtype, device: object) -> torch.Tensor:
            if refuses:
                raise RuntimeError("no peer access\nmore")
            return torch.zeros(size, dtype=dtype)

        monkeypatch.setattr(symmetric, "empty", empty)
        monkeypatch.setattr(symmetric, "rendezvous", lambda held, group: None)
        kernel = SimpleNamespace(one_shot_all_reduce_out=self.one_shot_all_reduce_out)
        monkeypatch.setattr(torch_group.torch, "ops", SimpleNamespace(symm_mem=kernel))
        store: Any = None
        self.group = TorchGroup(Shard(tp_size=gpus), store, backend="nccl", timeout_s=60.0)

    def all_reduce(self, x: torch.Tensor, op: Any = None, group: Any = None) -> None:
        if op == torch_group.dist.ReduceOp.MIN:
            x.clamp_(max=float(self.other_works))
            return
        self.nccl += 1
        x.mul_(2)

    def one_shot_all_reduce_out(self, held: torch.Tensor, op: str, name: str, out: torch.Tensor) -> None:
        assert (op, name) == ("sum", "7")
        # During the set-up probe, the other rank's value is larger by one.
        other = held if self.one_shot else held + 1
        self.one_shot += 1
        out.copy_(held + other + self.wrong)


def sums_of(gpus: FakeGpus, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int]:
    before = gpus.one_shot, gpus.nccl
    for size in sizes:
        x = torch.ones((2, size // 2), dtype=dtype)
        gpus.group.all_reduce(x)
        assert (x == 2).all()
    return gpus.one_shot - before[0], gpus.nccl - before[1]


def test_small_sums_use_the_one_shot_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = FakeGpus(monkeypatch)
    max_size = MAX_BYTES // 2
    assert sums_of(gpus, 8, 4096, max_size) == (3, 0)
    assert sums_of(gpus, max_size + 8, 4 * max_size) == (0, 2)
    assert sums_of(gpus, 6) == (0, 1)  # not a multiple of 16 bytes
    assert sums_of(gpus, 4096, dtype=torch.float16) == (0, 1)


@pytest.mark.parametrize("fault", [{"wrong": 0.25}, {"refuses": True}, {"other_works": False}])
def test_one_failing_rank_disables_the_one_shot_kernel_on_all(
    monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]
) -> None:
    assert sums_of(FakeGpus(monkeypatch, **fault), 8) == (0, 1)


@pytest.mark.parametrize("values", [7, 4096, 300_000])
def test_three_gpus_do_not_use_all_reduce(monkeypatch: pytest.MonkeyPatch, values: int) -> None:
    """NCCL adds in an order that depends on an element's place."""
    gpus = FakeGpus(monkeypatch, refuses=True, gpus=3)
    x = torch.ones(values)
    gpus.group.all_reduce(x)
    assert (x == 3).all()
    assert gpus.nccl == 0
