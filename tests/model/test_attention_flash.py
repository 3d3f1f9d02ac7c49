from __future__ import annotations

import dataclasses
import logging
import sys
import types

import pytest
import torch
from attention_cases import Case, assert_near

pytest.importorskip("triton")

from skipjoin.model import backends, cuda
from skipjoin.model.attention.flash_backend import FlashAttention
from skipjoin.model.attention.triton_backend import TritonAttention
from skipjoin.model.backends import implementations
from skipjoin.model.batch import PackedBatch
from skipjoin.model.cuda import Card, CudaFacts
from skipjoin.model.errors import ModelError
from skipjoin.model.kernels.paged import INTERPRETED
from support.worlds import exhaustive

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the fake library computes on the CPU")
MIX = [(30, 1), (0, 20), (64, 9), (17, 1)]
GPU = torch.device("cuda")


class Library(types.ModuleType):
    """Fake of the two functions of FlashAttention 3, in dense float64."""

    def __init__(self) -> None:
        super().__init__("flash_attn_interface")
        self.calls: list[dict] = []
        self.schedules: list[torch.Tensor] = []
        self.error: Exception | None = None
        self.wrong = 0.0

    def get_scheduler_metadata(  # noqa: PLR0917 (the library's order)
        self, batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=None,
        cu_seqlens_q=None, page_size=None, causal=False, window_size=(-1, -1),
    ):  # fmt: skip
        assert (len(cache_seqlens), len(cu_seqlens_q)) == (batch_size, batch_size + 1)
        assert max_seqlen_k >= int(cache_seqlens.max())
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert causal
        # The schedule depends on the contexts, which reveals stale schedules below.
        self.schedules.append(torch.cat([cache_seqlens, torch.tensor(window_size)]))
        return self.schedules[-1]

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, *, cache_seqlens=None, page_table=None, cu_seqlens_q=None, max_seqlen_q=None,
        softmax_scale=None, causal=False, window_size=(-1, -1), scheduler_metadata=None,
    ):  # fmt: skip
        if self.error is not None:
            raise self.error
        self.calls.append({"keys": k_cache, "window": window_size})
        assert q.dtype == k_cache.dtype != torch.float32
        assert k_cache.stride(-1) == q.stride(-1) == 1
        assert {tensor.dtype for tensor in (cache_seqlens, page_table, cu_seqlens_q)} == {torch.int32}
        assert torch.equal(scheduler_metadata, torch.cat([cache_seqlens, torch.tensor(window_size)]))
        assert causal
        out = torch.zeros_like(q)
        for i, context in enumerate(cache_seqlens.tolist()):
            if not context:
                continue
            begin, end = cu_seqlens_q[i : i + 2].tolist()
            table = page_table[i].long()
            keys, values = (pool[table].flatten(0, 1)[:context].double() for pool in (k_cache, v_cache))
            keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), keys) * softmax_scale
            own, seen = torch.arange(context - (end - begin), context)[:, None], torch.arange(context)
            hidden = (seen > own) | ((seen < own - window_size[0]) if window_size[0] >= 0 else False)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        return out + self.wrong


@pytest.fixture
def library(monkeypatch):
    found = Library()
    found.__spec__ = object()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", found)
    for cached in (backends._flash_failure, cuda.warn_once):
        cached.cache_clear()
    yield found
    for cached in (backends._flash_failure, cuda.warn_once):
        cached.cache_clear()


def half(mix=MIX, **options) -> Case:
    return Case(4, 2, 40, mix, dtype=torch.bfloat16, rotary=40, block_size=16, **options)


@pytest.mark.parametrize("window", [exhaustive(0), 11])
def test_pages_are_passed_without_copies(library, window):
    case = half(window=window)
    case.check(FlashAttention(), 1e-2)
    (call,) = library.calls
    keys = case.kv.layer(1)[0]
    # The pages are strided and not copied, because a copy of the cache per layer would cost more than attention.
    assert (call["keys"].data_ptr(), call["keys"].stride()) == (keys.data_ptr(), keys.stride())
    assert not keys.is_contiguous()


@pytest.mark.parametrize(
    ("mix", "window"),
    [exhaustive(MIX, 0), (MIX[::-1], 11), exhaustive([(30, 1), (9, 1), (17, 1)], 0), exhaustive([(0, 20), (3, 9)], 11)],
)
def test_triton_serves_only_the_segments_of_shared_blocks(library, mix, window):
    case = half(mix, ends="mixed", window=window)
    before = case.kv.tensor.clone()
    case.check(FlashAttention(), 1e-2)
    assert len(library.calls) == 1
    case.kv.tensor.copy_(before)
    rows = torch.repeat_interleave(torch.arange(len(mix)), torch.tensor([length for _, length in mix]))
    outputs = []
    for segments in (case.segments, [segment._replace(reverse=False) for segment in case.segments]):
        batch = PackedBatch.build(segments, case.block_size)
        parts = case.qkv.clone().split([4, 2, 2], dim=1)
        options = {"layer": 1, "scale": 0.3, "window": window, "cos_sin": case.cos_sin}
        outputs.append(FlashAttention().attend(*parts, case.kv, batch, **options)[rows % 2 == 0])
    assert torch.equal(*outputs), "the library gives the other segments the same bits as alone"


@pytest.mark.parametrize("options", [{"ends": "reversed"}, *map(exhaustive, ({"dtype": torch.float32}, {"cap": 2.0}))])
def test_triton_serves_unsupported_batches(library, options):
    case = Case(4, 2, 40, MIX, rotary=40) if "dtype" in options else half(**options)
    case.check(FlashAttention(), 1e-2)
    assert not library.calls


def test_schedules_follow_the_contents_of_replayed_batches(library):
    """A CUDA graph reuses the batch's tensors with other contents in each pass.

    The layers of a pass share one schedule per window; every pass makes its own.
    """
    first, second = half([(30, 1), (5, 1), (0, 1)]), half([(9, 1), (40, 1), (0, 1)], seed=2)
    wide = max(case.batch.block_tables.shape[1] for case in (first, second))
    tables = torch.zeros((3, wide), dtype=torch.int64)
    names = ("slots", "positions", "context_lens")
    batch = dataclasses.replace(
        first.batch, block_tables=tables, **{name: getattr(first.batch, name).clone() for name in names}
    )
    backend = FlashAttention()
    for case in (first, second, first):
        tables.zero_()[:, : case.batch.block_tables.shape[1]] = case.batch.block_tables
        for name in names:
            getattr(batch, name).copy_(getattr(case.batch, name))
        before = len(library.schedules)
        past = case.kv.tensor.clone()
        for layer, window in ((0, 0), (1, 0), (2, 5), (3, 0)):
            case.kv.tensor.copy_(past)
            kv = types.SimpleNamespace(layer=lambda number, kv=case.kv: kv.layer(1))
            parts = case.qkv.clone().split([4, 2, 2], dim=1)
            out = backend.attend(*parts, kv, batch, layer=layer, scale=0.3, window=window, cos_sin=case.cos_sin)
            if not window:
                assert_near(out, case.expected, 1e-2)
        case.kv.tensor.copy_(past)
        assert len(library.schedules) - before == 2


def facts(capability: tuple[int, int] = (9, 0)) -> CudaFacts:
    gpu = Card("H100" if capability == (9, 0) else "A100", capability)
    return CudaFacts("13.0", (gpu,), present=True, triton="3.7.1", compiler="gcc")


@pytest.fixture
def chosen(monkeypatch, caplog):
    """Return a function that chooses a backend and returns its name and the warnings.

    Triton works, and the self-test runs on the CPU.
    """
    test = backends.agrees
    monkeypatch.setattr(backends, "_triton_failure", lambda *types: None)
    monkeypatch.setattr(backends, "agrees", lambda backend, dtype, device, **rest: test(backend, dtype, "cpu", **rest))

    def choose(name: str = "auto", dtype: torch.dtype = torch.bfloat16, **gpu) -> tuple[str, list[str]]:
        caplog.clear()
        ops, attention = implementations(name, dtype, GPU, facts=facts(**gpu))
        assert ops.name == "triton"
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        return attention.name, warnings

    return choose


def test_flash_attention_is_preferred_where_it_works(library, chosen):
    assert chosen() == chosen("flash") == ("flash", [])
    assert chosen("triton") == ("triton", [])
    # Hopper only; other GPUs get no warning.
    assert chosen(capability=(8, 0)) == ("triton", [])


def test_a_missing_library_is_not_warned_about(chosen):
    assert chosen() == ("triton", [])


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("broken", "OSError: libcudart.so.12: cannot open"),
        ("old", "ImportError: flash_attn_interface.flash_attn_with_kvcache has no cache_seqlens"),
        ("other", "ImportError: flash_attn_interface has no get_scheduler_metadata"),
        ("wrong", "it fails its self-test"),
    ],
)
def test_a_broken_library_is_warned_about_once(library, chosen, monkeypatch, fault, reason):
    if fault == "broken":
        library.error = OSError("libcudart.so.12: cannot open")
    if fault == "old":
        library.flash_attn_with_kvcache = lambda q, k_cache: q
    if fault == "other":
        monkeypatch.delattr(Library, "get_scheduler_metadata")
    if fault == "wrong":
        library.wrong = 0.5
    name, (warning,) = chosen()
    assert name == "triton"
    assert warning.startswith(f"FlashAttention 3 cannot be used ({reason}")
    assert warning.endswith("Triton's attention is slower where contexts differ much")
    assert chosen() == ("triton", [])
    with pytest.raises(ModelError, match="attention flash: FlashAttention 3 cannot be used: ") as refused:
        chosen("flash")
    assert reason in str(refused.value)


def test_unsupported_devices_and_types_are_rejected(library, chosen):
    with pytest.raises(ModelError, match=r"A100 has compute capability 8\.0, it is for 9\.0"):
        chosen("flash", capability=(8, 0))
    with pytest.raises(ModelError, match="it has no float32"):
        chosen("flash", torch.float32)
    with pytest.raises(ModelError, match="attention flash needs device cuda, got cpu"):
        implementations("flash", torch.bfloat16, torch.device("cpu"))


def test_other_components_treat_it_as_a_triton_backend(library):
    assert isinstance(FlashAttention(), TritonAttention)
