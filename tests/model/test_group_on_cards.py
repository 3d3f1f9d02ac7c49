"""The group of ranks on cards: NCCL and the cards are played by doubles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skipjoin.model import torch_group
from skipjoin.model.parallel import Shard
from skipjoin.model.torch_group import TorchGroup


class Nccl:
    """Calls return when they are queued, and take a second on the card."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.left = 0.0, ""
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
        self.left = how


def group_of(backend: str) -> TorchGroup:
    store: Any = None
    return TorchGroup(Shard(pp_rank=1, pp_size=2), store, backend=backend, timeout_s=60.0)


def test_a_stage_knows_how_long_it_waited_for_the_stage_before(monkeypatch: pytest.MonkeyPatch) -> None:
    Nccl(monkeypatch)
    group = group_of("nccl")
    hidden: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    for seconds in (1.0, 2.0):
        group.receive(hidden)
        assert group.waited_s == seconds


@pytest.mark.parametrize(("backend", "how"), [("nccl", "at once"), ("gloo", "in order")])
def test_a_rank_on_a_card_does_not_wait_for_lost_ones_when_it_leaves(
    monkeypatch: pytest.MonkeyPatch, backend: str, how: str
) -> None:
    found = Nccl(monkeypatch)
    group_of(backend).close()
    assert found.left == how
