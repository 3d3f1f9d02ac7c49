from __future__ import annotations

import ctypes
import random

import pytest
import torch

from skipjoin.model.ops import build
from skipjoin.model.ops.block_copy import (
    block_copy,
    compiled_copy,
    compiled_span_copy,
    plain_copy,
    plain_span_copy,
    runs_of,
)

LIBRARY = build.load_library()
NO_LIBRARY = pytest.mark.skipif(LIBRARY is None, reason="no compiler")
WAYS = [plain_copy, pytest.param(compiled_copy(LIBRARY) if LIBRARY else None, marks=NO_LIBRARY)]
SPAN_WAYS = [plain_span_copy, pytest.param(compiled_span_copy(LIBRARY) if LIBRARY else None, marks=NO_LIBRARY)]
KIB = 1 << 10
BLOCKS = 9
# Offsets of the pools' first bytes from the allocation, at and off a cache line.
PLACES = (0, 1, 63)


@pytest.mark.parametrize("copy", WAYS, ids=["plain", "compiled"])
@pytest.mark.parametrize("block_bytes", [1, 24, 64, 255, 256, 1536, 4 * KIB, 16 * KIB, 16 * KIB + 1, 37 * KIB + 130])
def test_blocks_are_copied_without_changing_others(copy, block_bytes: int) -> None:
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


@pytest.mark.parametrize("copy", SPAN_WAYS, ids=["plain", "compiled"])
@pytest.mark.parametrize(("heads", "size", "slot_bytes"), [(1, 4, 1), (6, 16, 32), (5, 3, 250)])
def test_slots_of_all_heads_are_copied_without_changing_others(copy, heads: int, size: int, slot_bytes: int) -> None:
    shape = (BLOCKS, heads, size, slot_bytes)
    target, source = torch.randint(256, (2, *shape), dtype=torch.uint8)
    expected, spans = target.clone(), [(0, 1), (size - 1, 1), (1, 2), (0, size)]
    to, rows = (3, 0, 8, 5), (8, 2, 0, 7)
    for block, other, (first, count) in zip(to, rows, spans, strict=True):
        expected[block, :, first : first + count] = source[other, :, first : first + count]
    copy(target.data_ptr(), source.data_ptr(), shape[1:], (to, rows, *zip(*spans, strict=True)))
    assert torch.equal(target, expected)
    copy(target.data_ptr(), target.data_ptr(), shape[1:], ((1,), (2,), (0,), (size,)))  # within one pool
    assert torch.equal(target[1], expected[2])


def test_blocks_adjacent_on_both_sides_form_one_run() -> None:
    assert list(runs_of((), ())) == []
    assert list(runs_of((4,), (7,))) == [(4, 7, 1)]
    assert list(runs_of((4, 5, 6), (0, 1, 2))) == [(4, 0, 3)]
    assert list(runs_of((4, 5, 6), (0, 1, 3))) == [(4, 0, 2), (6, 3, 1)]
    assert list(runs_of((4, 6, 7), (0, 1, 2))) == [(4, 0, 1), (6, 1, 2)]
    assert list(runs_of((6, 5, 4), (2, 1, 0))) == [(6, 2, 1), (5, 1, 1), (4, 0, 1)]


def test_missing_library_falls_back_to_the_plain_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipjoin.model.ops.block_copy.load_library", lambda: None)
    block_copy.cache_clear()
    try:
        assert block_copy() is plain_copy
    finally:
        block_copy.cache_clear()


def test_the_plain_copy_copies_each_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(ctypes, "memmove", lambda *args: calls.append(args))
    plain_copy(1000, 2000, 10, (3, 4, 8), (5, 6, 7))
    assert calls == [(1030, 2050, 20), (1080, 2070, 10)]
