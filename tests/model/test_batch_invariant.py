"""Batch-invariant products and attention, in the interpreter or bit for bit on a GPU."""

from __future__ import annotations

import pytest
import torch
from attention_cases import SCALE, Case, assert_near
from model_zoo import VOCAB, PagedRunner, save_reference

pytest.importorskip("triton")

from skipjoin.config import ConfigError, EngineConfig
from skipjoin.model import loader
from skipjoin.model.attention.triton_backend import TritonAttention
from skipjoin.model.backends import implementations
from skipjoin.model.batch import PackedBatch
from skipjoin.model.errors import ModelError
from skipjoin.model.kernels.paged import INTERPRETED
from skipjoin.model.kernels.products import product
from skipjoin.model.kernels.tuning import TunedTable
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.ops import torch_ops, triton_ops
from skipjoin.model.ops.check import check_ops
from skipjoin.model.ops.triton_ops import InvariantOps
from support.worlds import exhaustive

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="no CUDA device, Triton not interpreted")


def drawn(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class Varied(TunedTable):
    """Tuning table that chooses another config for every key, as a GPU may."""

    def find(self, name, source, key, configs):
        return configs[len(str(key)) % len(configs)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outs"), [(1, 128, 40), (70, 100, 65)])
def test_products_are_batch_invariant(rows: int, inputs: int, outs: int, dtype: torch.dtype) -> None:
    wide = drawn(rows, inputs + 24, dtype=dtype)
    x, weight, bias = wide[:, :inputs], drawn(outs, inputs, dtype=dtype, seed=1), drawn(outs, dtype=dtype, seed=2)
    for shift in (None, bias):
        expected = x.double() @ weight.double().t() + (0 if shift is None else shift.double())
        found = product(x, weight, shift)
        assert found.dtype == dtype
        error = (found.double() - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("dtype", [exhaustive(torch.float32), torch.bfloat16], ids=str)
def test_every_kind_of_product_is_batch_invariant(dtype: torch.dtype) -> None:
    assert check_ops(InvariantOps(), dtype, DEVICE)


def test_models_use_batch_invariant_products_only(tmp_path, monkeypatch) -> None:
    reference = save_reference("opt", tmp_path).to(DEVICE)
    found = InvariantOps(), TritonAttention(invariant=True)
    monkeypatch.setattr(loader, "implementations", lambda *args, **options: found)
    model = loader.load_model(tmp_path, LoadSpec(dtype="float32", device=DEVICE))

    def refused(*args, **options):
        raise AssertionError("cuBLAS chooses by batch size")

    ids = [[i * 7 % VOCAB for i in range(n)] for n in (1, 5)]
    expected = [reference(torch.tensor([tokens], device=DEVICE)).logits[0].detach() for tokens in ids]
    for module in (torch_ops, triton_ops):
        monkeypatch.setattr(module.F, "linear", refused)
    monkeypatch.setattr(torch.Tensor, "addmm_", refused)
    for theirs, ours in zip(expected, PagedRunner(model, ids, 4, seed=1).run(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4 if DEVICE == "cpu" else 1e-3, rtol=0)


@pytest.mark.parametrize(("heads", "window"), [(2, 0), exhaustive(1, 600)])
def test_attention_rows_do_not_depend_on_other_contexts(heads: int, window: int) -> None:
    """Rows are bit-identical for any number of multiprocessors, also in the long context and next to a prompt."""
    case = Case(heads, 1, 16, [(900, 1), (32_767, 1), (0, 20), (5, 1)], block_size=16, window=window, device=DEVICE)

    def rows(chosen: list[int], backend: TritonAttention) -> list[torch.Tensor]:
        batch = PackedBatch.build([case.segments[i] for i in chosen], 16, DEVICE)
        parts = [case.qkv[first[i] : first[i + 1]] for i in chosen]
        query, key, value = torch.cat(parts).to(DEVICE).split([heads, 1, 1], dim=1)
        found = backend.attend(query, key, value, case.kv, batch, layer=1, scale=SCALE, window=window)
        return list(found.split([len(part) for part in parts]))

    first = [0, 1, 2, 22, 23]
    together = rows([0, 1, 2, 3], TritonAttention(processors=132, invariant=True))
    assert_near(torch.cat(together), case.expected, 1e-5)
    for chosen in ([0], [3, 0], [1]):
        for number, found in zip(chosen, rows(chosen, TritonAttention(processors=3, invariant=True)), strict=True):
            assert torch.equal(found, together[number])


def test_kernel_sizes_do_not_depend_on_the_batch() -> None:
    sizes = {True: [], False: []}
    for invariant, found in sizes.items():
        backend = TritonAttention(Varied(None), processors=4, invariant=invariant)
        for mix in ([(900, 1)], [(900, 1)] * 40, [(900, 1), (0, 3), (0, 200)]):
            case = Case(4, 2, 40, mix, block_size=16)
            query, _, _ = case.qkv.split([4, 2, 2], dim=1)
            plan = backend._plan(query, 2, case.batch, None)
            found.append((plan.decode_config, plan.prefill_config))
    assert sizes[True][0] == sizes[True][1] == sizes[True][2]
    assert sizes[False][0] != sizes[False][1]


def test_unsupported_settings_are_rejected() -> None:
    for device, attention in (("cpu", "auto"), ("cuda", "flash"), ("cuda", "torch")):
        with pytest.raises(ModelError, match="batch_invariant needs device cuda and attention triton, got"):
            implementations(attention, torch.bfloat16, torch.device(device), invariant=True)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size must be 1 with batch_invariant, .* got 2"):
        EngineConfig(batch_invariant=True, tensor_parallel_size=2)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_rows_are_bit_identical_on_gpu() -> None:
    for outs in (4096, 14336):
        x = drawn(300, 4096, dtype=torch.bfloat16)
        weight = drawn(outs, 4096, dtype=torch.bfloat16, seed=1)
        together = product(x, weight, None)
        for rows in (slice(0, 1), slice(63, 66), slice(100, 300)):
            assert torch.equal(product(x[rows], weight, None), together[rows])
