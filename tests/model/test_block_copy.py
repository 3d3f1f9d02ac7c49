"""Copies of blocks by address: every byte arrives and none beside it is touched, whatever size and place."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from skipjoin.model.ops import build
from skipjoin.model.ops.block_copy import block_copy, compiled_copy, plain_copy, runs_of

LIBRARY = build.load_library()
WAYS = [
    plain_copy,
    pytest.param(
        compiled_copy(LIBRARY) if LIBRARY else None,
        marks=pytest.mark.skipif(LIBRARY is None, reason="no compiler, or no AVX-512 with bfloat16 products"),
    ),
]
KIB = 1 << 10
BLOCKS = 9
# Of the pools' first bytes from where memory was handed out: at the edge of a line, and not.
PLACES = (0, 1, 63)


@pytest.mark.parametrize("copy", WAYS, ids=["plain", "compiled"])
@pytest.mark.parametrize("block_bytes", [1, 24, 64, 255, 256, 1536, 4 * KIB, 16 * KIB, 16 * KIB + 1, 37 * KIB + 130])
def test_blocks_arrive_whole_and_alone(copy, block_bytes: int) -> None:
    generator = torch.Generator().manual_seed(block_bytes)
    draw = random.Random(block_bytes)
    size = BLOCKS * block_bytes
    for to_place in PLACES:
        for from_place in PLACES:
            whole = torch.randint(256, (2, size + 128), generator=generator, dtype=torch.uint8)
            target, source = whole[0, to_place : to_place + size], whole[1, from_place : from_place + size]
            expected = whole.clone()
            to, rows = draw.sample(range(BLOCKS), 5), draw.sample(range(BLOCKS), 5)
            for many, some in (((0, 1, 2, 3), (4, 5, 6, 7)), (to, rows), ((), ())):
                wanted = expected[0, to_place : to_place + size].view(BLOCKS, block_bytes)
                given = expected[1, from_place : from_place + size].view(BLOCKS, block_bytes)
                wanted[list(many)] = given[list(some)]
                copy(target.data_ptr(), source.data_ptr(), block_bytes, many, some)
            assert torch.equal(whole, expected)


def test_blocks_that_follow_each_other_on_both_sides_are_one_run() -> None:
    assert list(runs_of((), ())) == []
    assert list(runs_of((4,), (7,))) == [(4, 7, 1)]
    assert list(runs_of((4, 5, 6), (0, 1, 2))) == [(4, 0, 3)]
    assert list(runs_of((4, 5, 6), (0, 1, 3))) == [(4, 0, 2), (6, 3, 1)]
    assert list(runs_of((4, 6, 7), (0, 1, 2))) == [(4, 0, 1), (6, 1, 2)]
    assert list(runs_of((6, 5, 4), (2, 1, 0))) == [(6, 2, 1), (5, 1, 1), (4, 0, 1)]


def test_without_a_library_the_plain_copy_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipjoin.model.ops.block_copy.load_library", lambda: None)
    block_copy.cache_clear()
    try:
        assert block_copy() is plain_copy
    finally:
        block_copy.cache_clear()


def test_a_plain_run_is_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(ctypes, "memmove", lambda *args: calls.append(args))
    plain_copy(1000, 2000, 10, (3, 4, 8), (5, 6, 7))
    assert calls == [(1030, 2050, 20), (1080, 2070, 10)]
