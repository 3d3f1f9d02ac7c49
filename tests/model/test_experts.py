"""Routing, and experts of checkpoints in codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_zoo import CONFIGS, VOCAB, PagedRunner, save_reference
from safetensors.torch import load_file, save_file

from skipjoin.model.config import ModelConfig, RoutingSettings
from skipjoin.model.errors import ModelError
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model, planned_model, read_config
from skipjoin.model.ops.build import load_library
from skipjoin.model.ops.calls import CPP_DTYPES
from skipjoin.model.ops.cpp_ops import CppOps
from skipjoin.model.ops.experts import route_by_scores
from skipjoin.model.ops.torch_ops import TorchOps
from skipjoin.model.weight_files import ModelFiles

needs_compiled = pytest.mark.skipif(load_library() is None, reason="no compiler")
IDS = [[i * 7 % VOCAB for i in range(n)] for n in (1, 9, 30)]


@needs_compiled
@pytest.mark.parametrize("dtype", CPP_DTYPES, ids=str)
def test_the_lowest_of_experts_with_equal_logits_is_chosen(dtype):
    weight = torch.zeros(32, 32, dtype=dtype)
    logits = torch.tensor([[1, 3, 3, 0, 3], [2, 2, 2, 2, 2], [-1, -2, -1, -3, 0]], dtype=dtype).repeat(1, 5)
    for ops in (TorchOps(), CppOps(load_library(), dtype)):
        linears = [ops.linear(weight, None)] * 25
        for among in (True, False):
            chosen, shares = ops.experts(linears, linears, 3, among=among).route(logits)
            assert chosen.tolist() == [[1, 2, 4], [0, 1, 2], [4, 9, 14]]
            whole = logits.float().softmax(-1).gather(1, chosen)
            torch.testing.assert_close(shares, whole / whole.sum(-1, keepdim=True) if among else whole)


def test_scores_choose_the_lowest_of_equal_experts_in_the_best_groups():
    logits = torch.tensor([[0.0, 2.0, 2.0, 0.0, 3.0, -9.0, 1.0, 1.0]])
    scores = logits.sigmoid()
    cases = [
        (RoutingSettings(), None, [4, 1, 2]),
        # Two scores of a group count: 1 and 1 are more than 2 and 0, of which two groups are equal, and than 3 and -9.
        (RoutingSettings(groups=4, kept=2), None, [1, 6, 7]),
        (RoutingSettings(scale=2.0), torch.tensor([9.0, 0, 0, 9, 0, 0, 0, 0]), [0, 3, 4]),
        (RoutingSettings(sums_to_one=False), None, [4, 1, 2]),
    ]
    for of, correction, expected in cases:
        chosen, shares = route_by_scores(logits, 3, of, correction)
        assert chosen.tolist() == [expected]
        own = scores[:, expected]  # without the correction
        torch.testing.assert_close(shares, own / own.sum() * of.scale if of.sums_to_one else own)


def test_scores_of_a_token_do_not_depend_on_others():
    logits = torch.randn(67, 41, generator=torch.Generator().manual_seed(1))
    for of in (RoutingSettings(), RoutingSettings(squashes=False)):
        whole = route_by_scores(logits, 6, of)
        for row in range(67):
            chosen, shares = route_by_scores(logits[row : row + 1], 6, of)
            assert torch.equal(chosen[0], whole.chosen[row])
            assert torch.equal(shares[0], whole.shares[row])


def test_groups_that_do_not_divide_experts_are_refused():
    raw = CONFIGS["glm4-moe"]().to_dict() | {"architectures": ["Glm4MoeForCausalLM"], "n_group": 3}
    with pytest.raises(ModelError, match=r"n_group and topk_group in config\.json must divide 8 experts into groups"):
        ModelConfig.from_dict(raw)


@needs_compiled
def test_experts_in_fp4_are_read_as_codes_or_widened(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: PLC0415

    reference = save_reference("gpt-oss", tmp_path)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    for number, layer in enumerate(reference.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            stored, weight = f"model.layers.{number}.mlp.experts.{name}", getattr(layer.mlp.experts, name)
            count, inputs, outputs = tensors.pop(stored).shape
            blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 125, (count, outputs, inputs // 32), dtype=torch.uint8)
            tensors |= {f"{stored}_blocks": blocks, f"{stored}_scales": scales}
            weight.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    errors, sizes = {}, {}
    for attention in ("torch", "auto"):
        spec = LoadSpec(dtype="float32", attention=attention)
        loaded: list[float] = []
        model = load_model(tmp_path, spec, progress=lambda done, count, loaded=loaded: loaded.append(done / count))
        assert loaded[-1] == 1
        errors[attention] = 0.0
        for ids, ours in zip(IDS, PagedRunner(model, IDS, 4, seed=1).run(), strict=True):
            with torch.no_grad():
                expected = reference(torch.tensor([ids])).logits[0]
            errors[attention] += float((ours - expected).norm() / expected.norm())
        sizes[attention] = model.weight_bytes
        files = ModelFiles.of(tmp_path)
        planned = planned_model(files, read_config(files, spec), spec)
        assert 0.8 * model.weight_bytes < planned.weight_bytes <= model.weight_bytes
    assert errors["torch"] < 1e-4 < errors["auto"] < 0.3  # inputs of codes are rounded to 8 bits
    assert sizes["auto"] < sizes["torch"] / 2
    (tmp_path / "config.json").write_text(json.dumps(config | {"swiglu_limit": 5.0}))
    with pytest.raises(ModelError, match=r"swiglu_limit of GptOssForCausalLM must be 7\.0, got 5\.0"):
        load_model(tmp_path)


@needs_compiled
def test_experts_in_8_bits_are_close(tmp_path):
    reference = save_reference("qwen3-moe", tmp_path)
    model = load_model(tmp_path, LoadSpec(dtype="float32", quantization="int8"))
    (ours,) = PagedRunner(model, IDS[2:], 4, seed=1).run()
    with torch.no_grad():
        expected = reference(torch.tensor(IDS[2:])).logits[0]
    errors = (ours - expected).norm(dim=1) / expected.norm(dim=1)
    assert 1e-4 < errors.median() < 0.03
    plain = load_model(tmp_path, LoadSpec(dtype="float32"))
    assert model.expert_bytes <= plain.expert_bytes * 9 / 32  # a half for 32 of 8 bits


def test_experts_count_as_far_as_tokens_use_them(tmp_path):
    reference = save_reference("qwen3-moe", tmp_path)
    model = load_model(tmp_path, LoadSpec(dtype="float32", attention="torch"))
    experts = sum(p.numel() for name, p in reference.named_parameters() if "mlp.experts" in name)
    assert model.expert_bytes == 4 * experts
    assert model.parameters == reference.num_parameters() - experts // 2  # 3 of 6
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 7}))
    with pytest.raises(ModelError, match=r"num_experts_per_tok in config\.json must be in \[1, 6\].* got 7"):
        load_model(tmp_path)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_in_one_tensor_are_those_in_tensors_of_their_own(tmp_path: Path, is_transposed: bool) -> None:
    """Files of Qwen3.5 have all experts of a layer in two tensors, and those of Qwen3-VL have these transposed."""
    save_reference("qwen3-moe", tmp_path)
    file, ids = tmp_path / "model.safetensors", [list(range(3, 20))]
    (separate,) = PagedRunner(load_model(tmp_path, LoadSpec(dtype="float32")), ids, 4, seed=1).run()
    tensors = load_file(file)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: [tensors.pop(f"{name}.{expert}.{part}_proj.weight") for expert in range(6)]
            for part in ("gate", "up", "down")
        }
        gate_up, down = torch.cat([torch.stack(parts["gate"]), torch.stack(parts["up"])], 1), torch.stack(parts["down"])
        for part, stacked in (("gate_up", gate_up), ("down", down)):
            tensors[f"{name}.{part}_proj"] = (stacked.transpose(1, 2) if is_transposed else stacked).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    (joined,) = PagedRunner(load_model(tmp_path, LoadSpec(dtype="float32")), ids, 4, seed=1).run()
    assert torch.equal(joined, separate)
