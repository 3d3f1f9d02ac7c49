"""The executors that are compared: a pipeline of ranks that Ray places, and this process; one thread each."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from random_model import VOCAB, make_model
from skipjoin.exec.local import LocalExecutor
from skipjoin.exec.memory import LargestStep
from skipjoin.exec.rank_spec import make_store
from skipjoin.exec.ranks.rank_actor import RankModel
from skipjoin.exec.ranks.ranks import GroupSizes, RankedExecutor
from skipjoin.model.config import ModelConfig
from skipjoin.model.loader import load_model

__all__ = ["BLOCK_SIZE", "DEVICE_BLOCKS", "SHAPE", "VOCAB", "local", "pipeline", "saved"]
SHAPE = {"layers": 24, "hidden": 512, "intermediate": 1376}
BLOCK_SIZE, DEVICE_BLOCKS = 16, 1500


def saved(folder: Path, dtype: str) -> ModelConfig:
    """Write the model into a folder."""
    make_model(folder, getattr(torch, dtype), **SHAPE)
    return ModelConfig.from_folder(folder)


def pipeline(folder: Path, dtype: str, stages: int) -> RankedExecutor:
    """The model on so many stages."""
    largest = LargestStep(DEVICE_BLOCKS * BLOCK_SIZE, DEVICE_BLOCKS, DEVICE_BLOCKS * BLOCK_SIZE)
    model = RankModel(str(folder), dtype, "cpu", "auto", "auto", 1, BLOCK_SIZE, 0.9, largest)
    return RankedExecutor(
        model,
        GroupSizes(1, stages),
        lambda rank_specs, budgets: (DEVICE_BLOCKS, 0),
        address=None,
        max_restarts=0,
        on_progress=lambda what, share: None,
    )


def local(folder: Path, dtype: str) -> LocalExecutor:
    """The model in this process."""
    model = load_model(folder, dtype=dtype)
    return LocalExecutor(model, make_store(model, DEVICE_BLOCKS, 0, BLOCK_SIZE), threads=1)
