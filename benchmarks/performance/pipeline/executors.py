"""The executors that are compared: a pipeline of ranks, and this process, with one thread each."""

from __future__ import annotations

from pathlib import Path

from skipjoin.exec.base import LargestStep
from skipjoin.exec.local import LocalExecutor
from skipjoin.exec.rank_model import RankModel
from skipjoin.exec.rank_spec import make_store
from skipjoin.exec.ranks.launch import GroupSizes
from skipjoin.exec.ranks.own_ranks import OwnLauncher
from skipjoin.exec.ranks.ranks import RankedExecutor
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model

SHAPE = {"num_hidden_layers": 24, "hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8}
BLOCK_SIZE, DEVICE_BLOCKS = 16, 1500


def pipeline(folder: Path, dtype: str, stages: int) -> RankedExecutor:
    largest = LargestStep(DEVICE_BLOCKS * BLOCK_SIZE, DEVICE_BLOCKS, DEVICE_BLOCKS * BLOCK_SIZE)
    model = RankModel(str(folder), LoadSpec(dtype=dtype), largest, BLOCK_SIZE, threads=1)
    return RankedExecutor(
        model,
        GroupSizes(1, stages),
        lambda rank_specs, budgets: (DEVICE_BLOCKS, 0),
        launcher=OwnLauncher(),
        max_restarts=0,
        on_progress=lambda what, share: None,
    )


def local(folder: Path, dtype: str) -> LocalExecutor:
    model = load_model(folder, LoadSpec(dtype=dtype))
    return LocalExecutor(model, make_store(model, DEVICE_BLOCKS, 0, BLOCK_SIZE), threads=1)
