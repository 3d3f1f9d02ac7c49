"""Layers whose requests have a state: compiled operations beside torch's, and states however a prompt is cut."""

from __future__ import annotations

import math

import pytest
import torch
from model_zoo import HYBRIDS as SAVED
from model_zoo import VOCAB, PagedRunner, save_reference

from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.config import ModelConfig
from skipjoin.model.errors import ModelError
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model, random_model
from skipjoin.model.ops.build import load_library
from skipjoin.model.ops.cpp_ops import CppOps
from skipjoin.model.ops.recurrent import (
    Average,
    Convolution,
    ConvolutionInputs,
    Gate,
    GateKind,
    Recurrence,
    RecurrenceInputs,
    RecurrentOps,
    Scan,
    ScanInputs,
)
from skipjoin.model.parallel import check_shards
from support.hybrid_models import HYBRIDS

compiled = pytest.mark.skipif(load_library() is None, reason="no compiler")
SLOTS = 9


def batch_of(*, decodes: bool) -> PackedBatch:
    """Return sequences that begin and continue, with snapshots in the middle and at the end, or decodes."""
    if decodes:
        begins = (0, 3, 7, 1, 9, 2, 2, 2, 0)
        return PackedBatch.build([Segment([0], start, (0, 1, 2), state=i) for i, start in enumerate(begins)], 4)
    segments = [
        Segment([0] * 5, 0, (0, 1), state=2, captures=((2, 4), (5, 5))),
        Segment([0], 3, (0,), state=0),
        Segment([0] * 3, 7, (0, 1, 2), state=1, captures=((3, 3),)),
    ]
    return PackedBatch.build(segments, 4)


@compiled
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("is_delta", "decodes"), [(True, False), (False, True), (False, False)])
def test_compiled_operations_equal_those_of_torch(
    dtype: torch.dtype, tolerance: float, is_delta: bool, decodes: bool
) -> None:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(of)

    batch, heads, key_heads, keys, values, channels = batch_of(decodes=decodes), 6, 2, 19, 37, 83
    kept = [drawn(SLOTS, 2, channels), drawn(SLOTS, heads, keys, values, of=torch.float32)]
    weights = drawn(3, channels, of=torch.float32), drawn(channels, of=torch.float32)
    x, rows, gates = (
        drawn(9, 3 * channels),
        drawn(9, 2 * key_heads * keys + heads * (values + 2)),
        drawn(9, heads * values),
    )
    parts = rows.split((key_heads * keys, key_heads * keys, heads * values, heads, heads), dim=1)
    per_head = [drawn(heads, of=torch.float32) for _ in range(3)]
    of = Recurrence(key_heads, *per_head[:2]) if is_delta else Recurrence(key_heads, *per_head, 0.1, 1.0)
    found = []
    for ops in (CppOps(load_library(), dtype).recurrent, RecurrentOps()):
        inputs, matrices = (tensor.clone() for tensor in kept)
        before, given, after = x.chunk(3, dim=1)
        convolution = Convolution(*weights, is_gated=is_delta)
        convolved = ops.convolve(
            ConvolutionInputs(given, *(() if is_delta else (before, after))), convolution, inputs, batch
        )
        out = ops.recur(RecurrenceInputs(*parts[: 5 if is_delta else 4]), of, matrices, batch)
        logs, shares = (
            kept[1][:, :, : keys if is_delta else 1, 0].square().neg().flatten(1),
            kept[1][:, :, 0, 1].sigmoid(),
        )
        given = RecurrenceInputs(*parts[:3], logs.contiguous(), shares.contiguous())
        learned = ops.recur(given, Recurrence(key_heads, None, None), kept[1].clone(), batch)
        scanned, rates = kept[1][:, :, 0].clone(), kept[1][0, :, 0].square().neg()
        scan = Scan(rates.contiguous(), kept[1][0, 0, 0].contiguous(), kept[1][0, 0, 1].contiguous())
        pair = rows[:, :values], rows[:, 40 : 40 + values]
        scanning = ops.scan(ScanInputs(rows[:, 1 : 1 + heads], rows[:, 9 : 9 + heads], *pair), scan, scanned, batch)
        given, decays = kept[1][:, :, 1].clone(), kept[1][:, 0, 0].square().neg()
        units = x.new_ones(9, heads)
        scanned_too = ops.scan(ScanInputs(units, units, pair[0], decays.contiguous()), Scan(None, None), given, batch)
        averages = kept[1][:, 1, :3].clone()
        average = Average(-kept[1][0, 0, 2].square(), kept[1][0, 0, 3].contiguous())
        averaged = ops.average(*pair, average, averages, batch)
        kind = GateKind.NORM_THEN_SILU if is_delta else GateKind.SILU_THEN_NORM
        groups = out.clone().view(9, 1 if not is_delta else heads, -1)
        normed = ops.gate(groups, gates, Gate(kind, gates[:1].float().view(groups.shape[1:]), 1e-5))
        single = gates if is_delta else gates[:, :1].contiguous()
        mixed = ops.gate(out.clone().view(9, 1, -1), single, Gate(GateKind.SIGMOID))
        found.append([convolved, inputs, out, matrices, normed, mixed, learned, scanning, scanned])
        found[-1] += [scanned_too, given, averaged, averages]
    for ours, theirs in zip(*found, strict=True):
        assert (ours.float() - theirs.float()).norm() <= tolerance * theirs.float().norm()
    assert decodes or torch.equal(found[0][3][[2, 1]], found[0][3][[5, 3]]), "a snapshot at the end is the state"
    assert not torch.equal(found[0][3][4], kept[1][4])


@compiled
@pytest.mark.parametrize("name", HYBRIDS)
def test_states_and_logits_have_the_same_bits_however_prompts_are_cut(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(0, 97, (length,), generator=generator).tolist() for length in (1, 19, 40)]
    model = random_model(HYBRIDS[name], seed=3, dtype="bfloat16")
    runners = [PagedRunner(model, sequences, 4, seed) for seed in (1, 2)]
    first, second = ([logits.clone() for logits in runner.run()] for runner in runners)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))
    assert torch.equal(runners[0].kv.states.tensor, runners[1].kv.states.tensor)
    assert runners[0].kv.states.tensor.shape[0] == len(sequences)


@pytest.mark.parametrize("name", SAVED)
def test_logits_of_chunked_prompts_equal_those_of_transformers(name: str, tmp_path) -> None:
    reference, generator = save_reference(name, tmp_path), torch.Generator().manual_seed(2)
    sequences = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (2, 37)]
    logits = PagedRunner(load_model(tmp_path, LoadSpec(dtype="float32")), sequences, 4, seed=1).run()
    for tokens, ours in zip(sequences, logits, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(ours, reference(torch.tensor([tokens])).logits[0], atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("lfm2", {"layer_types": ["conv"] * 3}, "1 to 2 must have attention"),
        ("lfm2", {"layer_types": ["conv", "sliding_attention", "conv"]}, "must be 3 of conv, full_attention"),
        ("lfm2", {"conv_L_cache": 17}, "must read 2 to 16 tokens"),
        ("qwen3_next", {"linear_num_key_heads": 2}, "cannot share 2 keys"),
        ("granite_hybrid", {"mamba_d_head": 13}, "must be 96"),
        ("granite_hybrid", {"time_step_limit": [1]}, "time_step_limit in config.json must be two numbers"),
    ],
)
def test_config_json_that_no_layer_can_have_is_refused(name: str, change: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict(HYBRIDS[name] | change)


def test_only_layers_with_attention_have_kv_and_ranks_are_refused() -> None:
    config = ModelConfig.from_dict(HYBRIDS["lfm2"])
    assert (config.states.layers, config.states.heads, math.isinf(config.step_limits[1])) == ((0, 2), 0, True)
    with pytest.raises(ModelError, match="runs on one rank only, got 2: set tensor_parallel_size"):
        check_shards(config, 2, 1)
