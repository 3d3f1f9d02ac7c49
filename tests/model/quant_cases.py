"""KV pools that are hard to quantize, and the error bound of every quantizer."""

from __future__ import annotations

import torch

from skipjoin.kv_format import Int8Channels
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV, SwapPool
from skipjoin.model.ops.block_quant import BlockQuantizer

INT8 = Int8Channels()
BLOCKS = 5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Half a unit in the last place, relative, and the smallest normal number, below which conversions may flush to zero.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}
# Error of float32 arithmetic in addition to half a scale: 255 times some units in its last place.
SLACK = 1e-4


def pools(
    dtype: torch.dtype, block_size: int, dim: int, *, layers: int = 2, device: str = "cpu"
) -> tuple[PagedKV, SwapPool]:
    config = ModelConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": 8,
            "hidden_size": 64,
            "intermediate_size": 8,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8,
            "head_dim": dim,
        }
    )
    host = SwapPool(BLOCKS, block_size, config, INT8)
    host.tensor.fill_(1)
    return PagedKV(BLOCKS, block_size, config, dtype, device), host


def fill(kv: PagedKV, seed: int) -> None:
    """Fill the pool with diverse ranges, offsets, constants, zeros, subnormals and some non-finite numbers."""
    draw = torch.Generator().manual_seed(seed)
    blocks = kv.head_view()
    channels = (*blocks.shape[:2], 1, blocks.shape[3])
    limit = torch.finfo(kv.tensor.dtype)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw, dtype=torch.float64)

    largest = min(limit.max, INT8.INFINITE / 2)
    size = largest ** (2 * drawn(*channels) - 1) * (drawn(*channels) > 0.1)
    offset = (2 * drawn(*channels) - 1) * largest**0.5 * (drawn(*channels) > 0.5)
    values = (2 * drawn(*blocks.shape) - 1) * size + offset
    values = torch.where(drawn(*channels) < 0.1, values[:, :, :1], values)
    values = torch.where(drawn(*channels) < 0.1, values.sign() * limit.max, values)
    values = torch.where(drawn(*blocks.shape) < 0.02, torch.tensor([torch.nan]).double(), values)
    odd = torch.tensor([torch.inf, -torch.inf, 3e38, -3e38, 1e-40])
    picked = odd[torch.randint(len(odd), blocks.shape, generator=draw)].double()
    values = torch.where(drawn(*blocks.shape) < 0.02, picked, values)
    blocks.copy_(values)


def round_trip(by: BlockQuantizer, kv: PagedKV, host: SwapPool, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return three blocks before and after quantization in another order, as [blocks, heads, tokens, dim]."""
    before = kv.head_view()[[3, 0, 4]].cpu()
    by.quantize(host, kv, (1, 4, 2), (3, 0, 4), last)
    by.dequantize(kv, host, (2, 3, 1), (1, 4, 2))
    return before, kv.head_view()[[2, 3, 1]].cpu()


def same_rows(ours: SwapPool, theirs: SwapPool) -> bool:
    """Return whether codes, scales and minima are equal, with -0 equal to 0."""
    heads, _, dim = ours.shape
    codes_at = heads * 2 * dim * 2
    rows, others = ours.tensor.cpu(), theirs.tensor.cpu()
    scales = (part[:, :codes_at].contiguous().view(torch.bfloat16) for part in (rows, others))
    return torch.equal(*scales) and torch.equal(rows[:, codes_at:], others[:, codes_at:])


def without_subnormals(x: torch.Tensor) -> torch.Tensor:
    """Flush subnormals to zero, as the conversions of processors and of Triton's interpreter do."""
    return x.where(x.abs() >= torch.finfo(x.dtype).tiny, 0.0)


def check_bound(before: torch.Tensor, after: torch.Tensor, last: int) -> None:
    """Assert the error bound of `Int8Channels`."""
    assert after.isfinite().all()
    x, y = before.double(), after.double()
    valid = torch.ones(x.shape[:3], dtype=torch.bool)
    valid[-1, :, last:] = False
    finite = (x.abs() < INT8.INFINITE) & valid[..., None]
    low, high = x.masked_fill(~finite, torch.inf).amin(2, True), x.masked_fill(~finite, -torch.inf).amax(2, True)
    low, high = low.where(low <= high, 0.0), high.where(low <= high, 0.0)
    scale = ((high - low + low.abs() / 128) / 255 * (1 + 1 / 128)).clamp(min=INT8.MIN_SCALE)
    rounding = ROUNDING[before.dtype] * torch.maximum(low.abs(), high.abs()) + torch.finfo(before.dtype).tiny
    allowed = scale * (0.5 + SLACK) + rounding
    assert ((x - y).abs() <= allowed)[finite].all()
    assert ((y - high).abs() <= allowed)[(x >= INT8.INFINITE) & valid[..., None]].all()
    # The minimum is rounded down.
    ends = allowed + low.abs() / 128
    assert ((y - low).abs() <= ends)[((x <= -INT8.INFINITE) | x.isnan()) & valid[..., None]].all()
    assert ((y - low).abs() <= ends)[~valid[..., None].expand_as(x)].all()
