from __future__ import annotations

import logging
import sys
import types
import warnings

import pytest
import torch

from skipjoin.kv_format import CACHE_FORMATS
from skipjoin.model import backends, cuda
from skipjoin.model.attention.torch_backend import TorchAttention
from skipjoin.model.backends import implementations
from skipjoin.model.cuda import Card, CudaFacts, check_dtype, choose_device, kernels_unusable, unusable
from skipjoin.model.errors import ModelError
from skipjoin.model.loader import random_model
from skipjoin.model.ops import torch_ops

HOPPER, TURING, PASCAL = Card("H100", (9, 0)), Card("T4", (7, 5)), Card("P100", (6, 0))
ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "compute_120")
TINY = {"model_type": "llama", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "max_position_embeddings": 16}
ON_CARD = torch.device("cuda")


def facts(*cards: Card, **changes) -> CudaFacts:
    known = {"runtime": "13.0", "cards": cards or (HOPPER,), "present": True, "driver": "580.65", "archs": ARCHS}
    return CudaFacts(**known | {"triton": "3.6.0", "compiler": "/usr/bin/gcc"} | changes)


GOOD = facts()
NO_CUDA = CudaFacts()
NO_GPU = facts(cards=(), present=False, driver="")
HIDDEN_BY_DRIVER = facts(cards=(), driver="470.57", why_not="CUDA initialization: The NVIDIA driver is too old")


@pytest.fixture(autouse=True)
def warned(caplog):
    """Return a function that returns the warnings so far; warnings of other tests do not suppress them."""
    cuda.warn_once.cache_clear()
    backends._triton_failure.cache_clear()
    yield lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    cuda.warn_once.cache_clear()
    backends._triton_failure.cache_clear()


@pytest.mark.parametrize(
    ("found", "name", "expected"),
    [
        (GOOD, "auto", "cuda"),
        (GOOD, "cuda", "cuda"),
        (GOOD, "cpu", "cpu"),
        (facts(HOPPER, TURING), "cuda:1", "cuda:1"),
        (facts(TURING), "auto", "cuda"),
        (NO_CUDA, "auto", "cpu"),
        (NO_GPU, "auto", "cpu"),
        (HIDDEN_BY_DRIVER, "cpu", "cpu"),
    ],
)
def test_automatic_device_is_chosen_without_warnings(found, name, expected, warned):
    assert choose_device(name, found) == expected
    assert warned() == []


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (HIDDEN_BY_DRIVER, r"\(driver 470\.57, torch built for CUDA 13\.0\): CUDA initialization: The NVIDIA driver"),
        (facts(cards=(), driver=""), r"\(driver unknown, torch built for CUDA 13\.0\): it gives no reason"),
        (facts(PASCAL), r"P100 has compute capability 6\.0, this torch needs 7\.5"),
    ],
)
def test_unusable_gpus_are_warned_about(found, reason, warned):
    for _ in range(2):
        assert choose_device("auto", found) == "cpu"
    (warning,) = warned()
    with pytest.raises(ModelError, match=f"^device cuda: .*{reason}") as refused:
        choose_device("cuda", found)
    assert warning == f"{str(refused.value).removeprefix('device cuda: ')}; the model runs on the CPU, " + (
        "which is many times slower"
    )


@pytest.mark.parametrize(
    ("found", "name", "message"),
    [
        (NO_CUDA, "cuda", "device cuda: this torch is built without CUDA"),
        (NO_GPU, "cuda", "device cuda: torch finds no CUDA device"),
        (NO_GPU, "cuda:3", "device cuda:3: torch finds no CUDA device"),
        (facts(HOPPER, HOPPER), "cuda:2", r"device cuda:2: N in cuda:N must be in \[0, 1\], got 2"),
        (facts(HOPPER, PASCAL), "cuda:1", r"P100 has compute capability 6\.0, this torch needs 7\.5"),
        (GOOD, "gpu", "device must be auto, cpu, cuda or cuda:N; got 'gpu'"),
        (GOOD, "cuda:", "device must be auto, cpu, cuda or cuda:N; got 'cuda:'"),
        (GOOD, "cuda:-1", "device must be auto, cpu, cuda or cuda:N; got 'cuda:-1'"),
    ],
)
def test_invalid_devices_are_rejected(found, name, message, warned):
    with pytest.raises(ModelError, match=message):
        choose_device(name, found)
    assert warned() == []


def test_gpus_older_than_the_compiled_code_are_unusable():
    assert unusable(facts(TURING, archs=("sm_80", "sm_90a"))) == ("T4 has compute capability 7.5, this torch needs 8.0")
    assert unusable(facts(HOPPER, archs=("sm_80", "sm_100"))) is None
    # Architectures of other vendors are ignored.
    assert unusable(facts(HOPPER, archs=("gfx942",))) is None


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (GOOD, None),
        (facts(Card("A100", (8, 0)), triton="3.10.1+git12"), None),
        (facts(TURING), "T4 has compute capability 7.5, the Triton kernels need 8.0"),
        (facts(triton="", triton_error="ModuleNotFoundError: No module named 'triton'"), "No module named 'triton'"),
        (facts(triton="3.5.1"), "Triton is 3.5.1, the kernels need 3.6"),
        (facts(triton="2.9"), "Triton is 2.9"),
        (facts(compiler=""), "Triton needs a C compiler"),
    ],
)
def test_requirements_of_triton_kernels(found, reason):
    why = kernels_unusable(found)
    assert why is None if reason is None else reason in why


def test_bfloat16_is_rejected_on_gpus_without_it():
    old = facts(TURING)
    with pytest.raises(ModelError, match=r"T4 \(compute capability 7\.5\) has no bfloat16; it has float16 and float32"):
        check_dtype(torch.bfloat16, True, ON_CARD, old)
    assert "emulated" in check_dtype(torch.bfloat16, False, ON_CARD, old)
    for dtype, device, found in (
        (torch.float16, ON_CARD, old),
        (torch.bfloat16, torch.device("cpu"), old),
        (torch.bfloat16, ON_CARD, GOOD),
        (torch.bfloat16, torch.device("cuda:1"), facts(TURING, HOPPER)),
    ):
        assert check_dtype(dtype, True, device, found) is None


class FakeTritonAttention(TorchAttention):
    name = "triton"

    def __init__(self, *, invariant: bool) -> None:
        assert not invariant


@pytest.fixture
def kernels(monkeypatch):
    """Return a function that sets the result or the exception of the attention self-test, on CPU tensors."""

    def put(outcome) -> None:
        def check(backend, dtype, device, of):
            assert isinstance(backend, FakeTritonAttention)
            assert (dtype, device, of.name) == (torch.bfloat16, ON_CARD, "auto")
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        module = types.ModuleType("triton_backend")
        module.TritonAttention, module.check_triton_attention = FakeTritonAttention, check
        monkeypatch.setitem(sys.modules, "skipjoin.model.attention.triton_backend", module)
        other = types.ModuleType("triton_ops")
        other.TritonOps = other.InvariantOps = type("TritonOps", (torch_ops.TorchOps,), {"name": "triton"})
        monkeypatch.setitem(sys.modules, "skipjoin.model.ops.triton_ops", other)
        monkeypatch.setattr(backends, "check_ops", lambda ops, dtype, device: ops.name == "triton")

    return put


@pytest.mark.parametrize("attention", ["auto", "triton"])
def test_triton_is_chosen_where_it_works(attention, kernels, warned):
    kernels(True)
    first = implementations(attention, torch.bfloat16, ON_CARD, facts=GOOD)
    second = implementations(attention, torch.bfloat16, ON_CARD, facts=GOOD)
    assert [ops.name for ops in first] == ["triton", "triton"]
    # Models share no state.
    assert first[1] is not second[1]
    assert warned() == []


@pytest.mark.parametrize(
    ("outcome", "found", "reason"),
    [
        (False, GOOD, "the Triton kernels fail their self-test"),
        (RuntimeError("no ptxas\nfor you"), GOOD, "the Triton kernels cannot run (RuntimeError: no ptxas)"),
        (True, facts(TURING), "T4 has compute capability 7.5, the Triton kernels need 8.0"),
        (True, facts(triton="", triton_error="ImportError: x"), "Triton cannot be imported (ImportError: x)"),
        (True, facts(compiler=""), "Triton needs a C compiler: install gcc or clang, or set CC"),
    ],
)
def test_torch_is_chosen_where_triton_fails(outcome, found, reason, kernels, warned):
    kernels(outcome)
    for _ in range(2):
        chosen = implementations("auto", torch.bfloat16, ON_CARD, facts=found)
        assert [ops.name for ops in chosen] == ["torch", "torch"]
    slower = "torch's operations are used instead, which makes decoding several times slower"
    assert warned() == [f"{reason}: {slower}"]
    with pytest.raises(ModelError) as refused:
        implementations("triton", torch.bfloat16, ON_CARD, facts=found)
    assert str(refused.value) == f"attention triton: {reason}"


def test_a_missing_backend_module_falls_back_to_torch(monkeypatch, warned):
    monkeypatch.setitem(sys.modules, "skipjoin.model.attention.triton_backend", None)
    assert implementations("auto", torch.float16, ON_CARD, facts=GOOD)[1].name == "torch"
    (warning,) = warned()
    assert warning.startswith("the Triton kernels cannot run (ModuleNotFoundError: ")


def test_all_fallbacks_are_reported_in_one_warning(warned):
    old = facts(TURING)
    implementations("auto", torch.bfloat16, ON_CARD, check_dtype(torch.bfloat16, False, ON_CARD, old), old)
    (warning,) = warned()
    assert "the Triton kernels need 8.0" in warning
    assert "has no bfloat16; it is emulated, and float16 is faster" in warning


def test_torch_is_chosen_on_request(warned):
    assert [ops.name for ops in implementations("torch", torch.bfloat16, ON_CARD, facts=GOOD)] == ["torch", "torch"]
    assert warned() == []


@pytest.mark.parametrize(
    ("attention", "device", "message"),
    [
        ("triton", "cpu", "attention triton needs device cuda, got cpu"),
        ("cpp", "cuda", "attention cpp needs device cpu and dtype float32, bfloat16 or float16"),
        ("magic", "cuda", "attention must be one of auto, torch, cpp, triton, flash; got 'magic'"),
    ],
)
def test_unsupported_backends_are_rejected(attention, device, message):
    with pytest.raises(ModelError, match=message):
        implementations(attention, torch.bfloat16, torch.device(device), facts=GOOD)
    with pytest.raises(ModelError, match="attention flash reads no KV of kv_cache_dtype int8"):
        implementations("flash", torch.bfloat16, ON_CARD, facts=GOOD, of=CACHE_FORMATS["int8"])


class FakeCuda:
    def __init__(self, monkeypatch, *, cards=(), warning="", error="") -> None:
        self.cards, self.warning, self.error = cards, warning, error
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        for name in ("is_available", "device_count", "get_device_name", "get_device_capability", "get_arch_list"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def is_available(self) -> bool:
        if self.warning:
            warnings.warn(self.warning, stacklevel=1)
        return bool(self.cards) or bool(self.error)

    def device_count(self) -> int:
        if self.error:
            raise RuntimeError(self.error)
        return len(self.cards)

    def get_device_name(self, index: int) -> str:
        return self.cards[index].name

    def get_device_capability(self, index: int) -> tuple[int, int]:
        return self.cards[index].capability

    def get_arch_list(self) -> list[str]:
        return list(ARCHS)


def test_cuda_facts_of_a_machine_with_gpus(monkeypatch):
    pytest.importorskip("triton")
    FakeCuda(monkeypatch, cards=(HOPPER, TURING))
    monkeypatch.setenv("CC", "my-compiler")
    found = cuda.cuda_facts.__wrapped__()
    assert (found.cards, found.archs, found.runtime, found.present) == ((HOPPER, TURING), ARCHS, "13.0", True)
    assert (found.compiler, found.triton_error) == ("my-compiler", "")
    assert cuda._release(found.triton) >= (3, 6)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delenv("CC")
    monkeypatch.setattr(cuda.shutil, "which", lambda name: "/bin/clang" if name == "clang" else None)
    found = cuda.cuda_facts.__wrapped__()
    assert (found.triton, found.compiler) == ("", "/bin/clang")
    assert "triton" in found.triton_error


@pytest.mark.parametrize(
    ("changes", "why_not"),
    [
        ({"warning": "driver too old\nmore"}, "driver too old"),
        ({"error": "CUDA unknown error\nmore"}, "RuntimeError: CUDA unknown error"),
        ({}, ""),
    ],
)
def test_cuda_facts_report_why_gpus_do_not_work(monkeypatch, changes, why_not):
    FakeCuda(monkeypatch, **changes)
    monkeypatch.setattr(cuda, "_is_present", lambda: True)
    found = cuda.cuda_facts.__wrapped__()
    assert (found.cards, found.present, found.why_not, found.triton) == ((), True, why_not, "")


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_ignored(monkeypatch, hidden):
    monkeypatch.setattr(cuda.Path, "glob", lambda self, pattern: iter([self]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cuda._is_present()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert not cuda._is_present()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC 12.2.0", "580.65.06"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13", "470.57.02"),
        ("something else", ""),
    ],
)
def test_driver_version(text, version, monkeypatch):
    monkeypatch.setattr(cuda.Path, "read_text", lambda self, **_: text)
    assert cuda._driver() == version


def test_the_loader_checks_devices_and_backends(monkeypatch):
    with pytest.raises(ModelError, match="attention triton needs device cuda"):
        random_model(TINY, attention="triton")
    monkeypatch.setattr(cuda, "cuda_facts", lambda: facts(TURING))
    with pytest.raises(ModelError, match=r"T4 .* has no bfloat16"):
        random_model(TINY, dtype="bfloat16", device="cuda")
