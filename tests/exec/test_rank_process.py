"""What a rank does before it connects to other ranks, without Ray."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from skipjoin.builtin import builtin_model_path
from skipjoin.exec import rank_model
from skipjoin.exec.base import LargestStep, RankError
from skipjoin.exec.rank_model import RankModel
from skipjoin.exec.ranks.rank_process import RankProcess
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.parallel import Shard


def test_a_rank_generates_dummy_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(builtin_model_path() / "config.json", tmp_path)
    dummy = LoadSpec(dtype="float32", attention="torch", load_format="dummy")
    of = RankModel(str(tmp_path), dummy, LargestStep(64, 4, 64), 16, threads=1)
    rank = RankProcess("127.0.0.1")
    part, room = rank.load(of, Shard(), None, 1)
    saved, _ = RankProcess("127.0.0.1").load(
        of._replace(folder=str(builtin_model_path()), load=replace(dummy, load_format="auto")),
        Shard(),
        None,
        ranks_here=1,
    )
    assert part == saved
    assert room.ram > 0
    # A rank that cannot record its decode steps reports so, and all ranks run them eagerly.
    assert rank.make_pools(4, 0)
    monkeypatch.setattr(rank_model, "replays", lambda model: True)
    monkeypatch.setattr(
        rank_model, "record_graphs", lambda model, pool, sizes, longest, note: found if sizes == (1, 4) else 0
    )
    for found, recorded in ((None, False), ("graphs", True)):
        rank.load(of._replace(graph_sizes=(1, 4)), Shard(), None, 1)
        assert rank.make_pools(4, 0) is recorded
        assert rank._loaded.graphs == found
    rank.forget_graphs()
    assert rank._loaded.graphs is None
    with pytest.raises(RankError, match=r"cannot allocate .* GiB and, in CPU memory, 0 GiB of KV"):
        rank.make_pools(1 << 40, 0)
