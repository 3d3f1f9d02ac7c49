"""KV formats of this file alone: one of the cache and one of the CPU tier, from an option to served tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from skipjoin import kv_format
from skipjoin.builtin import builtin_model_path
from skipjoin.config import ConfigError, EngineConfig
from skipjoin.kv_format import CacheFormat, SwapFormat
from skipjoin.llm import LLM
from skipjoin.model.attention.cpp_backend import CppAttention
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model
from skipjoin.sampling import SamplingParams
from skipjoin.sim.models import model_shape
from support.worlds import exhaustive

PROMPTS = [f"Count from {first} to {first + 9}" for first in range(2, 8)]
# Six blocks of float32 numbers, too few for all prompts, so that requests are swapped out.
SETTINGS = {
    "dtype": "float32", "threads": 1, "profile": "off", "recipe": "fastserve", "max_num_seqs": 3, "block_size": 16,
    "max_model_len": 64, "kv_cache_gib": 6 * 65536 / 2**30, "swap_space_gib": 0.01,
}  # fmt: skip


class HalfRows(CacheFormat):
    """Numbers of 16 bits, which no kernel reads."""

    name = "half"
    storage = "float16"

    def row(self, head_dim: int) -> int:
        return head_dim

    def row_bytes(self, head_dim: int, itemsize: int) -> int:
        return 2 * head_dim

    def quantize(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.half()

    def dequantize(self, stored: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        return stored.to(dtype)


class HalfBlocks(SwapFormat):
    """Blocks whose numbers have 16 bits, converted by torch."""

    name = "half"

    def block_bytes(self, shape: tuple[int, int, int], row_bytes: int) -> int:
        heads, block_size, head_dim = shape
        return 2 * heads * block_size * head_dim

    def quantize(self, blocks: torch.Tensor, last: int) -> torch.Tensor:
        return blocks.half().flatten(1).view(torch.uint8)

    def dequantize(self, rows: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
        return rows.contiguous().view(torch.float16).view(-1, *shape).to(dtype)


@pytest.fixture
def registered() -> Iterator[None]:
    kv_format.cache_format(HalfRows)
    kv_format.swap_format(HalfBlocks)
    yield
    del kv_format.CACHE_FORMATS["half"], kv_format.SWAP_FORMATS["half"]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return generated()[0]


def generated(**settings: object) -> tuple[list[list[int]], LLM]:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(str(builtin_model_path()), **SETTINGS, **settings) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, params)], llm


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("field", ["kv_cache_dtype", exhaustive("swap_dtype")])
def test_a_registered_format_serves_the_same_tokens(field: str, expected: list[list[int]]) -> None:
    found, llm = generated(**{field: "half"})
    assert found == expected
    (spec,) = llm.engine.executor.rank_specs
    store = llm.engine.executor.store
    assert getattr(spec, field) == "half"
    if field == "kv_cache_dtype":
        assert llm.engine.info.dtype == "float32, half KV"
        assert store.device.tensor.dtype == torch.float16
        assert spec.attention == "torch", "no compiled attention reads the format"
        assert spec.cpu_block_bytes == spec.block_bytes == store.device.block_bytes
    else:
        assert 2 * spec.cpu_block_bytes == spec.block_bytes
        assert store.cpu.tensor.any(), "blocks were swapped out"


@pytest.mark.usefixtures("registered")
def test_sizes_and_conflicts_follow_from_the_format() -> None:
    shape = model_shape("opt-13b")
    assert 2 * shape.cpu_block_bytes(16, "half") == 2 * shape.cpu_block_bytes(16)  # its numbers have 16 bits already
    with pytest.raises(ConfigError, match=r"swap_dtype must be auto with kv_cache_dtype half, .* got int8"):
        EngineConfig(kv_cache_dtype="half", swap_dtype="int8")
    with pytest.raises(ConfigError, match="swap_dtype half is for KV in CPU memory: swap_space_gib must be above 0"):
        EngineConfig(swap_dtype="half", swap_space_gib=0)


def test_a_name_without_a_format_is_rejected() -> None:
    for field in ("kv_cache_dtype", "swap_dtype"):
        with pytest.raises(ConfigError, match=f"{field} must be one of auto, int8, got 'half'"):
            EngineConfig(**{field: "half"})


def test_formats_that_a_back_end_reads_keep_it() -> None:
    model = load_model(builtin_model_path(), LoadSpec(dtype="float32", kv_cache_dtype="int8"))
    assert isinstance(model.attention, CppAttention) == (model.ops.name == "cpp")
