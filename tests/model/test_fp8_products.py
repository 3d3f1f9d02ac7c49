"""Products of 8-bit floats, which torch computes on a CPU as well."""

from __future__ import annotations

import pytest
import torch

from skipjoin.builtin import builtin_model_path
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.errors import ModelError
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model, random_model
from skipjoin.model.ops.base import GATED
from skipjoin.model.ops.scaled import ScaledLinear, rounded_rows
from skipjoin.model.ops.torch_ops import TorchLinear, TorchOps

CPU = torch.device("cpu")
# Rounding to three bits of fraction changes a number by at most this share.
STEP = 2.0**-4
SHAPE = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


def test_codes_differ_from_their_numbers_by_half_a_step() -> None:
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 9)[:, None]
    x[4] = 0
    codes, scales = rounded_rows(x)
    assert codes.dtype == torch.float8_e4m3fn
    found = codes.float() * scales
    # Below the smallest normal code, steps are of equal size.
    assert bool(((found - x).abs() <= STEP * x.abs() + scales * 2.0**-10).all())
    torch.testing.assert_close(found.abs().amax(1), x.abs().amax(1))


@pytest.mark.parametrize("activation", [None, GATED, "gelu_tanh"])
def test_a_product_is_that_of_the_rounded_numbers(activation: str | None) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias, delta = (torch.randn(n, generator=generator) for n in ((5, 64), (32, 64), (32,), (5, 32)))
    ours = ScaledLinear(weight, bias, activation)
    (rows, row_scales), (outputs, output_scales) = rounded_rows(x), rounded_rows(weight)
    theirs = TorchLinear(outputs.float() * output_scales, bias, activation)
    inputs = rows.float() * row_scales
    close = dict(rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours(x), theirs(inputs), **close)
    torch.testing.assert_close(ours.shifted(x, delta), theirs.shifted(inputs, delta), **close)
    if activation is None:
        norm = TorchOps().rms_norm(bias, 1e-5)
        for then in (None, norm):
            torch.testing.assert_close(
                ours.add_to(x, delta.clone(), then), theirs.add_to(inputs, delta.clone(), then), **close
            )
    assert ours.weight_bytes == weight.numel() + 4 * len(weight) + bias.nbytes


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_keeps_its_output_and_rounds_the_rest(tied: bool) -> None:
    def logits(**options: str) -> tuple[torch.Tensor, int]:
        model = random_model(SHAPE | {"tie_word_embeddings": tied}, device="cpu", attention="torch", **options)
        pool = PagedKV(4, 16, model.config, model.dtype, model.device)
        batch = PackedBatch.build([Segment([*range(3, 17)], 0, (0,))], 16, model.device)
        return model.forward(batch, pool), model.weight_bytes

    (plain, whole), (found, half) = logits(), logits(quantization="fp8")
    assert 0 < (found - plain).norm() <= 0.1 * plain.norm()
    tables = (1 if tied else 2) * 96 * 32 * 4
    assert half - tables < 0.3 * (whole - tables)  # of float32


def test_weights_of_files_are_rounded_and_refusals_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LoadSpec(device="cpu", attention="torch", dtype="float32", quantization="fp8")
    assert load_model(builtin_model_path(), spec).weight_label == "fp8"
    with pytest.raises(ModelError, match="fp8 needs device cuda, where a CPU has int8; got device cpu, attention cpp"):
        load_model(builtin_model_path(), LoadSpec(device="cpu", quantization="fp8"))
    with pytest.raises(ModelError, match="models without experts"):
        random_model(
            SHAPE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"device": "cpu", "attention": "torch", "quantization": "fp8"},
        )

    def refuse(*given: object, **options: object) -> torch.Tensor:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    with pytest.raises(ModelError, match=r"capability 8\.9 or newer, and dtype bfloat16: RuntimeError: torch\._scaled"):
        ScaledLinear.check(torch.float16, CPU)
    monkeypatch.setattr(torch, "_scaled_mm", lambda x, y, **options: torch.full((len(x), y.shape[1]), torch.nan))
    with pytest.raises(ModelError, match="products of 8-bit floats are wrong on cpu"):
        ScaledLinear.check(torch.bfloat16, CPU)
