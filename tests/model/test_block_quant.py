from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quant_cases import BLOCKS, DTYPES, INT8, check_bound, fill, pools, round_trip, same_rows, without_subnormals

from skipjoin.model.kv_cache import SwapPool
from skipjoin.model.ops import build
from skipjoin.model.ops.block_quant import BlockQuantizer, CompiledQuantizer, TorchQuantizer, block_quantizer
from skipjoin.sim.models import model_shape

LIBRARY = build.load_library()
WAYS = [
    TorchQuantizer(),
    pytest.param(
        CompiledQuantizer(LIBRARY) if LIBRARY else None, marks=pytest.mark.skipif(LIBRARY is None, reason="no compiler")
    ),
]
ways = pytest.mark.parametrize("by", WAYS, ids=["torch", "compiled"])
SHAPES = st.tuples(st.sampled_from(DTYPES), st.sampled_from([1, 3, 16, 33]), st.sampled_from([1, 16, 40, 64, 80, 128]))


@ways
@given(shape=SHAPES, seed=st.integers(0, 2**32), share=st.floats(0, 1))
def test_error_is_at_most_half_a_scale(by: BlockQuantizer, shape, seed: int, share: float) -> None:
    dtype, block_size, dim = shape
    kv, host = pools(dtype, block_size, dim)
    fill(kv, seed)
    last = max(1, round(share * block_size))
    check_bound(*round_trip(by, kv, host, last), last)
    # Rows outside the blocks are unchanged.
    assert (host.tensor[[0, 3]] == 1).all()


@ways
@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_after_the_last_token_are_ignored(by: BlockQuantizer, dtype: torch.dtype) -> None:
    rows = []
    for garbage in (torch.nan, 1e30, 0.0):
        kv, host = pools(dtype, 16, 64)
        kv.tensor.copy_(torch.randn(kv.tensor.shape, generator=torch.Generator().manual_seed(0)))
        kv.head_view()[4, :, 7:] = garbage
        round_trip(by, kv, host, 7)
        rows.append(host.tensor)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


@ways
def test_constant_channels_are_exact(by: BlockQuantizer) -> None:
    kv, host = pools(torch.bfloat16, 16, 64)
    blocks = kv.head_view()
    blocks.copy_(torch.randn(BLOCKS, blocks.shape[1], 1, 64).expand(blocks.shape))
    before, after = round_trip(by, kv, host, 16)
    assert torch.equal(before, after)


@pytest.mark.skipif(LIBRARY is None, reason="no compiler")
@given(shape=SHAPES, seed=st.integers(0, 2**32))
def test_compiled_quantizer_is_bit_identical_to_torch(shape, seed: int) -> None:
    found = []
    for by in (TorchQuantizer(), CompiledQuantizer(LIBRARY)):
        kv, host = pools(*shape)
        fill(kv, seed)
        _, after = round_trip(by, kv, host, shape[1])
        found.append((host, without_subnormals(after)))
    assert same_rows(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(("block_size", "ratio"), [(16, 0.625), (32, 0.5625)])
def test_block_size_relative_to_bfloat16(block_size: int, ratio: float) -> None:
    kv, host = pools(torch.bfloat16, block_size, 64)
    assert host.block_bytes == ratio * kv.block_bytes
    assert host.tensor.shape == (BLOCKS, host.block_bytes)
    shape = model_shape("opt-13b")
    simulated = [shape.cpu_block_bytes(block_size, swap_dtype) for swap_dtype in ("int8", "auto")]
    assert simulated[0] == ratio * simulated[1]


def test_empty_pools_are_rejected() -> None:
    kv, _ = pools(torch.float32, 4, 16)
    for blocks, block_size in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="num_blocks and block_size must be at least 1"):
            SwapPool(blocks, block_size, None, INT8)  # type: ignore[arg-type]
    assert kv.head_view().shape == (BLOCKS, 8, 4, 16)


def test_quantization_falls_back_to_torch_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipjoin.model.ops.block_quant.load_library", lambda: None)
    block_quantizer.cache_clear()
    try:
        assert isinstance(block_quantizer(INT8), TorchQuantizer)
    finally:
        block_quantizer.cache_clear()
