from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import subprocess
from pathlib import Path

import pytest
import torch
from amx_cases import AVX512_NEEDS, BF16_NEEDS, TILES_NEEDS, compiled
from attention_cases import shape
from model_zoo import CONFIGS, PagedRunner, save_reference

from skipjoin.model import backends
from skipjoin.model.attention.cpp_backend import CppAttention
from skipjoin.model.attention.torch_backend import TorchAttention, rotate
from skipjoin.model.backends import implementations
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.errors import ModelError
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.large_pages import Arena
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model, random_model
from skipjoin.model.ops import build
from skipjoin.model.ops.base import GATES
from skipjoin.model.ops.calls import CPP_DTYPES
from skipjoin.model.ops.cpp_ops import CppOps, has_dtype
from skipjoin.model.ops.torch_ops import ACTIVATIONS, TorchOps, activated
from support.worlds import checkered

LIBRARY = build.load_library()
needs_library = pytest.mark.skipif(LIBRARY is None, reason="no compiler")
# Types that this processor's path supports.
DTYPES = [dtype for dtype in CPP_DTYPES if LIBRARY is None or has_dtype(LIBRARY, dtype)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def drawn(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that the relative error of the whole tensor against a float64 result is small."""
    assert ours.isfinite().all()
    limit = {torch.float32: 1e-6, torch.float16: 2e-3}.get(ours.dtype, 1e-2)
    assert (ours.double() - expected).norm() <= limit * expected.norm()


@needs_library
@dtypes
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (1, 1), (70, 33), (130, 96)])
def test_linear(dtype, outputs, inputs):
    ops = CppOps(LIBRARY, dtype)
    weight, bias = drawn(dtype, 2 * outputs, inputs, seed=1), drawn(dtype, 2 * outputs, seed=2)
    plain, with_bias = ops.linear(weight, None), ops.linear(weight, bias)
    gates = [(name, ops.linear(weight, bias, name)) for name in GATES]
    activations = [(name, ops.linear(weight, bias, name), ops.linear(weight, None, name)) for name in ACTIVATIONS]
    for rows in (1, 2, 7, 12, 13, 24, 25, 64, 300):
        x = drawn(dtype, rows, inputs + 3)[:, :inputs]
        exact = x.double() @ weight.double().T
        assert_near(plain(x), exact)
        assert_near(with_bias(x), exact + bias.double())
        assert torch.equal(plain.rows(torch.tensor([0, outputs, 2 * outputs - 1])), weight[[0, outputs, -1]])
        total = drawn(dtype, rows, 2 * outputs, seed=3)
        expected = total.double() + exact + bias.double()
        with_bias.add_to(x, total)
        assert_near(total, expected)
        shifted = exact + bias.double()
        for name, gated in gates:
            assert_near(gated(x), activated(name, shifted))
        for name, one, other in activations:
            assert_near(one(x), activated(name, shifted.clone()))
            assert_near(other(x), activated(name, exact.clone()))


@needs_library
@dtypes
def test_matrices_are_packed_as_one(dtype):
    parts = [drawn(dtype, rows, 33, seed=rows) for rows in (20, 1, 37)]
    ops, x = CppOps(LIBRARY, dtype), drawn(dtype, 5, 33)
    for activation in (None, "silu_and_mul"):
        assert torch.equal(ops.linear(parts, None, activation)(x), ops.linear(torch.cat(parts), None, activation)(x))


@needs_library
@dtypes
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_far_values(dtype, name):
    far = 200 if name == "relu2" else 3e4  # whose square is no float16
    x = torch.cat([torch.arange(-12, 12, 0.01), torch.tensor([-3e4, -200, 0, 200, far])]).to(dtype)[:, None]
    linear = CppOps(LIBRARY, dtype).linear(torch.ones(1, 1, dtype=dtype), None, name)
    ours, expected = linear(x), activated(name, x.double())
    # Rounding once; in the tail of gelu also the error of the distribution function.
    limit = torch.finfo(dtype).eps / 2 * expected.abs() + 3e-6
    assert ((ours.double() - expected).abs() <= limit).all()
    assert linear(torch.full_like(x, torch.nan)).isnan().all()


@needs_library
@dtypes
def test_threads_change_no_bits(dtype, two_threads):
    ops = CppOps(LIBRARY, dtype)
    x, linear = drawn(dtype, 130, 96), ops.linear(drawn(dtype, 200, 96, seed=1), None)
    # Sizes large enough for two threads to share the work.
    heads, cos_sin, positions = drawn(dtype, 500, 6, 64), torch.rand(500, 64), torch.arange(500)

    def results() -> list[torch.Tensor]:
        turned = heads.clone()
        CppAttention(LIBRARY).rotate(turned[:, :4], turned[:, 4:], positions, cos_sin)
        return [linear(x), ops.rms_norm(x[0, :64], 1e-5)(heads), turned]

    shared = results()
    torch.set_num_threads(1)
    for a, b in zip(results(), shared, strict=True):
        assert torch.equal(a, b)


@needs_library
@dtypes
def test_norm_and_rotary_embedding(dtype):
    ops, reference = CppOps(LIBRARY, dtype), TorchOps()
    for width in (16, 40, 100, 768):
        x, weight = drawn(dtype, 9, width), drawn(dtype, width, seed=1)
        scale = (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        assert_near(ops.rms_norm(weight, 1e-5)(x), x.double() * scale * weight.double())
        assert_near(ops.rms_norm(weight, 1e-5, 1.0)(x), x.double() * scale * (weight.double() + 1))
    qkv = drawn(dtype, 50, 8, 40)
    assert_near(
        ops.rms_norm(weight[:40], 1e-5)(qkv[:, 2:5]),
        reference.rms_norm(weight[:40].double(), 1e-5)(qkv[:, 2:5].double()),
    )
    cos_sin, positions = torch.rand(64, 24), torch.arange(50)
    expected = qkv.double()
    rotate(expected[:, :4], expected[:, 4:6], positions, cos_sin)
    CppAttention(LIBRARY).rotate(qkv[:, :4], qkv[:, 4:6], positions, cos_sin)
    assert_near(qkv, expected)


MIXES = {
    "decodes": [(40, 1), (1, 1), (0, 1), (200, 1), (15, 1)],
    "prefills": [(0, 33), (0, 2), (0, 17)],
    "mixed": [(30, 1), (0, 20), (64, 9), (7, 1), (100, 40), (16, 1)],
    "one": [(130, 1)],
}


@needs_library
@pytest.mark.parametrize(
    ("sizes", "dtype"), checkered([(4, 4, 64), (6, 2, 80), (8, 1, 128), (5, 5, 24), (3, 3, 20)], DTYPES), ids=str
)
def test_attention(dtype, sizes):
    for mix, window in itertools.product(MIXES, (0, 11)):
        check_attention(dtype, window, mix, sizes)


def check_attention(dtype, window, mix, sizes):
    heads, kv_heads, dim = sizes
    config, generator = shape(heads, kv_heads, dim), torch.Generator().manual_seed(len(mix))
    block_size, free = 8, torch.randperm(200, generator=generator).tolist()
    exact = PagedKV(200, block_size, config, torch.float64, "cpu")
    compiled = PagedKV(200, block_size, config, dtype, "cpu")
    exact.tensor.fill_(torch.nan)
    segments = []
    for start, length in MIXES[mix]:
        table = [free.pop() for _ in range(-(-(start + length) // block_size))]
        segments.append(Segment([0] * length, start, table))
        for t in range(start):
            past = torch.randn(2, 2, kv_heads, dim, generator=generator).to(dtype).double()
            exact.head_view()[table[t // block_size], :, t % block_size] = past.flatten(0, 2)
    compiled.tensor.copy_(exact.tensor)
    batch = PackedBatch.build(segments, block_size)
    qkv = drawn(dtype, batch.num_tokens, heads + 2 * kv_heads, dim, seed=5).split([heads, kv_heads, kv_heads], dim=1)
    cos_sin = torch.rand(512, dim // 2, generator=generator)
    options = {"layer": 1, "scale": 0.3, "window": window, "cos_sin": cos_sin}
    expected = TorchAttention().attend(*(x.double() for x in qkv), exact, batch, **options)
    ours = CppAttention(LIBRARY).attend(*qkv, compiled, batch, **options)
    assert_near(ours, expected)
    assert torch.equal(compiled.tensor.isnan(), exact.tensor.isnan())
    assert_near(compiled.tensor.nan_to_num(0), exact.tensor.nan_to_num(0))


@needs_library
def test_model_output_is_right_with_two_threads(tmp_path, two_threads):
    save_reference("llama", tmp_path)
    ids = [[i % 90 for i in range(70)], list(range(1, 30)), [3, 4, 5]]
    ours = PagedRunner(load_model(tmp_path, LoadSpec(attention="cpp")), ids, 4, seed=1).run()
    expected = PagedRunner(load_model(tmp_path, LoadSpec(attention="torch")), ids, 4, seed=2).run()
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@needs_library
def test_tied_embeddings_are_stored_once():
    config = CONFIGS["llama-tied-mha"]().to_dict()
    tied, untied = (random_model(config | {"tie_word_embeddings": is_tied}) for is_tied in (True, False))
    table = tied.config.vocab_size * tied.config.hidden_size
    assert untied.parameters - tied.parameters == table
    assert untied.weight_bytes - tied.weight_bytes >= 4 * table
    with pytest.raises(IndexError, match="token ids must be in"):
        PagedRunner(tied, [[tied.config.vocab_size]], 4, seed=1).run()


@needs_library
@pytest.mark.parametrize("name", ["llama-tied-mha", "opt", "gpt-neox", "glm4", "gemma2"])
def test_int8_weights_have_the_documented_error(name, tmp_path):
    save_reference(name, tmp_path)
    ids = [[i % 90 for i in range(40)], [3, 4, 5]]
    ours, expected = (
        torch.cat(PagedRunner(load_model(tmp_path, LoadSpec(quantization=kept)), ids, 4, seed=1).run())
        for kept in ("int8", "none")
    )
    # The error that docs/cpu.md states.
    assert 0 < (ours - expected).norm() <= 0.05 * expected.norm()


@needs_library
def test_int8_weights_are_rejected_elsewhere():
    raw = CONFIGS["llama"]().to_dict() | {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ModelError, match=r"quantization int8 needs .* got device cpu, attention torch"):
        random_model(raw, attention="torch", quantization="int8")
    with pytest.raises(ModelError, match="quantization must be one of none, int8, fp8; got 'int4'"):
        random_model(raw, quantization="int4")


@needs_library
def test_choice_of_operations():
    raw = CONFIGS["llama"]().to_dict() | {"architectures": ["LlamaForCausalLM"]}
    for dtype in CPP_DTYPES:
        name = str(dtype).removeprefix("torch.")
        assert random_model(raw, dtype=name).attention.name == ("cpp" if dtype in DTYPES else "torch")
        assert random_model(raw, dtype=name, attention="torch").ops.name == "torch"
    with pytest.raises(ModelError, match="needs device cpu and dtype"):
        implementations("cpp", torch.float64, torch.device("cpu"))


@pytest.fixture
def fresh(caplog):
    build.say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        yield caplog


@pytest.mark.parametrize("failure", ["no compiler", "does not compile", "crashes"])
def test_missing_library_falls_back_to_torch(failure, monkeypatch, tmp_path, fresh):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if failure == "no compiler":
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(build.shutil, "which", lambda name: None)
    elif failure == "crashes":
        monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    else:

        def refuse(command, **_):
            raise subprocess.CalledProcessError(1, command, stderr="x\nerror: this compiler is for another machine\ny")

        monkeypatch.setattr(build.subprocess, "run", refuse)
    assert list(build.libraries()) == []
    (warning,) = fresh.messages
    assert warning.startswith("no compiled CPU operations; the slower torch operations are used instead: ")
    reason = {"no compiler": "no C++ compiler", "does not compile": "another machine", "crashes": "nothing"}[failure]
    assert reason in warning


NATIVE = ("-march=native",)
WITHOUT_AMX = (*NATIVE, "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")


@pytest.mark.parametrize(
    ("features", "order"),
    [
        (TILES_NEEDS | BF16_NEEDS, [NATIVE, WITHOUT_AMX, build.AVX2, ()]),
        (BF16_NEEDS, [NATIVE, build.AVX2, ()]),
        (AVX512_NEEDS, [NATIVE, build.AVX2, ()]),
        (build.AVX2_NEEDS, [NATIVE, build.AVX2, ()]),
        ({"avx2"}, [NATIVE, ()]),
        ({"asimd"}, [NATIVE, ()]),
    ],
    ids=["amx", "avx512-bf16", "avx512", "avx2", "avx2 without fma", "neon"],
)
def test_paths_are_compiled_in_order_of_preference(features, order, monkeypatch, fresh):
    targets = []

    def refuse(target):
        targets.append(target)
        raise subprocess.CalledProcessError(1, [], stderr=f"error: bad value {len(targets)}")

    monkeypatch.setattr(build, "cpu_features", lambda: frozenset(features))
    monkeypatch.setattr(build, "compiled_library", refuse)
    assert list(build.libraries()) == []
    assert targets == order
    slower = "no compiled CPU operations; the slower torch operations are used instead"
    assert fresh.messages == [f"{slower}: error: bad value 1"]


@needs_library
def test_unsupported_compiler_flags_fall_back_to_the_next_path(monkeypatch, fresh):
    # Their libraries have the paths that the compiler's flags lead to; see test_flags_name_a_path_on_every_machine.
    features, refused = build.cpu_features(), []
    order = [
        (WITHOUT_AMX, "avx512-bf16", features >= TILES_NEEDS),
        (build.AVX2, "avx2", features >= build.AVX2_NEEDS),
        ((), "neon" if "asimd" in features else "generic", True),
    ]

    def refuse(target):
        if target in refused:
            raise subprocess.CalledProcessError(1, [], stderr="error: bad value")
        return libraries[target]

    libraries = {target: compiled(path if target else "generic") for target, path, is_compiled in order if is_compiled}
    monkeypatch.setattr(build, "compiled_library", refuse)
    refused.append(NATIVE)
    for target, path, is_compiled in order:
        if is_compiled:
            assert build.path_of(next(build.libraries())) == path
            why = "which are not the fastest for this CPU: error: bad value"
            assert fresh.messages == [f"compiled CPU operations for {path} are used, {why}"]
            fresh.clear()
        refused.append(target)


@needs_library
def test_failed_self_test_falls_back_to_the_next_path(monkeypatch, fresh):
    made = [ctypes.CDLL(str(path)) for path in (build.compiled_library(), compiled("generic"))]
    monkeypatch.setattr(backends, "libraries", lambda: iter(made))
    monkeypatch.setattr(backends, "_passes", lambda library, dtype: library is made[1])
    assert backends._compiled.__wrapped__(torch.float32) is made[1]
    first, second = map(build.path_of, made[:2])
    assert fresh.messages == [f"the compiled CPU operations for {first} fail their self-test; those for {second} run"]
    monkeypatch.setattr(backends, "_passes", lambda library, dtype: False)
    assert backends._compiled.__wrapped__(torch.float32) is None
    assert "the slower torch operations are used instead" in fresh.messages[1]


def test_library_is_built_once(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO, "skipjoin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def compile_nothing(command, **_):
        if "-c" not in command:
            calls.append(command)
        Path(command[-1]).touch()

    monkeypatch.setattr(build.shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(build.subprocess, "run", compile_nothing)
    assert build.must_compile()
    first = build.compiled_library()
    assert not build.must_compile()
    assert build.compiled_library() == first
    assert (len(calls), [p.name for p in first.parent.iterdir() if p.suffix != ".lock"]) == (1, [first.name])
    assert ["compiling" in line for line in caplog.messages] == [True]  # it takes a minute, so it is said
    for damage in (b"", first.read_bytes()[:-1]):  # as after a power loss
        first.write_bytes(damage)
        assert build.compiled_library() == first
    assert len(calls) == 3


@pytest.mark.parametrize("pages", ["as this system has them", "none in the kernel", "none in the system"])
def test_arena_with_and_without_huge_pages(monkeypatch, pages):
    if pages == "none in the kernel":
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 999, raising=False)  # advice unknown to the kernel
    elif pages == "none in the system":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    arena = Arena()
    parts = [arena.take(size) for size in (10, 100, 70 << 20, 5)]
    for i, part in enumerate(parts):
        part.fill_(i + 1)
        assert part.data_ptr() % 64 == 0
    assert [int(part.float().mean()) for part in parts] == [1, 2, 3, 4]
