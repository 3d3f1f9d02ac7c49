"""Compiled operations for several processors are right and bit-identical for a row in any batch.

Each library is compiled with flags of a processor whose instructions this one has. test_ops_arm.py does the same for
ARM under an emulator.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import platform
import shutil
import subprocess
from pathlib import Path

import amx_cases
import pytest
import torch
from amx_cases import TARGETS
from attention_cases import shape
from grouped_cases import KINDS, SHAPES, drawn_matrix, rounded_inputs
from model_zoo import CONFIGS

from skipjoin.kv_format import CACHE_FORMATS
from skipjoin.model import backends
from skipjoin.model.attention.check import cuts_change_nothing
from skipjoin.model.attention.cpp_backend import CppAttention, check_attention
from skipjoin.model.attention.torch_backend import TorchAttention
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.groups import coded_bytes, rounded
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.loader import random_model
from skipjoin.model.ops import build, choice
from skipjoin.model.ops.base import CLAMPED, GATED
from skipjoin.model.ops.calls import CPP_DTYPES
from skipjoin.model.ops.check import check_ops, rows_are_independent
from skipjoin.model.ops.cpp_ops import CppExperts, CppOps, has_dtype
from skipjoin.model.ops.experts import LoopedExperts
from skipjoin.model.ops.threads import share_between
from skipjoin.model.ops.torch_ops import TorchOps
from support.worlds import checkered, combinations

# Fewer rows than a tile, one more than a tile, several tiles and blocks of tiles, and enough for several threads.
ROWS = (1, 2, 17, 33, 600, 2048)
dtypes = pytest.mark.parametrize("dtype", CPP_DTYPES, ids=str)


def compiled(path: str) -> ctypes.CDLL:
    needs = TARGETS[path][1]
    if path == "generic" and platform.machine() == "aarch64":
        pytest.skip("every processor of this kind has NEON")
    if not build.cpu_features() >= needs:
        pytest.skip(f"this CPU lacks {', '.join(sorted(needs - build.cpu_features()))}")
    try:
        made = ctypes.CDLL(str(amx_cases.compiled(path)))
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no compiler for {path}: {error}")
    assert build.path_of(made) == path
    return made


# What compilers resolve `-march=native` to on such processors, and the path of each.
PROCESSORS = {
    ("-march=sapphirerapids",): "amx",
    ("-march=sapphirerapids", "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8"): "avx512-bf16",
    ("-march=cooperlake",): "avx512-bf16",
    ("-march=skylake-avx512",): "avx512",
    ("-march=haswell",): "avx2",
    ("-march=x86-64",): "generic",
}
# Instruction sets that the sources detect, fastest first.
MACROS = {"SKIPJOIN_TILES": "amx", "SKIPJOIN_BF16": "avx512-bf16", "SKIPJOIN_AVX512": "avx512", "SKIPJOIN_AVX2": "avx2"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of compilers for x86-64")
@pytest.mark.parametrize(
    ("flags", "path"), [*PROCESSORS.items(), *((flags, path) for path, (flags, _) in TARGETS.items())], ids=str
)
def test_flags_name_a_path_on_every_machine(flags, path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no compiler")
    source = Path(build.__file__).with_name("tiles.inc.cpp")
    command = [compiler, "-std=c++17", *flags, "-x", "c++", "-dM", "-E", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "error: bad value" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip(f"the compiler does not know {flags}")
    assert done.returncode == 0, done.stderr
    defined = {line.split()[1] for line in done.stdout.splitlines()}
    assert next((name for macro, name in MACROS.items() if macro in defined), "generic") == path


@pytest.fixture(scope="module", params=TARGETS)
def library(request) -> ctypes.CDLL:
    return compiled(request.param)


@pytest.fixture
def typed(library, dtype) -> ctypes.CDLL:
    """The library, if it converts the type."""
    if not has_dtype(library, dtype):
        pytest.skip("this processor does not convert the type")
    return library


def drawn(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dtypes
def test_operations_pass_their_checks(library, dtype):
    assert has_dtype(library, dtype) == (dtype != torch.float16 or build.path_of(library) != "generic")
    if has_dtype(library, dtype):
        for way in CppOps(library, dtype).ways():
            assert check_ops(CppOps(library, dtype, way=way), dtype), way
        assert check_attention(CppAttention(library), dtype)


@pytest.mark.exhaustive  # other tests take this processor's own library for this path if it has it
@pytest.mark.skipif(not build.cpu_features() >= build.AVX2_NEEDS, reason="this CPU lacks AVX2")
def test_operations_compiled_for_any_processor_with_avx2_pass_their_checks():
    library = ctypes.CDLL(str(amx_cases.quick_library(amx_cases.AVX2)))
    assert build.path_of(library) == "avx2"
    for dtype in CPP_DTYPES:
        assert check_ops(CppOps(library, dtype), dtype)
    assert check_attention(CppAttention(library), torch.float32)


@dtypes
def test_rows_are_bit_identical_in_every_batch(typed, dtype):
    max_rows, ways = max(ROWS), CppOps(typed, dtype).ways()
    for way, (outputs, inputs) in itertools.product(ways, ((96, 128), (70, 33))):
        ops = CppOps(typed, dtype, way=way)
        x, weight = drawn(dtype, max_rows, inputs), drawn(dtype, 2 * outputs, inputs, seed=1)
        bias, total = drawn(dtype, 2 * outputs, seed=2), drawn(dtype, max_rows, 2 * outputs, seed=3)
        linears = [ops.linear(weight, bias), ops.linear(weight, bias, "gelu"), ops.linear(weight, None, GATED)]

        def results(rows: slice) -> list[torch.Tensor]:
            sums = total[rows].clone()  # noqa: B023 - called before it changes
            linears[0].add_to(x[rows], sums)  # noqa: B023
            return [*(linear(x[rows]) for linear in linears), sums]  # noqa: B023

        together = results(slice(None))
        for count in ROWS:
            for first in (0, max_rows - count):
                rows = slice(first, first + count)
                for ours, expected in zip(results(rows), together, strict=True):
                    assert torch.equal(ours, expected[rows]), (way, outputs, inputs, rows)


def residue(linear, x: torch.Tensor) -> torch.Tensor:
    """Return the last bits of the sums, which rounding of the product to its type removes."""
    total = -linear(x)
    linear.add_to(x, total)
    return total


@pytest.mark.parametrize("floats", [0, 1], ids=["pairs", "floats"])
def test_weights_keep_the_fastest_implementation(library, tmp_path, monkeypatch, floats):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, dtype, choices = build.path_of(library), torch.bfloat16, []
    weights, x = [drawn(dtype, n, 96, seed=n) for n in (64, 70)], drawn(dtype, 40, 96)
    every = {"amx": choice.WAYS, "avx512-bf16": choice.WAYS[:2]}.get(path, choice.WAYS[:1])
    assert CppOps(library, dtype).ways() == every
    by_processor = "floats" if floats and "floats" in every else "vectors"

    def fastest(ways, seconds):
        choices.append((ways, all(seconds(way, 16) > 0 for way in ways)))
        return ways[-1] if len(choices) == 1 else ways[0]

    def residues(ways: tuple[str | None, ...]) -> list[torch.Tensor]:
        pairs = zip(weights, ways, strict=True)
        return [residue(CppOps(library, dtype, way=way).linear(weight, None), x) for weight, way in pairs]

    monkeypatch.setattr(choice, "fastest", fastest)
    faster = ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: floats)
    monkeypatch.setattr(library, "skipjoin_floats_are_faster", faster)
    has_tiles = path == "amx"
    kept = ("tiles" if has_tiles else by_processor, by_processor)
    suffix = ", products in float32" if by_processor == "floats" else ""
    assert CppOps(library, dtype).path == path + suffix
    expected = residues(kept)
    for _ in range(2):  # the second choice is read from the file
        assert all(map(torch.equal, residues((None, None)), expected))
    assert choices == [((by_processor, "tiles"), True)] * 2 * has_tiles
    assert [file.name.split("-")[1] for file in (tmp_path / "skipjoin").glob("*.json")] == ["amx"] * has_tiles
    # The paths differ, so that this test can fail.
    others = [residues((way, way)) for way in every]
    for one, other in itertools.combinations(others, 2):
        assert not any(map(torch.equal, one, other))


def test_float_products_are_bit_identical_without_bfloat16_pairs():
    with_pairs, without = compiled("avx512-bf16"), compiled("avx512")
    each = [CppOps(with_pairs, torch.bfloat16, way="floats"), CppOps(without, torch.bfloat16)]
    for rows, outputs, inputs in ((1, 96, 128), (17, 70, 33), (600, 130, 1002)):
        x, weight = drawn(torch.bfloat16, rows, inputs), drawn(torch.bfloat16, outputs, inputs, seed=1)
        assert torch.equal(*(residue(ops.linear(weight, None), x) for ops in each))


# One row, those of a few at a time and more, of tiles and more, and of several blocks of rows without tiles.
GROUPED_ROWS = (1, 2, 3, 5, 8, 9, 17, 150)


@pytest.mark.parametrize(("dtype", "kind"), checkered(CPP_DTYPES, KINDS, colors=3), ids=str)
def test_products_of_codes_are_right_and_bit_identical_in_every_batch(typed, dtype, kind):
    ops, plain = CppOps(typed, dtype), TorchOps()
    limit = {torch.float32: 2e-6, torch.float16: 1e-3}.get(dtype, 5e-3)
    for outputs, inputs in SHAPES:
        # Matrices of a product may be stored differently, or alike.
        other = KINDS[-1] if (outputs, inputs) == SHAPES[0] else kind
        gate, up = drawn_matrix(kind, outputs, inputs), drawn_matrix(other, outputs, inputs, seed=1)
        bias, weight = drawn(torch.float32, 2 * outputs), torch.cat([gate.widened(), up.widened()]).double()
        x = drawn(dtype, 170, inputs)
        total = drawn(dtype, len(x), 2 * outputs, seed=3)
        numbers = rounded_inputs(x).double()
        for activation in (None, "gelu", GATED):
            linear = ops.grouped([gate, up], bias, activation)
            together = linear(x)
            expected = plain.linear(weight, bias.double(), activation)(numbers)
            assert (together - expected).norm() <= limit * expected.norm(), (outputs, inputs, activation)
            for count in GROUPED_ROWS:
                for first in (0, len(x) - count):
                    rows = slice(first, first + count)
                    assert torch.equal(linear(x[rows]), together[rows]), (outputs, inputs, activation, rows)
        linear = ops.grouped([gate, up], bias)
        whole = linear.add_to(x, total.clone())
        assert torch.equal(linear.add_to(x[:3], total[:3].clone()), whole[:3])
        expected = total + plain.linear(weight, bias.double())(numbers)
        assert (whole - expected).norm() <= limit * expected.norm()
        ids = torch.tensor([3, 0, outputs - 1, 3])
        assert torch.equal(ops.grouped([gate], None).rows(ids), gate.widened()[ids].to(dtype))


@dtypes
def test_experts_are_bit_identical_in_every_batch(typed, dtype):
    hidden, width, count, per_row, rows = 70, 33, 5, 2, 80
    for way, in_codes in itertools.product(CppOps(typed, dtype).ways(), (False, True)):
        ops = CppOps(typed, dtype, way=way)

        def product(outputs, inputs, seed, activation=None, *, ops=ops, in_codes=in_codes):
            weight, bias = drawn(dtype, outputs, inputs, seed=seed), drawn(dtype, outputs, seed=seed + 1)
            return (
                ops.grouped([rounded(weight)], bias, activation) if in_codes else ops.linear(weight, bias, activation)
            )

        gate = CLAMPED if in_codes else GATED
        up = [product(2 * width, hidden, 2 * number, gate) for number in range(count)]
        down = [product(hidden, width, 20 + 2 * number) for number in range(count)]
        experts = ops.experts(up, down, per_row, among=True)
        assert isinstance(experts, CppExperts)
        x, total = drawn(dtype, rows, hidden, seed=40), drawn(dtype, rows, hidden, seed=41)
        logits = drawn(dtype, rows, count, seed=42).round(decimals=1)  # some are equal

        def added(first: int, size: int, *, experts=experts, x=x, total=total, logits=logits) -> torch.Tensor:
            own = slice(first, first + size)
            return experts.add_to(x[own], experts.route(logits[own]), total[own].clone())

        together = added(0, rows)
        routed = experts.route(logits)
        alone = LoopedExperts(up, down, per_row, among=True)
        assert torch.equal(together, alone.add_to(x, routed, total.clone())), (way, in_codes)
        assert torch.equal(routed.chosen, alone.route(logits).chosen)
        torch.testing.assert_close(routed.shares, alone.route(logits).shares)
        share_between(3)
        assert torch.equal(added(0, rows), together)
        share_between(1)
        for size in (1, 2, 9, 33):
            for first in (0, rows - size):
                assert torch.equal(added(first, size), together[first : first + size]), (way, in_codes, first, size)


def test_blocks_of_rows_change_nothing(library):
    linear = CppOps(library, torch.float32).grouped([drawn_matrix(KINDS[1], 16, 4096)], None)
    x = drawn(torch.float32, 180, 4096)  # more than the second-level cache holds
    assert torch.equal(linear(x)[170:], linear(x[170:]))


@dtypes
def test_infinite_inputs_of_products_of_codes_are_seen(typed, dtype):
    for rows, number in itertools.product((1, 20), (torch.inf, -torch.inf, torch.nan)):
        x = drawn(dtype, rows, 64)
        x[0, 40] = number
        found = CppOps(typed, dtype).grouped([drawn_matrix(KINDS[1], 32, 64)], None)(x)
        assert found[0].isnan().all()
        assert found[1:].isfinite().all()


def test_codes_take_their_bytes(library):
    matrix, ops = drawn_matrix(KINDS[1], 96, 128), CppOps(library, torch.float32)
    assert ops.grouped([matrix], None).weight_bytes == 96 * (128 // 2 + 128 // 32 * 4)
    assert coded_bytes(96, 128, bits=4, has_minimums=True) == 96 * (128 // 2 + 128 // 32 * 4)


def test_weights_are_rounded_per_group():
    weight = drawn(torch.float32, 7, 77)
    weight[3] = 0
    weight[4, 5] = 900  # an outlier costs precision in its own group only
    error = (rounded(weight).widened() - weight).abs()
    assert error[3].max() == 0
    assert error[4, 32:].max() < 0.02 < error[4, :32].max()
    assert (error <= rounded(weight).scales.float().repeat_interleave(32, 1)[:, :77] * 0.51).all()


# Query heads, key-value heads and head size; the second has groups of five and a size of no whole vector.
HEADS = [(4, 4, 64), (5, 1, 40), (2, 2, 300)]
# The last cut has reversed blocks.
CUTS = {
    "tokens": [1] * 300,
    "pieces": [7, 1, 120, 1, 64, 40, 2, 65],
    "halves": [150, 150],
    "a long and a short one": [299, 1],
}


@pytest.mark.parametrize(
    ("dtype", "window", "int8", "heads"),
    [
        pytest.param(dtype, *kind, heads, id=f"{dtype}-{kind}-{heads}", marks=marks)
        for (dtype, kind, heads), marks in combinations(
            CPP_DTYPES, [(0, False), (37, False), (37, True)], HEADS, parts=2
        )
    ],
)
def test_tokens_are_bit_identical_for_any_chunking(typed, dtype, heads, window, int8):
    query_heads, kv_heads, dim = heads
    config = shape(*heads)
    qkv = drawn(dtype, 300, query_heads + 2 * kv_heads, dim)
    tables = torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist()
    variant = {"cap": 2.0, "sinks": drawn(torch.float32, query_heads, seed=2)} if window else {}

    def attended(cut: list[int], with_others: bool, reverse: bool = False) -> torch.Tensor:
        kv, outputs, start = PagedKV(60, 8, config, dtype, "cpu", of=CACHE_FORMATS["int8" if int8 else "auto"]), [], 0
        kv.tensor.fill_(-1 if int8 else torch.nan)  # scales of all ones are NaN
        for count in cut:
            segments = [Segment([0] * count, start, tables[:38], reverse=reverse)]
            parts = [qkv[start : start + count]]
            if with_others:  # other sequences: a decode and a prompt
                segments += [Segment([0], 0, tables[38:39]), Segment([0] * 30, 0, tables[39:])]
                parts += [qkv[:1], qkv[:30]]
            batch = PackedBatch.build(segments, 8)
            split = torch.cat(parts).split([query_heads, kv_heads, kv_heads], dim=1)
            out = CppAttention(typed).attend(*split, kv, batch, layer=0, scale=0.3, window=window, **variant)
            outputs.append(out[:count])
            start += count
        return torch.cat(outputs)

    whole = attended([300], with_others=False)
    assert whole.isfinite().all()
    for name, cut in CUTS.items():
        if name == "tokens" and heads != HEADS[0]:
            continue  # in `pieces` the others decode for long enough
        assert torch.equal(
            attended(cut, with_others=name != "halves", reverse=name == "a long and a short one"), whole
        ), name


def test_one_log_line_names_the_path(caplog):
    raw = CONFIGS["llama"]().to_dict() | {"architectures": ["LlamaForCausalLM"]}
    build.say_once.cache_clear()
    with caplog.at_level(logging.INFO):
        ops, _ = (random_model(raw, dtype="bfloat16").ops for _ in range(2))
    (message,) = [line for line in caplog.messages if "CPU operations" in line]
    path, _, floats = ops.path.partition(", ")
    assert message.startswith(f"CPU operations: {path}")
    assert ("products of few rows use float32" in message) == (floats == "products in float32")


@pytest.mark.parametrize(
    ("path", "features", "why"),
    [
        ("amx", {"avx2", "avx512_bf16", "amx_bf16"}, ""),
        ("avx512-bf16", {"avx2", "avx512bw", "avx512_bf16"}, ""),
        ("avx512-bf16", {"avx512_bf16", "amx_bf16"}, "AMX, which is faster, but the compiler does not know it, or"),
        ("avx2", {"avx2", "avx512_bf16"}, "AVX-512 BF16, which is faster, but the compiler does not know it"),
        ("avx2", {"avx2"}, ""),
        ("generic", {"asimd"}, "this CPU has NEON"),
        ("generic", set(), ""),
        (None, {"avx2"}, "a C++ compiler makes them several times faster: install g++ or clang++, or set CXX"),
    ],
)
def test_slower_paths_report_the_reason(path, features, why, monkeypatch):
    monkeypatch.setattr(backends, "cpu_features", lambda: features)
    assert why in backends._slower(path)
    assert bool(why) == bool(backends._slower(path))


class RowsMatter(TorchOps):
    """Operations whose products depend in the last bit on the number of rows."""

    def linear(self, weight, bias, activation=None):
        exact = super().linear(weight, bias, activation)
        return lambda x: exact(x).nextafter(torch.tensor(torch.inf)) if len(x) == 17 else exact(x)


class CutsMatter(TorchAttention):
    """Attention that depends in the last bit on the number of tokens."""

    def attend(self, query, *arguments, **options):
        out = super().attend(query, *arguments, **options)
        return out.nextafter(torch.tensor(torch.inf)) if len(query) == 1 else out


def test_self_tests_detect_single_bit_errors():
    library = build.load_library()
    assert not rows_are_independent(RowsMatter(), torch.float32)
    assert not cuts_change_nothing(CutsMatter(), torch.float32)
    if library is not None:
        assert rows_are_independent(CppOps(library, torch.float32), torch.float32)
        assert cuts_change_nothing(CppAttention(library), torch.float32)
