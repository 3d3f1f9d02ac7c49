from __future__ import annotations

import pytest
import torch
from attention_cases import Case

from skipjoin.model.attention.check import agrees
from skipjoin.model.attention.cpp_backend import CppAttention
from skipjoin.model.attention.torch_backend import TorchAttention
from skipjoin.model.ops.build import load_library

MIXES = {
    "decodes": [(40, 1), (0, 1), (90, 1), (15, 1)],
    "prefills": [(0, 33), (0, 2), (0, 17)],
    "mixed": [(30, 1), (0, 20), (64, 9), (7, 1), (50, 30)],
}


@pytest.fixture(params=["torch", "cpp"])
def attention(request):
    if request.param == "torch":
        return TorchAttention()
    if (library := load_library()) is None:
        pytest.skip("no compiler")
    return CppAttention(library)


@pytest.mark.parametrize("ends", ["plain", "both"])
@pytest.mark.parametrize("window", [0, 11])
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_attention_equals_dense_arithmetic(attention, mix, window, ends):
    for block_size, seed in ((1, 0), (5, 1), (16, 2)):
        options = {"window": window, "ends": ends, "rotary": 12, "block_size": block_size, "seed": seed}
        Case(6, 2, 20, MIXES[mix], **options).check(attention, 1e-5)
        Case(4, 4, 40, MIXES[mix], dtype=torch.bfloat16, **options).check(attention, 2e-2)


def test_caps_and_sinks(attention):
    sinks = 3 * torch.randn(6, generator=torch.Generator().manual_seed(0))
    for cap, given, cache in ((2.5, None, "auto"), (0.0, sinks, "auto"), (2.5, sinks, "int8")):
        options = {"cap": cap, "sinks": given, "cache": cache, "window": 11, "ends": "both"}
        Case(6, 2, 20, MIXES["mixed"], **options).check(attention, 1e-2 if cache == "int8" else 1e-5)
        Case(6, 2, 40, MIXES["mixed"], dtype=torch.bfloat16, **options).check(attention, 2e-2)


def test_self_test_detects_wrong_backends():
    class Wrong(TorchAttention):
        def __init__(self, forgets: str) -> None:
            self.forgets = forgets

        def attend(self, *arguments, **options):
            return super().attend(*arguments, **{k: v for k, v in options.items() if k != self.forgets})

    assert agrees(Wrong("nothing"), torch.float32)
    for forgotten in ("window", "cos_sin", "cap", "sinks"):
        assert not agrees(Wrong(forgotten), torch.bfloat16, variants=True)
