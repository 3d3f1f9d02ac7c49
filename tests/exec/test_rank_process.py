"""What a rank does before it connects to other ranks, without Ray."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from skipjoin.builtin import builtin_model_path
from skipjoin.exec.base import LargestStep, RankError
from skipjoin.exec.ranks import rank_process
from skipjoin.exec.ranks.rank_model import RankModel
from skipjoin.exec.ranks.rank_process import RankProcess
from skipjoin.model.parallel import Shard


def test_a_rank_generates_dummy_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(builtin_model_path() / "config.json", tmp_path)
    largest = LargestStep(64, 4, 64)
    of = RankModel(
        str(tmp_path),
        "float32",
        "cpu",
        "torch",
        "dummy",
        threads=1,
        block_size=16,
        gpu_share=0.9,
        largest=largest,
        swap_dtype="auto",
        kv_cache_dtype="auto",
        quantization="none",
    )
    rank = RankProcess("127.0.0.1")
    part, room = rank.load(of, Shard(), None, 1)
    saved, _ = RankProcess("127.0.0.1").load(
        of._replace(folder=str(builtin_model_path()), load_format="auto"), Shard(), None, ranks_here=1
    )
    assert part == saved
    assert room.ram > 0
    # A rank that cannot record its decode steps reports so, and all ranks run them eagerly.
    assert rank.make_pools(4, 0)
    monkeypatch.setattr(rank_process, "replays", lambda model: True)
    monkeypatch.setattr(
        rank_process, "record_graphs", lambda model, pool, sizes, longest: found if sizes == (1, 4) else 0
    )
    for found, recorded in ((None, False), ("graphs", True)):
        rank.load(of._replace(graph_sizes=(1, 4)), Shard(), None, 1)
        assert rank.make_pools(4, 0) is recorded
        assert rank._graphs == found
    rank.forget_graphs()
    assert rank._graphs is None
    with pytest.raises(RankError, match=r"cannot allocate .* GiB and, in CPU memory, 0 GiB of KV"):
        rank.make_pools(1 << 40, 0)
