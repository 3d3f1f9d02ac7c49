"""AMX: the emulator that carries its instructions out, and what the machine code makes with it.

Its results have the bits of the library with plain arithmetic in place of the instructions, of which
test_ops_invariance.py shows more.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import torch
from amx_cases import EMULATED, EMULATOR, INSTRUCTIONS, NEEDS, PLAIN

from skipjoin.model.attention.cpp_backend import CppAttention, check_attention
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.ops import build
from skipjoin.model.ops.check import check_ops, rows_are_independent
from skipjoin.model.ops.cpp_ops import CppOps
from skipjoin.model.ops.threads import share_between, threads_here

pytestmark = pytest.mark.skipif(not build.cpu_features() >= NEEDS, reason="this CPU lacks AVX-512 BF16")
DTYPE = torch.bfloat16
# Of check_amx.cpp: the instruction that must refuse it, and how.
FAULTS = {
    **dict.fromkeys(("reserved", "tile 8", "rows", "bytes", "half a tile", "palette"), ("LDTILECFG", "#GP")),
    **dict.fromkeys(("shapes", "columns", "pairs", "twice"), ("TDPBF16PS", "#UD")),
    **dict.fromkeys(("start", "load"), ("TILELOADD", "#UD")),
    **dict.fromkeys(("zero", "tile 3"), ("TILEZERO", "#UD")),
    "release": ("TILESTORED", "#UD"),
}


@pytest.fixture(scope="module")
def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """The instructions in the emulator, and plain arithmetic in place of them."""
    try:
        made = [ctypes.CDLL(str(build.compiled_library(flags))) for flags in (EMULATED, PLAIN)]
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no compiler for AMX: {error}")
    assert [build.path_of(library) for library in made] == ["amx", "amx"]
    return made[0], made[1]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = threads_here()
    share_between(2)
    yield
    share_between(before)


def emulated(library: ctypes.CDLL, figure: str) -> int:
    return ctypes.CFUNCTYPE(ctypes.c_int64)((f"amx_emulator_{figure}", library))()


def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * scale).to(DTYPE)


def test_the_emulator_does_what_the_manual_says(tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None or subprocess.run([compiler, *INSTRUCTIONS, "--version"], check=False).returncode:
        pytest.skip("no compiler for AMX")
    program, sources = tmp_path / "check_amx", [EMULATOR.with_name("check_amx.cpp"), EMULATOR]
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", *INSTRUCTIONS]
    subprocess.run([compiler, *flags, *sources, "-o", program], check=True, timeout=280)
    assert subprocess.run([program, "results"], capture_output=True, text=True, check=False).stdout == "ok\n"
    for fault, (instruction, kind) in FAULTS.items():
        told = subprocess.run([program, fault], capture_output=True, text=True, check=False).stderr
        assert re.match(rf"AMX emulator: {instruction} at rip 0x\w+ \(.*\): {kind}: ", told), (fault, told)


# Sizes near the least normal number, too: denormal numbers are zeros to the instruction.
@pytest.mark.parametrize("scale", [1.0, 2.0**-63])
@pytest.mark.usefixtures("two_threads")
def test_products_have_the_bits_of_plain_arithmetic(libraries, scale):
    ways = [CppOps(library, DTYPE, way="tiles") for library in libraries]
    made = emulated(libraries[0], "products")
    for outputs, inputs in ((96, 128), (70, 33), (40, 600)):
        x, weight = drawn(100, inputs, scale=scale), drawn(2 * outputs, inputs, scale=scale)
        pairs = [(ops.linear(weight, None), ops.gated_linear(weight, None)) for ops in ways]
        for ours, expected in zip(*pairs, strict=True):
            whole = ours(x)
            for rows in (slice(0, 1), slice(5, 22), slice(100)):
                result = ours(x[rows])
                assert result.equal(expected(x[rows])), (outputs, inputs, rows)
                assert result.equal(whole[rows]), (outputs, inputs, rows)
    assert emulated(libraries[0], "products") > made


# A prompt, a long one's next chunk, the same from the end of its blocks, decodes.
SEGMENTS = [
    Segment([0] * 70, 0, range(9)),
    Segment([0] * 20, 130, range(9, 28)),
    Segment([0] * 33, 10, range(28, 34), offset=3, reverse=True),
    Segment([0], 150, range(34, 53)),
    Segment([0], 20, range(53, 56), offset=2, reverse=True),
    Segment([0] * 2, 0, [56]),
]


@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("heads", [(4, 4, 64), (5, 1, 40), (8, 2, 96)], ids=str)
@pytest.mark.usefixtures("two_threads")
def test_attention_has_the_bits_of_plain_arithmetic(libraries, heads, window):
    query_heads, kv_heads, dim = heads
    sizes = {"hidden_size": query_heads * dim, "num_attention_heads": query_heads, "num_key_value_heads": kv_heads}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8, "max_position_embeddings": 512}
    config = ModelConfig.from_dict({"model_type": "llama", "head_dim": dim, **sizes})
    batch = PackedBatch.build(SEGMENTS, 8)
    split = drawn(batch.num_tokens, query_heads + 2 * kv_heads, dim).split([query_heads, kv_heads, kv_heads], dim=1)
    made, outputs = emulated(libraries[0], "products"), []
    for library in libraries:
        kv = PagedKV(57, 8, config, DTYPE, "cpu")
        kv.tensor.copy_(drawn(*kv.tensor.shape))
        outputs.append(CppAttention(library).attend(*split, kv, batch, layer=0, scale=0.3, window=window))
    assert outputs[0].isfinite().all()
    assert outputs[0].equal(outputs[1])
    assert emulated(libraries[0], "products") > made


def test_the_self_tests_of_the_start_pass(libraries):
    assert check_ops(CppOps(libraries[0], DTYPE, way="tiles"), DTYPE)
    assert rows_are_independent(CppOps(libraries[0], DTYPE, way="tiles"), DTYPE)
    assert check_attention(CppAttention(libraries[0]), DTYPE)


@pytest.mark.usefixtures("two_threads")
def test_every_thread_gives_its_tiles_back(libraries):
    linear = CppOps(libraries[0], DTYPE, way="tiles").linear(drawn(512, 256), None)
    for _ in range(8):  # a thread that is late for one product has work in another
        linear(drawn(64, 256))
    assert emulated(libraries[0], "threads") >= 2
    assert emulated(libraries[0], "configured") == 0
