from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from skipjoin.kv_format import CACHE_FORMATS
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.config import ModelConfig
from skipjoin.model.errors import ModelError
from skipjoin.model.kv_cache import PagedKV, cache_format_of

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 32,
        "intermediate_size": 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
)


def test_fields_of_packed_batches():
    batch = PackedBatch.build([Segment([7, 8, 9], 3, [5, 2]), Segment([1], 0, [9, 4, 3], False)], 4)
    assert batch.token_ids.tolist() == [7, 8, 9, 1]
    assert batch.positions.tolist() == [3, 4, 5, 0]
    assert batch.slots.tolist() == [23, 8, 9, 36]
    assert batch.query_start.tolist() == [0, 3, 4]
    assert batch.context_lens.tolist() == [6, 1]
    assert batch.block_tables.tolist() == [[5, 2, 0], [9, 4, 3]]
    assert batch.logit_rows.tolist() == [2]
    assert batch.row_starts == [0, 1, 1]
    assert (batch.num_tokens, batch.num_rows, batch.max_context, batch.decode_only) == (4, 1, 6, False)


def test_blocks_are_filled_from_both_ends():
    shared = [Segment([1, 2, 3], 2, [5, 2]), Segment([4, 5], 0, [5], reverse=True)]
    batch = PackedBatch.build([*shared, Segment([6, 7], 3, [8, 7], reverse=True)], 4)
    assert batch.slots.tolist() == [22, 23, 8, 23, 22, 32, 31]
    assert batch.positions.tolist() == [2, 3, 4, 0, 1, 3, 4]
    assert (batch.reversed.tolist(), batch.plain) == ([0, 1, 1], False)
    assert PackedBatch.build([Segment([1], 4, [0, 1])], 4).plain


def test_decodes_are_packed_alike_with_and_without_prompts():
    draw = random.Random(0)
    decodes = []
    for number in range(20):
        start = draw.randrange(40)
        blocks = [draw.randrange(90) for _ in range(start // 4 + 1 + draw.randrange(3))]
        decodes.append(Segment([draw.randrange(10)], start, blocks, sample=bool(number % 5), all_logits=not number % 5))
    decodes[7] = decodes[7]._replace(tokens=(), awaits=3)
    n, alone = len(decodes), PackedBatch.build(decodes, 4)
    mixed = PackedBatch.build([*decodes, Segment([1, 2], 0, [95])], 4)
    for name in ("token_ids", "positions", "slots", "sources", "context_lens", "reversed"):
        assert getattr(alone, name).tolist() == getattr(mixed, name)[:n].tolist(), name
    assert alone.block_tables.tolist() == mixed.block_tables[:n].tolist()
    assert alone.query_start.tolist() == mixed.query_start[: n + 1].tolist()
    assert alone.logit_rows is None
    assert (alone.starts, alone.lengths, alone.row_starts) == (mixed.starts[:n], [1] * n, mixed.row_starts[: n + 1])
    assert (alone.max_context, alone.plain, alone.decode_only) == (mixed.max_context, True, True)
    assert alone.max_block == max(max(segment.blocks) for segment in decodes)
    assert PackedBatch.build(decodes[:7], 4).sources is None


def test_batches_of_all_rows_have_no_row_index():
    batch = PackedBatch.build([Segment([1], 4, [0, 1]), Segment([2], 0, [3])], 4)
    assert batch.logit_rows is None
    assert batch.decode_only
    batch = PackedBatch.build([Segment([1, 2], 0, [0], False, True), Segment([3], 0, [1], True, True)], 4)
    assert batch.logit_rows is None
    assert batch.row_starts == [0, 2, 3]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], "at least one segment"),
        ([Segment([], 0, [1])], "at least one token"),
        ([Segment([1], 0, [0]), Segment([1, 2], 3, [1])], "segment 1 needs 5 slots, its blocks have 4"),
        ([Segment([1], 0, [])], "segment 0 needs 1 slots"),
        ([Segment([1], 0, [2]), Segment([1], -1, [0])], "segment 1 starts at -1"),
        ([Segment([1], 3, [0, 1]), Segment([1], 4, [1])], "segment 1 needs 5 slots, its blocks have 4"),
        ([Segment([1], 0, [-3])], "block -3 does not exist"),
    ],
)
def test_invalid_segments_are_rejected(segments, message):
    with pytest.raises(ValueError, match=message):
        PackedBatch.build(segments, 4)


def test_cache_layout():
    kv = PagedKV(6, 4, CONFIG, torch.bfloat16, "cpu")
    assert kv.block_bytes == PagedKV.bytes_per_block(CONFIG, 4, torch.bfloat16) == 3 * 2 * 2 * 4 * 8 * 2
    rows = kv.block_view()
    assert rows.shape == (6, kv.block_bytes // 2)
    assert rows.is_contiguous()
    keys, values = kv.layer(1)
    assert keys.shape == values.shape == (6, 4, 2, 8)
    keys[2] = 1
    values[2] = 2
    assert rows[2].sum() == 3 * 4 * 2 * 8
    assert rows[[0, 1, 3, 4, 5]].count_nonzero() == 0
    of = CACHE_FORMATS["int8"]
    int8 = PagedKV(6, 4, CONFIG, torch.bfloat16, "cpu", of=of)
    size = PagedKV.bytes_per_block(CONFIG, 4, torch.bfloat16, of=of)
    assert int8.block_bytes == size == 3 * 2 * 2 * 4 * (8 + 4)
    rows = torch.randn(2, 4, 2, 8).to(torch.bfloat16)
    rows[0, 1, 0] = 0
    where = (torch.tensor(5),)
    int8.write(1, where, (rows[0], rows[1]))
    for kept, given in zip(int8.read(1, where, torch.float32), rows, strict=True):
        assert ((kept - given).abs() <= given.abs().amax(-1, keepdim=True).float() / 127 / 2 * 1.001).all()
    assert int8.block_view()[:5].count_nonzero() == 0
    odd = dataclasses.replace(CONFIG, head_dim=6)
    with pytest.raises(
        ModelError, match="kv_cache_dtype int8 needs a head_dim that is a multiple of 4, the model has 6"
    ):
        cache_format_of("int8", odd)
    with pytest.raises(ValueError, match="must be at least 1, got 0 and 4"):
        PagedKV(0, 4, CONFIG, torch.float32, "cpu")
