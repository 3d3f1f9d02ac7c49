"""AMX code on a processor with tiles or in the emulator, and the emulator itself.

Results are bit-identical to those of a library with plain arithmetic instead of the instructions, which
test_ops_invariance.py tests further. On a processor with tiles, one test of `make test-all` withholds permission from a
child process, which runs the other tests in the emulator.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from amx_cases import (
    BF16_NEEDS,
    EMULATOR,
    INSTRUCTIONS,
    PLAIN,
    TILES,
    TILES_NEEDS,
    emulated_library,
    has_tiles,
    has_tiles_here,
    quick_library,
)
from attention_cases import shape
from grouped_cases import KINDS, drawn_matrix
from withhold_tiles import ARCH_PRCTL, REQUEST_PERMISSION

from skipjoin.model.attention.cpp_backend import CppAttention, check_attention
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.ops import build
from skipjoin.model.ops.base import GATED
from skipjoin.model.ops.check import check_ops, rows_are_independent
from skipjoin.model.ops.cpp_ops import CppOps
from skipjoin.model.ops.threads import share_between, threads_here
from support.worlds import exhaustive

needs_bf16 = pytest.mark.skipif(not build.cpu_features() >= BF16_NEEDS, reason="this CPU lacks AVX-512 BF16")
# A processor with AMX executes the instructions that configure tiles even in a process without permission.
CONFIGURES_ITSELF = build.cpu_features() >= TILES_NEEDS
DTYPE = torch.bfloat16
# For each fault of check_amx.cpp, the instruction that must raise it and the exception.
FAULTS = {
    **dict.fromkeys(("reserved", "tile 8", "rows", "bytes", "half a tile", "palette"), ("LDTILECFG", "#GP")),
    **dict.fromkeys(("shapes", "columns", "pairs", "twice"), ("TDPBF16PS", "#UD")),
    **dict.fromkeys(("start", "load"), ("TILELOADD", "#UD")),
    **dict.fromkeys(("zero", "tile 3"), ("TILEZERO", "#UD")),
    "release": ("TILESTORED", "#UD"),
}


def with_instructions() -> ctypes.CDLL:
    """Return the native library, or another one if the compiler does not use AMX by itself."""
    native = ctypes.CDLL(str(build.compiled_library()))
    return native if build.path_of(native) == "amx" else ctypes.CDLL(str(quick_library(INSTRUCTIONS)))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    try:
        made = [
            with_instructions() if has_tiles_here() else emulated_library(tmp_path_factory.mktemp("emulated")),
            ctypes.CDLL(str(quick_library(PLAIN))),
        ]
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


@contextlib.contextmanager
def by_tiles(library: ctypes.CDLL) -> Iterator[None]:
    """Check that the emulator computed products in the meantime; a processor does not count its own."""
    before = None if has_tiles_here() else emulated(library, "products")
    yield
    assert before is None or emulated(library, "products") > before


def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * scale).to(DTYPE)


@pytest.mark.parametrize(
    ("features", "is_granted", "expected"),
    [
        (TILES_NEEDS | BF16_NEEDS, True, True),
        (TILES_NEEDS | BF16_NEEDS, False, False),
        (BF16_NEEDS, None, False),
        (build.AVX2_NEEDS, None, False),
        ({"asimd"}, None, False),
    ],
)
def test_tile_support_depends_on_features_and_permission(features, is_granted, expected):
    def permitted() -> bool:
        assert is_granted is not None, "the kernel must not be asked if the processor has no tiles"
        return is_granted

    assert has_tiles(features, permitted) == expected


def withheld(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program without permission to use tiles."""
    command = [sys.executable, str(Path(__file__).with_name("withhold_tiles.py")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is for the system calls of x86-64")
def test_the_filter_withholds_permission():
    ask = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); print(libc.syscall({}, {}, 18), ctypes.get_errno())"
    done = withheld("-c", ask.format(ARCH_PRCTL, REQUEST_PERMISSION))
    assert done.stdout == f"-1 {errno.EPERM}\n", done


@pytest.fixture(scope="module")
def check_amx(tmp_path_factory):
    """Return a function that compiles check_amx.cpp with further arguments and returns the program."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if platform.machine() != "x86_64" or compiler is None:
        pytest.skip("no compiler for AMX")
    if subprocess.run([compiler, *TILES, "--version"], capture_output=True, check=False).returncode:
        pytest.skip("the compiler does not know AMX")
    folder = tmp_path_factory.mktemp("check_amx")

    def program(name: str, *arguments: str | Path) -> Path:
        flags = ["-std=c++17", "-O1", "-ffp-contract=off", *TILES]
        source = EMULATOR.with_name("check_amx.cpp")
        subprocess.run([compiler, *flags, source, *arguments, "-o", folder / name], check=True, timeout=280)
        return folder / name

    return program


def output_of(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "has_stand_in", [False, exhaustive(True)], ids=["this processor", "simulated processor with AMX"]
)
def test_emulator_follows_the_manual(check_amx, has_stand_in):
    if has_stand_in and CONFIGURES_ITSELF:
        pytest.skip("this processor needs no simulation")
    program = check_amx(f"emulated{has_stand_in}", EMULATOR, *["-DAMX_STAND_IN"] * has_stand_in)
    assert output_of(program, "results").stdout == "ok\n"
    for fault, (instruction, kind) in FAULTS.items():
        done = output_of(program, fault)
        if CONFIGURES_ITSELF and instruction == "LDTILECFG":
            assert done.returncode == -signal.SIGSEGV, (fault, done)
        else:
            message = rf"AMX emulator: {instruction} at rip 0x\w+ \(.*\): {kind}: "
            assert re.match(message, done.stderr), (fault, done)


@pytest.mark.skipif(not has_tiles_here(), reason="tiles do not run in this processor")
def test_processor_follows_the_manual(check_amx):
    program = check_amx("native")
    assert output_of(program, "results").stdout == "ok\n"
    for fault, (_, kind) in FAULTS.items():
        expected = signal.SIGSEGV if kind == "#GP" else signal.SIGILL
        assert output_of(program, fault).returncode == -expected, fault


@pytest.mark.exhaustive  # builds two more libraries
@pytest.mark.skipif(not has_tiles_here(), reason="the emulator runs in this process")
def test_emulator_runs_without_permission():
    done = withheld("-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", __file__)
    assert done.returncode == 0, done.stdout
    # Tests of products, attention, self-tests, vectors, the emulator and the decision.
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) == 2 + 1 + 6 + 1 + 1 + 1 + 6, done.stdout


@needs_bf16
@pytest.mark.skipif(has_tiles_here(), reason="tiles run in this processor")
def test_vectors_are_used_without_permission():
    try:
        library = ctypes.CDLL(str(quick_library(INSTRUCTIONS)))
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no compiler for AMX: {error}")
    assert build.path_of(library) == "avx512-bf16"
    assert "tiles" not in CppOps(library, DTYPE).ways()
    assert check_ops(CppOps(library, DTYPE), DTYPE)
    assert check_attention(CppAttention(library), DTYPE)


# Scales near the minimum normal number as well, because the instruction flushes denormals to zero.
@needs_bf16
@pytest.mark.parametrize("scale", [1.0, 2.0**-63])
@pytest.mark.usefixtures("two_threads")
def test_products_are_bit_identical_to_plain_arithmetic(libraries, scale):
    ways = [CppOps(library, DTYPE, way="tiles") for library in libraries]
    for outputs, inputs in ((96, 128), (70, 33), (40, 600)):
        x, weight = drawn(100, inputs, scale=scale), drawn(2 * outputs, inputs, scale=scale)
        pairs = [(ops.linear(weight, None), ops.linear(weight, None, GATED)) for ops in ways]
        for ours, expected in zip(*pairs, strict=True):
            with by_tiles(libraries[0]):
                whole = ours(x)
            for rows in (slice(0, 1), slice(5, 22), slice(100)):
                result = ours(x[rows])
                assert result.equal(expected(x[rows])), (outputs, inputs, rows)
                assert result.equal(whole[rows]), (outputs, inputs, rows)


@needs_bf16
@pytest.mark.usefixtures("two_threads")
def test_products_of_codes_are_bit_identical_to_plain_arithmetic(libraries):
    x = drawn(100, 128)
    for kind in KINDS:
        matrix = drawn_matrix(kind, 70, 128)
        ours, expected = (CppOps(library, DTYPE).grouped([matrix], None) for library in libraries)
        with by_tiles(libraries[0]):
            whole = ours(x)
        assert whole.equal(expected(x)), kind
        assert ours(x[:3]).equal(whole[:3]), kind


# A prompt, the next chunk of a long one, the same from the other end of its blocks, and decodes.
SEGMENTS = [
    Segment([0] * 70, 0, range(9)),
    Segment([0] * 20, 130, range(9, 28)),
    Segment([0] * 33, 10, range(28, 34), reverse=True),
    Segment([0], 150, range(34, 53)),
    Segment([0], 20, range(53, 56), reverse=True),
    Segment([0] * 2, 0, [56]),
]


@needs_bf16
@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("heads", [(4, 4, 64), (5, 1, 40), (8, 2, 96)], ids=str)
@pytest.mark.usefixtures("two_threads")
def test_attention_is_bit_identical_to_plain_arithmetic(libraries, heads, window):
    query_heads, kv_heads, dim = heads
    config = shape(*heads)
    batch = PackedBatch.build(SEGMENTS, 8)
    split = drawn(batch.num_tokens, query_heads + 2 * kv_heads, dim).split([query_heads, kv_heads, kv_heads], dim=1)

    def attended(library: ctypes.CDLL) -> torch.Tensor:
        kv = PagedKV(57, 8, config, DTYPE, "cpu")
        kv.tensor.copy_(drawn(*kv.tensor.shape))
        return CppAttention(library).attend(*split, kv, batch, layer=0, scale=0.3, window=window)

    with by_tiles(libraries[0]):
        ours = attended(libraries[0])
    assert ours.isfinite().all()
    assert ours.equal(attended(libraries[1]))


@needs_bf16
def test_start_up_self_tests_pass(libraries):
    assert check_ops(CppOps(libraries[0], DTYPE, way="tiles"), DTYPE)
    assert rows_are_independent(CppOps(libraries[0], DTYPE, way="tiles"), DTYPE)
    assert check_attention(CppAttention(libraries[0]), DTYPE)


@needs_bf16
@pytest.mark.skipif(CONFIGURES_ITSELF, reason="this processor releases tiles without the emulator's knowledge")
@pytest.mark.usefixtures("two_threads")
def test_every_thread_releases_its_tiles(libraries):
    linear = CppOps(libraries[0], DTYPE, way="tiles").linear(drawn(512, 256), None)
    for _ in range(8):  # a thread that misses one product gets work in another
        linear(drawn(64, 256))
    assert emulated(libraries[0], "threads") >= 2
    assert emulated(libraries[0], "configured") == 0
