from __future__ import annotations

import pytest
import torch
from model_zoo import CONFIGS, VOCAB, PagedRunner, save_reference

from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model, random_model
from skipjoin.model.parallel import Group
from support.thread_ranks import Meeting, ThreadGroup, on_ranks
from support.worlds import checkered, exhaustive

LENGTHS = (1, 5, 18)
# Tensor ranks and stages. Four tensor ranks share two key-value heads.
MANY, FEW = ((4, 1), (2, 2)), ((2, 1), (1, 2))
# Those that several ranks can hold.
_LATENT = ("deepseek", "glm4-moe-lite", "youtu")
SHARED = [name for name in sorted(CONFIGS) if not name.startswith(("gemma4", *_LATENT))]


def sequences(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def logits(model) -> list[torch.Tensor]:
    return PagedRunner(model, sequences(3), 4, seed=2).run()


@pytest.mark.parametrize("layouts", [MANY, exhaustive(FEW)], ids=["many", "few"])
@pytest.mark.parametrize(("name", "attention"), checkered(SHARED, ["torch", "auto"]))
def test_ranks_compute_the_logits_of_one_rank(name, attention, layouts, tmp_path):
    save_reference(name, tmp_path)
    expected = logits(load_model(tmp_path, LoadSpec(dtype="float32", attention=attention)))
    for tp, pp in layouts:

        def work(group):
            return logits(load_model(tmp_path, LoadSpec(dtype="float32", attention=attention), group=group))

        found = on_ranks(tp, pp, work)
        for rank in range(tp * (pp - 1), tp * pp):
            for ours, theirs in zip(found[rank], expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
        assert all(len(rows) == 0 for rank in range(tp * (pp - 1)) for rows in found[rank])
        # All sampling ranks must have identical logits.
        for rank in range(tp * (pp - 1), tp * pp):
            assert all(torch.equal(a, b) for a, b in zip(found[rank], found[-1], strict=True))


@pytest.mark.parametrize(("tp", "pp", "name"), [(4, 1, "llama"), (4, 2, "llama"), (4, 1, "olmo2"), (4, 1, "gemma2")])
def test_logits_on_many_ranks_are_bit_identical_in_every_batch_and_chunking(tp, pp, name):
    """Preemption changes which requests run together, and where a prompt is cut."""

    def work(group):
        model = random_model(raw(name), seed=4, group=group)
        return [PagedRunner(model, sequences(3), 4, seed=seed).run() for seed in (2, 5)]

    first, second = on_ranks(tp, pp, work)[-1]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def raw(name: str, **changes) -> dict:
    config = CONFIGS[name]()
    return config.to_dict() | {"architectures": [type(config).__name__.replace("Config", "ForCausalLM")]} | changes


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt-neox", "opt"])
@pytest.mark.parametrize(("layers", "stages"), [(3, 2), (5, 3)])
def test_uneven_stages_and_random_weights_match_one_rank(name, layers, stages):
    changed = raw(name, num_hidden_layers=layers, layer_types=None)
    expected = logits(random_model(changed, seed=4))
    found = on_ranks(1, stages, lambda group: logits(random_model(changed, seed=4, group=group)))
    for ours, theirs in zip(found[-1], expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


# Reductions for the embedding and each of two layers; GPT-NeoX reduces attention and MLP together.
# Ranks gather the logits of each router.
@pytest.mark.parametrize(
    ("name", "sums", "gathers"),
    [("llama", 5, 1), ("opt", 5, 1), ("gpt-neox", 3, 1), ("gpt-neox-serial", 5, 1), ("qwen3-moe", 5, 3)],
)
def test_ranks_use_the_minimum_of_collectives(name, sums, gathers):
    def calls(group: ThreadGroup) -> dict[str, int]:
        model = random_model(raw(name), group=group)
        kv = PagedKV(4, 4, model.config, model.dtype, "cpu", shard=model.shard)
        model.forward(PackedBatch.build([Segment([1, 2, 3], 0, [0])], 4), kv)
        return group.calls

    assert on_ranks(2, 1, calls)[1] == {"all_reduce": sums, "gather": gathers, "send": 0, "receive": 0}
    first, second = on_ranks(1, 2, calls)
    assert (first["send"], first["receive"], second["send"], second["receive"]) == (1, 0, 0, 1)


def test_a_single_rank_uses_no_collectives(monkeypatch):
    model = random_model(raw("llama"))
    for name in ("count_once", "all_reduce", "send", "receive"):
        monkeypatch.setattr(Group, name, None)
    assert all(len(rows) for rows in logits(model))


def test_tokens_outside_the_vocabulary_are_rejected_on_every_rank():
    def work(group):
        model = random_model(raw("llama"), group=group)
        kv = PagedKV(4, 4, model.config, model.dtype, "cpu", shard=model.shard)
        with pytest.raises(IndexError, match=r"token ids must be in \[0, 100\]"):
            model.forward(PackedBatch.build([Segment([1, VOCAB], 0, [0])], 4), kv)

    on_ranks(2, 1, work)


def test_a_failed_rank_does_not_block_others():
    def work(group):
        if group.shard.rank == 1:
            raise ZeroDivisionError
        return logits(random_model(raw("llama"), group=group))

    with pytest.raises(ZeroDivisionError):
        on_ranks(2, 1, work)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_ranks_hold_the_kv_of_their_heads_and_layers(tp, pp):
    config = ModelConfig.from_dict(raw("llama"))  # 2 layers, 2 key-value heads of 16
    for group in Meeting(tp, pp).groups():
        kv = PagedKV(3, 4, config, torch.bfloat16, "cpu", shard=group.shard)
        assert kv.head_view().shape == (3, 2 // pp * 2 * max(1, 2 // tp), 4, 16)
        assert kv.block_bytes == PagedKV.bytes_per_block(config, 4, torch.bfloat16, group.shard)


def test_weights_are_counted_per_rank():
    whole = random_model(raw("llama"), attention="torch")
    ranks = on_ranks(2, 2, lambda group: random_model(raw("llama"), attention="torch", group=group).weight_bytes)
    norms = 4 * 64 * (2 * 2 + 1)  # float32, on both ranks of a stage
    assert sum(ranks) == whole.weight_bytes + norms
