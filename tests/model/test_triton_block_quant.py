from __future__ import annotations

import pytest
import torch
from quant_cases import DTYPES, check_bound, fill, pools, round_trip, same_rows, without_subnormals

pytest.importorskip("triton")

from skipjoin.model.kernels import block_quant
from skipjoin.model.kernels.block_quant import TritonQuantizer
from skipjoin.model.ops import block_quant as ops_block_quant
from skipjoin.model.ops.block_copy import MIN_RUN_BYTES
from skipjoin.model.ops.block_quant import BlockQuantizer, TorchQuantizer
from support.worlds import checkered, exhaustive

HAS_GPU = torch.cuda.is_available()


# Tiles of more and fewer tokens than a block, and a block size that is not a power of two.
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*checkered(DTYPES, [(16, 64, 5), (7, 40, 7), (24, 16, 1)]), exhaustive(DTYPES[0], (96, 80, 67))],
)
def test_kernels_are_bit_identical_to_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    block_size, dim, last = shape
    monkeypatch.setattr(block_quant, "_TILE", 2048)
    monkeypatch.setattr(ops_block_quant, "_AT_ONCE_BYTES", 1)  # one block at a time
    found, numbers = [], []
    for min_run in (None, 0, MIN_RUN_BYTES):  # by torch, through rows on the device, and in CPU memory
        by: BlockQuantizer = TorchQuantizer()
        if min_run is not None:
            monkeypatch.setattr(block_quant, "MIN_RUN_BYTES", min_run)
            by = TritonQuantizer()
        kv, host = pools(dtype, block_size, dim, layers=1, device="cuda" if HAS_GPU else "cpu")
        if HAS_GPU:
            host.tensor = host.tensor.pin_memory()
        fill(kv, block_size)
        kv.tensor.copy_(without_subnormals(kv.tensor))
        before, after = round_trip(by, kv, host, last)
        found.append(host)
        numbers.append(without_subnormals(after))
    for rows, after in zip(found[1:], numbers[1:], strict=True):
        assert same_rows(found[0], rows)
        if HAS_GPU or dtype != torch.bfloat16:
            check_bound(before, after, last)
            assert torch.equal(numbers[0], after)
        else:  # the interpreter truncates where GPUs round
            torch.testing.assert_close(numbers[0], after, rtol=2.0**-7, atol=0.0)
