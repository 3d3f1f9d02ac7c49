from __future__ import annotations

import numpy as np
import pytest
import torch

from skipjoin.model.ops import build
from skipjoin.model.ops.token_mask import TORCH_MASK_OPS, MaskOps, compiled_mask_ops

LIBRARY = build.load_library()
WAYS = [
    TORCH_MASK_OPS,
    pytest.param(
        compiled_mask_ops(LIBRARY) if LIBRARY else None, marks=pytest.mark.skipif(LIBRARY is None, reason="no compiler")
    ),
]


@pytest.mark.parametrize("ops", WAYS, ids=["torch", "compiled"])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000, 4096])
@pytest.mark.parametrize("rows", [[2], [0, 1, 3], [0, 1, 2, 3]], ids=str)
def test_only_tokens_outside_the_masks_are_removed(ops: MaskOps, vocab: int, rows: list[int]) -> None:
    generator = np.random.default_rng(vocab)
    logits = generator.normal(size=(4, vocab)).astype(np.float32)
    words = -(-vocab // 32)
    masks = generator.integers(-(2**31), 2**31, (len(rows), words)).astype(np.int32)
    # Empty and full words, and bits behind the vocabulary.
    masks[generator.random(masks.shape) < 0.3] = 0
    masks[generator.random(masks.shape) < 0.3] = -1
    masks[:, 0] |= 1
    expected = logits.copy()
    for row, mask in zip(rows, masks, strict=True):
        for token in range(vocab):
            if not int(mask[token // 32]) >> token % 32 & 1:
                expected[row, token] = -np.inf
    given = torch.from_numpy(logits)
    assert ops.best_allowed(given, rows, masks).tolist() == expected[rows].argmax(-1).tolist()
    assert np.array_equal(given.numpy(), logits)
    ops.remove_tokens(given, rows, masks)
    assert np.array_equal(given.numpy(), expected)


@pytest.mark.parametrize("ops", WAYS, ids=["torch", "compiled"])
@pytest.mark.parametrize("vocab", [70, 64 * 70])
def test_the_best_token_is_the_first_of_equals_and_always_allowed(ops: MaskOps, vocab: int) -> None:
    allowed = (5, 37, 66, vocab - 1)
    mask = np.zeros((1, -(-vocab // 32)), np.int32)
    for token in allowed:
        mask[0, token >> 5] |= np.uint32(1 << (token & 31)).view(np.int32)
    found = []
    for values in ((1, 2, 2, 2), (1, 1, 1, 2), (-np.inf, np.nan, -3, -3), (-np.inf,) * 4):
        logits = torch.full((1, vocab), 9.0)
        logits[0, list(allowed)] = torch.tensor(values, dtype=torch.float32)
        found += ops.best_allowed(logits, [0], mask).tolist()
    assert found == [37, vocab - 1, 66, 5]


@pytest.mark.parametrize("ops", WAYS, ids=["torch", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_best_token_of_a_row_is_the_first_of_equals(ops: MaskOps, dtype: torch.dtype) -> None:
    for vocab in (1, 40, 4099):
        logits = torch.from_numpy(np.random.default_rng(vocab).normal(size=(5, vocab))).to(dtype)
        logits[3, vocab // 2] = logits[3, vocab // 3] = 9
        logits[4] = -torch.inf
        assert ops.best(logits).tolist() == logits.float().numpy().argmax(-1).tolist()
