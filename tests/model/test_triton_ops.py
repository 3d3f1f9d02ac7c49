"""Triton kernels of norms and activations against float64, in memory full of NaN, on a GPU or in the interpreter.

The interpreter truncates bfloat16 results instead of rounding them, so its tolerance is one unit in the last place.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from model_zoo import PagedRunner, save_reference

pytest.importorskip("triton")
import triton
import triton.language as tl

from skipjoin.model import loader
from skipjoin.model.attention.torch_backend import TorchAttention
from skipjoin.model.attention.triton_backend import TritonAttention
from skipjoin.model.kernels import norms
from skipjoin.model.kernels.activations import bias_and_activation, gate_and_mul
from skipjoin.model.kernels.norms import normalize
from skipjoin.model.kernels.rounding import round_rows
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.ops.base import CLAMPED, GATED, Routed
from skipjoin.model.ops.build import load_library
from skipjoin.model.ops.check import check_ops
from skipjoin.model.ops.cpp_ops import CppOps
from skipjoin.model.ops.scaled import rounded_rows, scaled_kind
from skipjoin.model.ops.torch_ops import ACTIVATIONS, TorchLayerNorm, TorchOps, TorchRMSNorm, activated
from skipjoin.model.ops.triton_ops import TritonExperts, TritonNorm, TritonOps
from support.worlds import combinations, exhaustive

ON_CARD = torch.cuda.is_available()
DEVICE = "cuda" if ON_CARD else "cpu"
gpu = [pytest.mark.gpu, pytest.mark.skipif(not ON_CARD, reason="no CUDA device")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
LIMIT = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    empty = torch.empty

    def full_of_nan(*shape, **options) -> torch.Tensor:
        made = empty(*shape, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", full_of_nan)


def drawn(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_near(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that the relative error of the whole tensor against a float64 result is small."""
    assert ours.is_contiguous()
    assert (ours.double() - expected).norm() <= LIMIT[ours.dtype] * expected.norm()


def exact_norm(x, weight, bias, center: bool) -> torch.Tensor:
    x = x.double()
    if center:
        x = x - x.mean(-1, keepdim=True)
    x = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    x = x if weight is None else x * weight.double()
    return x if bias is None else x + bias.double()


def exercise_norms(dtype: torch.dtype, rows: int, width: int, center: bool, affine: bool) -> None:
    """Call the kernel in all ways on [rows, width], with guards around its outputs."""
    # The mean is far from zero, so that only squares of centered values are precise.
    x, product = drawn(dtype, rows, width) + 3, drawn(dtype, rows, width, seed=1)
    weight = drawn(dtype, width, seed=2) if affine else None
    bias = drawn(dtype, width, seed=3) if affine and center else None
    assert_near(normalize(x, weight, bias, 1e-5, centre=center), exact_norm(x, weight, bias, center))
    framed = torch.full((rows + 2, width), torch.nan, dtype=dtype, device=DEVICE)
    total = framed[1:-1]
    total.copy_(x)
    ours = normalize(total, weight, bias, 1e-5, centre=center, product=product)
    assert_near(total, x.double() + product.double())
    assert_near(ours, exact_norm(total, weight, bias, center))
    assert framed[0].isnan().all()
    assert framed[-1].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "center", "rows", "width", "affine"),
    [
        pytest.param(dtype, center, *size, marks=marks)
        for (dtype, center, size), marks in combinations(
            DTYPES, [False, True], [(3, 1, True), (5, 17, False), (2, 100, True), (1, 1400, True)]
        )
    ],
    ids=str,
)
def test_norms(dtype, center, rows, width, affine):
    exercise_norms(dtype, rows, width, center, affine)


@dtypes
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(3, 16), (5, 40), (1, 24)])
def test_norms_of_strided_heads(dtype, center, heads, width):
    qkv = drawn(dtype, 11, heads + 3, width)
    before = qkv.clone()
    weight = drawn(dtype, width, seed=1)
    picked = qkv[:, 2 : 2 + heads]
    ours = normalize(picked, weight, None, 1e-5, centre=center)
    assert ours.shape == picked.shape
    assert_near(ours, exact_norm(picked, weight, None, center))
    assert torch.equal(qkv, before)


@dtypes
@pytest.mark.parametrize(("rows", "width"), [(2, 1), (3, 70), (2, 1030)])
# The result is zero where exp overflows.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_gates(dtype, rows, width):
    # Includes values that overflow exp.
    x = drawn(dtype, rows, 2 * width + 5) * 4
    x[0, :1] = -200
    x = x[:, : 2 * width]
    gate, up = x.double().chunk(2, dim=-1)
    assert_near(gate_and_mul(x, "silu"), F.silu(gate) * up)
    assert_near(gate_and_mul(x, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up)


@triton.jit
def cast_kernel(x: tl.tensor, codes: tl.tensor, n: tl.tensor, block: tl.constexpr) -> None:
    place = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(codes + place, tl.load(x + place, mask=place < n).to(codes.dtype.element_ty), mask=place < n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(5, 48), (3, 2064)])
def test_rows_are_rounded_to_eight_bits_as_torch_does(dtype, rows, width):
    """The interpreter converts to 8-bit floats unlike a card (a carry into the exponent is lost), in both kernels."""
    held = drawn(dtype, rows, width + 16) * torch.logspace(-20, 20, rows, device=DEVICE, dtype=dtype)[:, None]
    x = held[:, :width]
    x[1] = 0
    codes, scales = round_rows(x)
    expected, expected_scales = rounded_rows(x)
    assert torch.equal(scales, expected_scales)
    if DEVICE == "cpu":
        shares = (x.float() / scales).clamp(-448, 448)
        expected = torch.empty_like(expected)
        cast_kernel[(triton.cdiv(x.numel(), 64),)](shares, expected, x.numel(), block=64)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("ops", [pytest.param(TorchOps(), marks=gpu), pytest.param(TritonOps(), marks=gpu)])
def test_a_card_multiplies_eight_bit_floats(ops):
    scaled_kind(ops).check(torch.bfloat16, torch.device("cuda"))


def exercise_activation(dtype: torch.dtype, rows: int, width: int, name: str) -> None:
    """Call the kernel in place with and without bias, with guards around its outputs."""
    framed = torch.full((rows + 2, width + 3), torch.nan, dtype=dtype, device=DEVICE)
    x = framed[1:-1, :width]
    for bias in (None, drawn(dtype, width, seed=1)):
        x.copy_(drawn(dtype, rows, width) * 4)
        # Includes a value that overflows exp.
        x[0, 0] = -200
        expected = activated(name, x.double() if bias is None else x.double() + bias.double())
        assert bias_and_activation(x, bias, name) is x
        assert_near(x.contiguous(), expected)
        framed[1:-1, :width] = torch.nan
        assert framed.isnan().all()
        assert bias_and_activation(x, bias, name).isnan().all()


@pytest.mark.parametrize(
    ("dtype", "name", "rows", "width"),
    [
        pytest.param(dtype, name, *size, marks=marks)
        for (dtype, name, size), marks in combinations(DTYPES, [*ACTIVATIONS], [(2, 1), (3, 70), (2, 1030)])
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_bias_and_activation(dtype, name, rows, width):
    exercise_activation(dtype, rows, width, name)


def some_ops(dtype: torch.dtype) -> list:
    library = load_library() if dtype != torch.float16 and not ON_CARD else None
    return [TorchOps(), TritonOps()] + ([] if library is None else [CppOps(library, dtype)])


@dtypes
def test_residual_sums_and_the_following_norm(dtype):
    x, weight = drawn(dtype, 9, 48), drawn(dtype, 80, 48, seed=1)
    total, bias, scale = drawn(dtype, 9, 80, seed=2), drawn(dtype, 80, seed=3), drawn(dtype, 80, seed=4)
    for ops in some_ops(dtype):
        linears = ops.linear(weight.clone(), None), ops.linear(weight.clone(), bias)
        without = total.double() + x.double() @ weight.double().T
        for linear, expected in zip(linears, (without, without + bias.double()), strict=True):
            plain = total.clone()
            assert linear.add_to(x, plain) is plain
            assert_near(plain, expected)
            for norm, center in ((ops.rms_norm(scale, 1e-5), False), (ops.layer_norm(80, scale, bias, 1e-5), True)):
                fused = total.clone()
                ours = linear.add_to(x, fused, norm)
                assert_near(fused, expected)
                assert_near(ours, exact_norm(fused, scale, bias if center else None, center))
        shifted = exact_norm(total, scale.double() + 1, None, False)
        assert_near(ops.rms_norm(scale, 1e-5, 1.0)(total), shifted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, exhaustive(torch.float32), exhaustive(torch.float16)], ids=str)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_self_test_detects_faults(dtype, monkeypatch):
    assert check_ops(TritonOps(), dtype, DEVICE)
    right = TritonNorm.after
    monkeypatch.setattr(TritonNorm, "after", lambda self, product, total: right(self, product, total.clone()))
    assert not check_ops(TritonOps(), dtype, DEVICE)
    monkeypatch.undo()
    monkeypatch.setattr(TritonNorm, "__call__", lambda self, x: torch.empty_like(x).fill_(torch.nan))
    assert not check_ops(TritonOps(), dtype, DEVICE)


def test_rows_that_are_too_wide_use_torch(monkeypatch):
    monkeypatch.setattr("skipjoin.model.ops.triton_ops.MAX_WIDTH", 8)
    ops = TritonOps()
    assert isinstance(ops.rms_norm(torch.ones(8), 1e-5), TritonNorm)
    assert type(ops.rms_norm(torch.ones(9), 1e-5)) is TorchRMSNorm
    assert isinstance(ops.layer_norm(8, None, None, 1e-5), TritonNorm)
    assert type(ops.layer_norm(9, None, None, 1e-5)) is TorchLayerNorm


def test_number_of_warps_follows_the_row_width():
    assert [norms.warps_of(values) for values in (1, 512, 1024, 2048, 4096, 8192, 16384)] == [1, 1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize(
    "name",
    ["qwen3", *map(exhaustive, ("gpt-neox", "llama-biases", "opt-after", "gpt-neox-serial", "opt", "starcoder2"))],
)
def test_models_with_triton_ops_equal_torch(name, tmp_path, monkeypatch):
    reference = save_reference(name, tmp_path).to(DEVICE)
    # Qwen3's norms of queries and keys are a part of Triton's attention.
    attention = TritonAttention() if name == "qwen3" else TorchAttention()
    monkeypatch.setattr(loader, "implementations", lambda *_, **options: (TritonOps(), attention))
    model = loader.load_model(tmp_path, LoadSpec(dtype="float32", device=DEVICE))
    assert model.ops.name == "triton"
    ids = [[3, 1, 4, 1, 5, 9, 2], list(range(20, 33))]
    for tokens, ours in zip(ids, PagedRunner(model, ids, 4, seed=1).run(), strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([tokens], device=DEVICE)).logits[0]
        torch.testing.assert_close(ours, expected, atol=1e-3 if ON_CARD else 1e-4, rtol=0)


@pytest.mark.parametrize("case", [pytest.param(dtype, marks=gpu, id=str(dtype)) for dtype in LIMIT])
def test_kernels_at_real_sizes_on_gpu(case):
    for rows, width, center in (
        (64, 4096, False),
        (300, 5120, True),
        (17, 8192, False),
        (5, 16384, True),
        (33, 768, True),
    ):
        exercise_norms(case, rows, width, center, affine=True)
    for heads, width in ((32, 128), (8, 80)):
        qkv = drawn(case, 515, heads + 8, width)
        weight = drawn(case, width, seed=1)
        assert_near(
            normalize(qkv[:, :heads], weight, None, 1e-5, centre=False), exact_norm(qkv[:, :heads], weight, None, False)
        )
    x = drawn(case, 700, 2 * 14336)
    gate, up = x.double().chunk(2, dim=-1)
    assert_near(gate_and_mul(x, "silu"), F.silu(gate) * up)
    for name in ACTIVATIONS:
        exercise_activation(case, 700, 20480, name)


@pytest.mark.parametrize("case", [pytest.param(torch.bfloat16, marks=gpu, id="bfloat16")])
def test_kernels_in_a_cuda_graph(case):
    ops = TritonOps()
    linear, norm = ops.linear(drawn(case, 512, 1024), None), ops.rms_norm(drawn(case, 512, seed=1), 1e-5)
    gated = ops.linear(drawn(case, 2048, 512, seed=2), None, GATED)
    up = ops.linear(drawn(case, 2048, 1024, seed=5), drawn(case, 2048, seed=6), "relu")
    x, total = drawn(case, 7, 1024, seed=3), drawn(case, 7, 512, seed=4)

    def work() -> torch.Tensor:
        held.copy_(total)
        return up(gated(linear.add_to(x, held, norm)))

    held = total.clone()
    expected = work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    for number in range(3):
        total.copy_(drawn(case, 7, 512, seed=10 + number))
        graph.replay()
        replayed = captured.clone()
        assert torch.equal(replayed, work())
    assert not torch.equal(replayed, expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize(("dtype", "gate"), [(torch.float32, GATED), (torch.bfloat16, CLAMPED)], ids=str)
def test_experts_equal_those_of_torch_and_rows_do_not_depend_on_others(dtype, gate):
    hidden, width, count, per_row, rows = 70, 33, 5, 2, 40

    def made(ops):
        up = [ops.linear(drawn(dtype, 2 * width, hidden, seed=n), drawn(dtype, 2 * width), gate) for n in range(count)]
        down = [ops.linear(drawn(dtype, hidden, width, seed=10 + n), drawn(dtype, hidden)) for n in range(count)]
        return ops.experts(up, down, per_row, among=True)

    ours, x, total = made(TritonOps()), drawn(dtype, rows, hidden), drawn(dtype, rows, hidden, seed=1)
    routed = ours.route(drawn(dtype, rows, count))
    found = ours.add_to(x, routed, total.clone())
    expected = made(TorchOps()).add_to(x, routed, total.clone())
    assert isinstance(ours, TritonExperts)
    assert (found - expected).norm() <= (1e-6 if dtype == torch.float32 else 3e-2) * expected.norm()
    alone = ours.add_to(x[7:8], Routed(*(part[7:8].contiguous() for part in routed)), total[7:8].clone())
    assert torch.equal(alone, found[7:8])
