"""Masks remove exactly the tokens outside them, from exactly their rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from skipjoin.model.ops import build
from skipjoin.model.ops.token_mask import RemoveTokens, compiled_remove_tokens, torch_remove_tokens

LIBRARY = build.load_library()
WAYS = [
    torch_remove_tokens,
    pytest.param(
        compiled_remove_tokens(LIBRARY) if LIBRARY else None,
        marks=pytest.mark.skipif(LIBRARY is None, reason="no compiler"),
    ),
]


@pytest.mark.parametrize("remove", WAYS, ids=["torch", "compiled"])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000, 4096])
@pytest.mark.parametrize("rows", [[2], [0, 1, 3], [0, 1, 2, 3]], ids=str)
def test_only_tokens_outside_the_masks_are_removed(remove: RemoveTokens, vocab: int, rows: list[int]) -> None:
    generator = np.random.default_rng(vocab)
    logits = generator.normal(size=(4, vocab)).astype(np.float32)
    words = -(-vocab // 32)
    masks = generator.integers(-(2**31), 2**31, (len(rows), words)).astype(np.int32)
    # Empty and full words, and bits behind the vocabulary.
    masks[generator.random(masks.shape) < 0.3] = 0
    masks[generator.random(masks.shape) < 0.3] = -1
    expected = logits.copy()
    for row, mask in zip(rows, masks, strict=True):
        for token in range(vocab):
            if not int(mask[token // 32]) >> token % 32 & 1:
                expected[row, token] = -np.inf
    given = torch.from_numpy(logits)
    remove(given, rows, masks)
    assert np.array_equal(given.numpy(), expected)
