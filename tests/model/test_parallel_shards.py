from __future__ import annotations

from collections import Counter

import pytest
import torch
from model_zoo import save_reference
from safetensors import safe_open

from skipjoin.model import safetensors_weights as reading
from skipjoin.model.config import ModelConfig
from skipjoin.model.errors import ModelError
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model
from skipjoin.model.parallel import WHOLE, Shard, check_shards
from skipjoin.model.safetensors_weights import FolderWeights
from skipjoin.model.weight_files import ModelFiles, Source
from skipjoin.model.weights import RandomWeights
from support.thread_ranks import Meeting

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "llama",
        "vocab_size": 101,
        "hidden_size": 96,
        "intermediate_size": 80,
        "num_hidden_layers": 7,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    }
)
KINDS = ("heads", "columns", "vocabulary")


def shards(tp: int, pp: int = 1) -> list[Shard]:
    return [Shard.of_rank(rank, tp, pp) for rank in range(tp * pp)]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_of_a_stage_partition_the_weights(tp):
    for kind, total in zip(KINDS, (24, 80, 101), strict=True):
        parts = [getattr(shard, kind)(CONFIG) for shard in shards(tp)]
        assert [row for part in parts for row in part] == list(range(total))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert shards(tp)[0].vocabulary_sizes(CONFIG) == [len(shard.vocabulary(CONFIG)) for shard in shards(tp)]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_query_heads_share_a_rank_with_their_key_value_head(tp):
    for shard in shards(tp):
        heads, kv_heads = shard.heads(CONFIG), shard.kv_heads(CONFIG)
        for index, head in enumerate(heads):
            assert kv_heads[index * len(kv_heads) // len(heads)] == head * CONFIG.num_kv_heads // CONFIG.num_heads
        assert shard.query_rows(CONFIG) == range(heads.start * 4, heads.stop * 4)
        assert shard.kv_rows(CONFIG) == range(kv_heads.start * 4, kv_heads.stop * 4)


@pytest.mark.parametrize("pp", [1, 2, 3, 7])
def test_stages_differ_by_at_most_one_layer(pp):
    parts = [shard.layers(CONFIG) for shard in shards(2, pp)[::2]]
    assert [row for part in parts for row in part] == list(range(7))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ranks_are_numbered_by_stage():
    assert [(s.pp_rank, s.tp_rank, s.rank, s.is_first, s.is_last) for s in shards(2, 2)] == [
        (0, 0, 0, True, False),
        (0, 1, 1, True, False),
        (1, 0, 2, False, True),
        (1, 1, 3, False, True),
    ]
    assert WHOLE.is_first
    assert WHOLE.is_last
    assert shards(2, 2)[2].name == "rank 2 (stage 1 of 2, tensor rank 0 of 2)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 0, 1), "tp_size must be at least 1, got 0"),
        ((2, 2, 0, 1), r"tp_rank must be in \[0, 1\], got 2"),
        ((0, 1, -1, 2), r"pp_rank must be in \[0, 1\], got -1"),
        ((0, 1, 0, -1), "pp_size must be at least 1, got -1"),
    ],
)
def test_invalid_shards_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        Shard(*arguments)


def test_ranks_out_of_range_are_rejected():
    with pytest.raises(ValueError, match=r"rank must be in \[0, 3\], got 4"):
        Shard.of_rank(4, 2, 2)


@pytest.mark.parametrize(
    ("tp", "pp", "message"),
    [
        (0, 1, r"tensor_parallel_size must be in \[1, 24\], .* got 0; the nearest that fits is 1$"),
        (25, 1, r"tensor_parallel_size must be in \[1, 24\], .* got 25; the nearest that fits is 8$"),
        (5, 1, "tensor_parallel_size must divide the model's 24 attention heads, got 5; the nearest .* is 4 or 8$"),
        (3, 1, "must divide the model's 4 key-value heads, or be a multiple of them, got 3; .* is 2 or 4$"),
        (12, 1, "tensor_parallel_size must divide the 80 columns of the model's MLP, got 12; .* is 8$"),
        (1, 0, r"pipeline_parallel_size must be in \[1, 7\], .* got 0; the nearest that fits is 1$"),
        (1, 8, r"pipeline_parallel_size must be in \[1, 7\], .* got 8; the nearest that fits is 7$"),
    ],
)
def test_sizes_that_do_not_fit_are_rejected(tp, pp, message):
    with pytest.raises(ModelError, match=message):
        check_shards(CONFIG, tp, pp)


def test_sizes_that_fit_are_accepted():
    for tp in (1, 2, 4, 8):
        for pp in range(1, 8):
            check_shards(CONFIG, tp, pp)


def test_models_reject_sizes_that_do_not_fit(tmp_path):
    save_reference("llama", tmp_path)
    group = Meeting(3, 1).groups()[0]
    with pytest.raises(ModelError, match=r"tensor_parallel_size must divide the model's 4 attention heads, got 3"):
        load_model(tmp_path, group=group)


@pytest.mark.parametrize(
    "part", [{}, {"rows": range(10, 37)}, {"columns": range(48, 64)}, {"rows": range(0, 1), "columns": range(2, 5)}]
)
def test_read_and_random_parts_equal_slices_of_whole_tensors(tmp_path, part):
    save_reference("llama", tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    name, shape = "model.embed_tokens.weight", (101, 64)
    rows, columns = part.get("rows", range(101)), part.get("columns", range(64))
    for weights in (
        FolderWeights(Source(ModelFiles.of(tmp_path), LoadSpec(), config, torch.float32, torch.device("cpu"))),
        RandomWeights(5, torch.float32, torch.device("cpu")),
    ):
        whole = weights.take(name, *shape)
        found = weights.take(name, *shape, **part)
        assert found.is_contiguous()
        assert torch.equal(found, whole[rows.start : rows.stop, columns.start : columns.stop])
    bias = RandomWeights(5, torch.float32, torch.device("cpu"))
    assert torch.equal(bias.take("b", 9, rows=range(3, 7)), bias.take("b", 9)[3:7])
    assert not torch.equal(bias.take("b", 9), bias.take("c", 9))


class CpuCopy:
    """File that counts the elements read of each tensor."""

    def __init__(self, file, read: Counter[str], wholes: set[str]) -> None:
        self._file, self._read, self._wholes = file, read, wholes

    def keys(self):
        return self._file.keys()

    def get_tensor(self, name):
        tensor = self._file.get_tensor(name)
        self._read[name] += tensor.numel()
        self._wholes.add(name)
        return tensor

    def get_slice(self, name):
        stored, read = self._file.get_slice(name), self._read

        class Slice:
            def get_shape(self):
                return stored.get_shape()

            def get_dtype(self):
                return stored.get_dtype()

            def __getitem__(self, where):
                tensor = stored[where]
                read[name] += tensor.numel()
                return tensor

        return Slice()


@pytest.mark.parametrize("name", ["llama", "llama-tied-mha", "llama-biases", "qwen3", "opt", "gpt-neox"])
def test_ranks_read_only_their_own_weights(tmp_path, monkeypatch, name):
    save_reference(name, tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        sizes = {key: file.get_tensor(key).numel() for key in file.keys()}  # noqa: SIM118
    read: Counter[str] = Counter()
    wholes: set[str] = set()
    monkeypatch.setattr(
        reading, "safe_open", lambda path, framework: CpuCopy(safe_open(path, framework=framework), read, wholes)
    )
    tied = name in ("llama-tied-mha", "opt")
    total: Counter[str] = Counter()
    for group in Meeting(2, 2).groups():
        read.clear()
        wholes.clear()
        load_model(tmp_path, group=group)
        for key, count in read.items():
            layer = next((int(part) for part in key.split(".") if part.isdigit()), None)
            assert layer is None or layer == group.shard.pp_rank, key
            # Norms, position embeddings and biases of reduced outputs are read whole.
            is_own = "norm" in key or "positions" in key or key.endswith(_SUMMED_BIASES)
            assert is_own == (key in wholes), key
            assert count == sizes[key] if is_own else abs(count - sizes[key] / 2) <= sizes[key] / 101, key
        total += read
    for key, count in total.items():
        if "norm" in key:
            assert count == 2 * sizes[key]
        elif tied and "embed_tokens" in key:
            assert count == 2 * sizes[key]  # the last stage also needs it for the logits
        elif "positions" in key:
            assert count == 2 * sizes[key]
        else:
            assert count == sizes[key], key
    unread = set(sizes) - set(total)
    assert unread <= ({"lm_head.weight"} if tied else set())


_SUMMED_BIASES = ("o_proj.bias", "down_proj.bias", "out_proj.bias", "fc2.bias", "dense.bias", "dense_4h_to_h.bias")
