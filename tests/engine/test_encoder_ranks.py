"""Encoders on several ranks, against one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pooled_models import VOCAB, write

from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model
from support.thread_ranks import on_ranks
from support.worlds import halved


@pytest.mark.parametrize("name", halved(["electra", "mpnet-mlm", "modernbert", "nomic", "gte", "bert"]))
def test_ranks_compute_the_states_of_one_rank(name: str, tmp_path: Path) -> None:
    write(name, tmp_path)
    draw = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, VOCAB, (length,), generator=draw).tolist() for length in (1, 30, 7)]
    segments = [Segment(text, 0, [0, 1], True, True) for text in texts]

    def states(group=None) -> torch.Tensor:
        spec = LoadSpec(dtype="float32")
        model = load_model(tmp_path, spec) if group is None else load_model(tmp_path, spec, group=group)
        kv = PagedKV(2, 16, model.config, model.dtype, "cpu", shard=model.shard)
        return model.wanted_rows(PackedBatch.build(segments, 16), kv)

    expected = states()
    for tp, pp in ((2, 1), (4, 1), (1, 2)):
        torch.testing.assert_close(on_ranks(tp, pp, states)[-1], expected, atol=2e-5, rtol=1e-5)
