"""Adapters in one batch give the logits of models into whose weights they are merged."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from model_zoo import VOCAB, PagedRunner, make_reference
from safetensors.torch import load_file, save_file

from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.errors import AdapterError
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model
from support.adapters import merge, write_adapter
from support.thread_ranks import on_ranks

# Joined projections, rows interleaved by head, activations without gates, pairs of neighbors rotated, scaled and
# normalized products, and layers with experts.
FAMILIES = ("llama-biases", "phi3", "gpt-neox", "opt", "cohere", "granite", "gemma3", "qwen3-moe-dense")
LENGTHS, ADAPTERS = (7, 12, 5, 18, 3), [1, 0, 2, 1, 2]
# Second adapters have some modules only.
SOME = ("q_proj", "o_proj", "qkv_proj", "up_proj", "gate_up_proj", "dense", "fc1", "query_key_value")


def sequences() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (n,), generator=draw).tolist() for n in LENGTHS]


def layers_of(reference) -> dict[str, tuple[int, int]]:
    linear = [(name, module) for name, module in reference.named_modules() if isinstance(module, torch.nn.Linear)]
    return {name: tuple(module.weight.shape) for name, module in linear if ".layers." in name}


@pytest.fixture(scope="module", params=FAMILIES)
def adapted(request, tmp_path_factory):
    """Return a model's folder, those of two adapters, and the logits of each sequence with its adapter."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = make_reference(request.param)
    reference.save_pretrained(folder)
    every = layers_of(reference)
    some = {name: shape for name, shape in every.items() if name.endswith(SOME) and ".layers.1." in name}
    ends = {name.rpartition(".")[2] for name in some}
    last = sorted(ends)[0]
    deltas = {
        0: {},
        1: write_adapter(folder / "every", every, seed=1, rank=3),
        2: write_adapter(
            folder / "some", some, seed=2, rank=5, use_rslora=True, rank_pattern={last: 8}, alpha_pattern={last: 7}
        ),
    }
    expected = []
    for ids, adapter in zip(sequences(), ADAPTERS, strict=True):
        merged = copy.deepcopy(reference)
        merge(merged, deltas[adapter])
        with torch.no_grad():
            expected.append(merged(torch.tensor([ids])).logits[0])
    return folder, expected


def loaded(folder, group=None, dtype="float32", **options):
    model = load_model(folder, LoadSpec(dtype=dtype, **options), group=group)
    for number, name in ((1, "every"), (2, "some")):
        model.adapters.load(number, folder / name)
    return model


def logits(model, seed=2) -> list[torch.Tensor]:
    return PagedRunner(model, sequences(), 4, seed, ADAPTERS).run()


def assert_close(found, expected) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def test_adapters_in_one_batch_equal_merged_weights(adapted):
    folder, expected = adapted
    for attention in ("torch", "auto"):
        assert_close(logits(loaded(folder, attention=attention)), expected)
    for tp, pp in ((2, 1), (1, 2)):
        assert_close(on_ranks(tp, pp, lambda group: logits(loaded(folder, group)))[-1], expected)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return the folder of a model, and the shapes of its layers."""
    folder = tmp_path_factory.mktemp("llama")
    reference = make_reference("llama")
    reference.save_pretrained(folder)
    shapes = layers_of(reference)
    write_adapter(folder / "every", shapes, seed=1, rank=3)
    write_adapter(folder / "some", {name: shapes[name] for name in shapes if name.endswith(SOME)}, seed=2, rank=5)
    return folder, shapes


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "float32", "quantization": "int8"}], ids=str)
def test_rows_have_the_same_bits_in_every_batch(llama, options):
    model = loaded(llama[0], **options)
    alone = PagedRunner(load_model(llama[0], LoadSpec(**options)), [sequences()[1]], 4, 5).run()[0]
    first, second = logits(model, 3), logits(model, 4)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    # Without an adapter, a row has the bits of a model that has none, where all layers run in one call.
    assert torch.equal(first[1], alone)
    assert not torch.equal(first[0], PagedRunner(model, [sequences()[0]], 4, 5).run()[0])


def test_adapters_change_weights_in_codes_by_the_same_product(llama):
    folder, _ = llama
    model = loaded(folder, quantization="int8")
    plain = PagedRunner(model, sequences(), 4, 2).run()
    exact, rounded = logits(loaded(folder)), logits(model)
    error = max(float((a - b).abs().max()) for a, b in zip(exact, rounded, strict=True))
    change = max(float((a - b).abs().max()) for a, b in zip(plain, rounded, strict=True))
    assert error < change / 3


def test_unloaded_adapters_leave_nothing(llama):
    model = loaded(llama[0])
    assert model.adapters.bytes[1] >= model.adapters.planned_bytes(llama[0] / "every") > 0
    for number in (1, 2):
        model.adapters.unload(number)
    assert not model.adapters.bytes
    assert not any(product._pairs for product in model.adapters._products)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_layers_in_one_call_have_the_bits_of_single_calls(llama, quantization):
    """Only a batch in which the rows of each adapter follow one another runs in one call."""
    model, ids = loaded(llama[0], dtype="bfloat16", quantization=quantization), sequences()[3]
    segments = {
        name: Segment(ids[:length], 0, list(range(4 * at, 4 * at + 4)), adapter=adapter)
        for at, (name, length, adapter) in enumerate((("a", 9, 1), ("b", 8, 1), ("c", 9, 2), ("d", 9, 0)))
    }
    results = {}
    for order in ("abcd", "acdb"):
        kv = PagedKV(16, 4, model.config, model.dtype, "cpu")
        found = model.forward(PackedBatch.build([segments[name] for name in order], 4), kv)
        results[model.adapters.has_slices] = dict(zip(order, found, strict=True))
    assert all(torch.equal(results[True][name], results[False][name]) for name in segments)
    assert len({tuple(logits.tolist()) for logits in results[True].values()}) == len(segments)


Q = "base_model.model.model.layers.0.self_attn.q_proj"
# What is wrong with an adapter, and what the error says.
WRONG = {
    "another shape": (
        lambda t, c: t.update({f"{Q}.lora_A.weight": torch.ones(3, 9)}),
        r"adapts model.layers.0.self_attn.q_proj as a matrix of 64 x 9, and the model's is 64 x 64",
    ),
    "another rank": (lambda t, c: c.update(r=4), r"lora_A of shape \(3, 96\) .* implies rank 4"),
    "a rank that is too high": (
        lambda t, c: (
            c.update(rank_pattern={"0.self_attn.q_proj": 513}),
            t.update({f"{Q}.lora_A.weight": torch.ones(513, 64), f"{Q}.lora_B.weight": torch.ones(64, 513)}),
        ),
        r"has rank 513 for model.layers.0.self_attn.q_proj, which must be at most 512",
    ),
    "an unknown layer": (
        lambda t, c: t.update({f"{Q}x.lora_{part}.weight": torch.ones(3, 3) for part in "AB"}),
        r"adapts model.layers.0.self_attn.q_projx, which this model does not have .* layers take adapters of "
        r"self_attn.o_proj, self_attn.q_proj",
    ),
    "half a pair": (lambda t, c: t.pop(f"{Q}.lora_A.weight"), "only one of lora_A and lora_B of model.layers.0"),
    "an embedding": (
        lambda t, c: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(3, 3)}),
        "adapters of embeddings and of the output are not supported",
    ),
    "the output": (
        lambda t, c: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(3, 64)}),
        "adapters of embeddings and of the output are not supported",
    ),
    "a magnitude": (
        lambda t, c: t.update({f"{Q}.lora_magnitude_vector": torch.ones(64)}),
        "only lora_A.weight and lora_B.weight are supported",
    ),
    "integers": (
        lambda t, c: t.update({f"{Q}.lora_A.weight": torch.ones(3, 64, dtype=torch.int8)}),
        "has type I8 for base_model",
    ),
    "saved modules": (lambda t, c: c.update(modules_to_save=["lm_head"]), r"has modules_to_save \['lm_head'\]"),
    "DoRA": (lambda t, c: c.update(use_dora=True), "has use_dora True in adapter_config.json, which is not supported"),
    "biases": (lambda t, c: c.update(bias="all"), "has bias 'all' in adapter_config.json, and only none is supported"),
    "another method": (lambda t, c: c.update(peft_type="IA3"), "has peft_type 'IA3'"),
    "changed weights": (lambda t, c: c.update(init_lora_weights="pissa"), "has init_lora_weights 'pissa'"),
    "no rank": (lambda t, c: c.pop("r"), "must have a positive r in adapter_config.json, got None"),
    "a wrong pattern": (lambda t, c: c.update(alpha_pattern={"(": 3}), "no regular expression"),
    "no tensors": (lambda t, c: t.clear(), "has no tensor in adapter_model.safetensors"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_adapters_are_refused_in_one_sentence(llama, tmp_path, name):
    folder, shapes = llama
    change, message = WRONG[name]
    write_adapter(tmp_path, shapes, seed=1, rank=3)
    files = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    tensors, config = load_file(files[0]), json.loads(files[1].read_text())
    change(tensors, config)
    save_file(tensors, files[0])
    files[1].write_text(json.dumps(config))
    assert_refused(folder, tmp_path, message)


def test_adapters_that_cannot_be_read_are_refused(llama, tmp_path):
    folder, shapes = llama
    assert_refused(folder, tmp_path / "none", "is not a folder: an adapter is one")
    assert_refused(folder, tmp_path, "has no adapter_config.json, so it is no adapter of PEFT")
    write_adapter(tmp_path, shapes, seed=1)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert_refused(folder, tmp_path, "cannot be read")
    file.rename(tmp_path / "adapter_model.bin")
    assert_refused(folder, tmp_path, "adapter_model.bin is pickled: save it as safetensors")


def assert_refused(folder, adapter, message) -> None:
    model = load_model(folder, LoadSpec(dtype="float32"))
    with pytest.raises(AdapterError, match=message) as error:
        model.adapters.load(1, adapter)
    assert "\n" not in str(error.value)
    assert not model.adapters.bytes
