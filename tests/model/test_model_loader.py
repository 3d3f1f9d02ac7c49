from __future__ import annotations

import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from model_zoo import CONFIGS, PagedRunner, make_reference, save_reference
from safetensors.torch import load_file, save_file

from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.config import ModelConfig
from skipjoin.model.convert import convert_folder
from skipjoin.model.errors import ModelError
from skipjoin.model.family import find_architecture
from skipjoin.model.folder import resolve_folder
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model, random_model
from skipjoin.model.ops.build import load_library
from skipjoin.model.self_attention import Rotary
from skipjoin.model.weight_files import INDEX

IDS = [[5, 9, 33, 2, 71, 8]]


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}


def logits(model) -> torch.Tensor:
    return PagedRunner(model, IDS, 4, seed=0).run()[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_reference("llama", folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "llama")


def edit(folder, **changes) -> None:
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def test_config_fields(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 77]}))
    config = ModelConfig.from_folder(folder)
    assert (config.family, config.num_layers, config.num_heads, config.num_kv_heads) == ("llama", 2, 4, 2)
    assert (config.head_dim, config.vocab_size, config.max_positions) == (16, 101, 128)
    assert (config.eos_token_ids, config.dtype_name) == ((2, 77), "float32")
    assert load_model(folder).dtype == torch.float32


def test_legacy_rope_fields_are_read(folder):
    expected = ModelConfig.from_folder(folder).rope
    edit(folder, rope_parameters=None, rope_theta=expected.theta, rope_scaling=None)
    assert ModelConfig.from_folder(folder).rope == expected
    edit(folder, rope_scaling={"type": "linear", "factor": 2.0})
    assert ModelConfig.from_folder(folder).rope.factor == 2.0


YARN_OF_CARDS = YARN | {"original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("positions", "changes", "context"),
    [
        (128, {"rope_parameters": {"rope_type": "default"}}, 128),
        (40, {"rope_scaling": YARN_OF_CARDS}, 128),  # as in Qwen3: 40,960 positions, 32,768 of them trained
        (32, {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, 128),
        (128, {"rope_parameters": YARN_OF_CARDS}, 128),  # the product already
        (32, {"rope_parameters": YARN}, 128),
        (40, {"rope_parameters": YARN, "original_max_position_embeddings": 32}, 128),
        (128, {"rope_parameters": YARN_OF_CARDS | {"factor": None}}, 128),
        (1000, {"rope_parameters": YARN_OF_CARDS | {"factor": None, "original_max_position_embeddings": 300}}, 1000),
        (32, {"rope_scaling": {"type": "linear", "factor": 2.5}}, 80),
        (80, {"rope_scaling": {"type": "linear", "factor": 2.5, "original_max_position_embeddings": 32}}, 80),
        (96, {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32}}, 96),
    ],
)
def test_context_is_factor_times_the_original_length(folder, positions, changes, context):
    edit(folder, **({"rope_parameters": None, "max_position_embeddings": positions} | changes))
    assert ModelConfig.from_folder(folder).max_positions == context


def test_rope_scaling_of_a_card_keeps_the_newer_rope_theta(folder):
    edit(folder, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rope_scaling=YARN_OF_CARDS)
    rope = ModelConfig.from_folder(folder).rope
    assert (rope.scaling, rope.theta, rope.factor) == ("yarn", 1e6, 4.0)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 8.0},
        LLAMA3 | {"original_max_position_embeddings": 8192},
        YARN | {"original_max_position_embeddings": 16384},
        YARN | {"factor": 16.0, "truncate": False, "beta_fast": 40.0, "beta_slow": 0.5},
        YARN | {"attention_factor": 0.75},
        YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
        YARN | {"partial_rotary_factor": 0.5, "mscale": 0.7},
        {"rope_type": "longrope", "short_factor": [1.0, 1.25] * 16, "long_factor": [9.0] * 32}
        | {"original_max_position_embeddings": 4096},
    ],
    ids=str,
)
def test_rotary_tables_match_transformers_at_long_positions(scaling):
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding  # noqa: PLC0415

    shape = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 16384}
    reference = LlamaConfig(**shape, rope_parameters={"rope_theta": 500000.0} | scaling)
    config = ModelConfig.from_dict({"architectures": ["LlamaForCausalLM"]} | reference.to_dict())
    positions = torch.tensor([0, 1, 999, config.max_positions // 2 + 1, config.max_positions - 1])
    expected = LlamaRotaryEmbedding(reference)(torch.zeros(1), positions[None])
    found = Rotary(config.rope, config.max_positions, "cpu").cos_sin[positions].chunk(2, dim=1)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs[0, :, : ours.shape[1]], atol=1e-6, rtol=0)


_SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "intermediate_size": 96,
    "vocab_size": 101,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
_LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
_LLAMA3_OF_CARDS = LLAMA3 | {"original_max_position_embeddings": 512}
_HALF_LOCAL = (["sliding_attention"] * 3 + ["full_attention"]) * 2
# As files on the hub have them, mostly in older forms and without entries that are the default.
HUB_CONFIGS = [
    (
        "Gemma3ForCausalLM",
        {
            **{"hidden_size": 64, "num_hidden_layers": 8, "intermediate_size": 96, "sliding_window": 1024},
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    ),
    (
        "Gemma3ForCausalLM",
        _SMALL
        | {"num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 168, "sliding_window": 512}
        | {"rope_theta": 1e6, "rope_local_base_freq": 10000, "sliding_window_pattern": 4, "rope_scaling": None}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    ("Gemma2ForCausalLM", _SMALL | {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}),
    ("GemmaForCausalLM", _SMALL | {"hidden_act": "gelu", "hidden_activation": None, "num_key_value_heads": 1}),
    (
        "Olmo3ForCausalLM",
        _SMALL | {"rope_theta": 5e5, "rope_scaling": YARN | {"original_max_position_embeddings": 512}},
    ),
    ("Phi3ForCausalLM", _SMALL | {"original_max_position_embeddings": 1024, "rope_scaling": _LONG}),
    ("Phi3ForCausalLM", _SMALL | {"rope_scaling": None, "sliding_window": 2047}),
    ("SmolLM3ForCausalLM", _SMALL | {"use_sliding_window": True, "sliding_window": 100}),
    ("SmolLM3ForCausalLM", _SMALL | {"no_rope_layer_interval": 3, "rope_theta": 5e6, "sliding_window": None}),
    ("CohereForCausalLM", _SMALL),
    ("Cohere2ForCausalLM", _SMALL | {"sliding_window_pattern": 3, "rope_theta": 50000, "head_dim": 16}),
    (
        "Exaone4ForCausalLM",
        _SMALL | {"num_key_value_heads": 2, "sliding_window": None, "layer_types": ["full_attention"] * 8},
    ),
    (
        "Exaone4ForCausalLM",
        _SMALL | {"num_key_value_heads": 2, "sliding_window_pattern": "LLLG", "layer_types": _HALF_LOCAL},
    ),
    ("Ernie4_5ForCausalLM", _SMALL),
    ("IQuestCoderForCausalLM", _SMALL | {"num_attention_heads": 8}),
    ("GemmaForCausalLM", _SMALL | {"num_attention_heads": 16}),
    ("GraniteMoeSharedForCausalLM", _SMALL),
    ("MinistralForCausalLM", _SMALL | {"num_key_value_heads": 2, "head_dim": 16}),
    ("Ministral3ForCausalLM", _SMALL | {"num_key_value_heads": 2}),
    ("GlmForCausalLM", _SMALL | {"partial_rotary_factor": 0.5, "head_dim": 16}),
    ("Glm4ForCausalLM", _SMALL | {"partial_rotary_factor": 0.25, "rope_theta": 1000.0}),
    # Both names, as releases of transformers wrote them, of which one was changed since.
    (
        "GPTNeoXForCausalLM",
        _SMALL | {"rotary_emb_base": 40000, "rope_theta": 1e4, "rotary_pct": 0.5, "partial_rotary_factor": 0.25},
    ),
    ("CwmForCausalLM", _SMALL | {"num_key_value_heads": 2, "rope_theta": 5e5, "rope_scaling": _LLAMA3_OF_CARDS}),
    ("CwmForCausalLM", _SMALL | {"num_key_value_heads": 2, "rope_parameters": None}),
]


@pytest.mark.parametrize(("architecture", "raw"), HUB_CONFIGS)
def test_files_mean_what_transformers_reads_in_them(architecture, raw):
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - takes seconds

    _, family = find_architecture([architecture], None)
    kind = {"architectures": [architecture]}
    full = CONFIG_MAPPING[family.architectures[architecture]].from_dict(dict(raw)).to_dict()
    named = {"eos_token_ids": (), "dtype_name": None}
    ours, theirs = (replace(ModelConfig.from_dict(settings | kind), **named) for settings in (raw, full))
    assert ours == theirs


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers must have 0 or 1 for each of 8 layers"),
        ({"layer_types": ["linear_attention"] * 8}, "must be 8 of sliding_attention, full_attention, got"),
        ({"text_config": "none"}, "text_config in config.json must be an object, got 'none'"),
        ({"text_config": {"hidden_size": -1}}, r"hidden_size in config.json must be an integer in \[1, "),
    ],
)
def test_invalid_layers_are_rejected(raw, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict({"architectures": ["SmolLM3ForCausalLM"]} | _SMALL | raw)
    with pytest.raises(ModelError, match=r"rope_scaling in config.json must be an object, got 'linear'"):
        ModelConfig.from_dict({"architectures": ["Gemma3ForCausalLM"], "rope_scaling": "linear"} | _SMALL)
    with pytest.raises(ModelError, match=r"residual_multiplier in config.json must be a finite number above 0, got 0"):
        ModelConfig.from_dict({"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0} | _SMALL)


@pytest.mark.parametrize(
    ("changes", "stored", "used"),
    [
        ({"dtype": None}, torch.bfloat16, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "auto"}, torch.float16, torch.float16),
        ({"dtype": None}, torch.float64, torch.float32),
        ({"dtype": "float32"}, torch.bfloat16, torch.float32),
        ({"dtype": None, "torch_dtype": "torch.half"}, torch.bfloat16, torch.float16),
    ],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_without_a_dtype_in_the_config_most_weights_decide(folder, changes, stored, used, shards):
    """Norms and biases are often kept in float32."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: one if "norm" in name else one.to(stored) for name, one in tensors.items()}
    names = sorted(tensors, key=lambda name: "norm" not in name)  # the first file has norms only
    parts = [names] if shards == 1 else [names[:5], names[5:]]
    (folder / "model.safetensors").unlink()
    for number, part in enumerate(parts):
        save_file({name: tensors[name] for name in part}, folder / f"part-{number}.safetensors")
    if shards > 1:
        where = {name: f"part-{number}.safetensors" for number, part in enumerate(parts) for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    edit(folder, **changes)
    model = load_model(folder)
    assert (model.dtype, model.kv_format.name) == (used, "auto")
    assert load_model(folder, LoadSpec(load_format="dummy")).dtype == used
    assert load_model(folder, LoadSpec(dtype="float32")).dtype == torch.float32


def test_random_weights_without_any_dtype_are_float32(folder, caplog):
    (folder / "model.safetensors").unlink()
    edit(folder, dtype=None)
    with caplog.at_level("INFO"):
        assert load_model(folder, LoadSpec(load_format="dummy")).dtype == torch.float32
    assert "config.json has no dtype, and " in caplog.text
    with pytest.raises(ModelError, match=r"has no \.safetensors file"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DebertaModel"]}, "DebertaModel is not supported"),
        (
            {"architectures": None, "model_type": "xglm"},
            "XGLMForCausalLM has no family of Skipjoin's own, and cannot run",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1e3}},
            "supported are default, linear, llama3, yarn, longrope: with alpha, its frequencies depend on the length",
        ),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "must have a factor for each of .* pairs, got None"),
        ({"rope_scaling": {"type": "ntk"}}, "'ntk' is not supported"),
        ({"rope_scaling": "yarn"}, "rope_scaling in config.json must be an object, got 'yarn'"),
        ({"rope_parameters": {"full_attention": YARN}}, "must be the same for all layers, .*: full_attention"),
        (
            {"rope_scaling": YARN | {"factor": 1e300}},
            "factor in config.json must be at most 8.38.*e\\+06 .*, got 1e\\+300",
        ),
        ({"dtype": "int4"}, "dtype in config.json must be one of float32, bfloat16, float16, got 'int4'"),
        ({"dtype": None, "torch_dtype": 16}, "torch_dtype in config.json must be one of float32, .*, got 16"),
        ({"rope_parameters": {"rope_type": "linear"}}, "no 'factor'"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"hidden_size": "wide"}, r"hidden_size in config.json must be an integer in \[1, 1048576\], got 'wide'"),
        ({"num_key_value_heads": 3}, "cannot share 3 key-value heads"),
        ({"hidden_act": "swiglu"}, "activation 'swiglu' is not supported"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers in config.json must be an integer in \[1, 16384\], got 0"),
        ({"num_hidden_layers": 10**13}, "num_hidden_layers in config.json must be an integer in .*, got 1000000000000"),
        ({"max_position_embeddings": float("inf")}, "max_position_embeddings in config.json must be an integer in"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads in config.json must be an integer in"),
        ({"num_attention_heads": 4.5}, "num_attention_heads in config.json must be an integer in .*, got 4.5"),
        ({"num_attention_heads": True}, "num_attention_heads in config.json must be an integer in .*, got True"),
        ({"num_key_value_heads": -1}, "num_key_value_heads in config.json must be an integer in"),
        ({"sliding_window": -5}, r"sliding_window in config.json must be an integer in \[0, "),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps in config.json must be a number in \[1e-30, 1\]"),
        *(
            ({"rms_norm_eps": value}, r"rms_norm_eps in config.json must be a number in \[1e-30, 1\], got ")
            for value in (float("nan"), float("inf"), 0, -1e-6, 1e-46, "1e-6", [1])
        ),
        *(
            ({"rope_parameters": {"rope_type": "default", "rope_theta": value}}, "rope_theta in config.json must be")
            for value in (float("nan"), float("inf"), 0, -10000.0, 1e-300, "x")
        ),
        *(
            ({"rope_parameters": {"rope_type": "linear", "factor": value}}, "factor in config.json must be a finite")
            for value in (float("nan"), float("inf"), 0, -2.0)
        ),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor in config.json must be below"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": float("nan")}}, "high_freq_factor in config.json must be"),
        ({"rope_parameters": YARN | {"beta_fast": float("nan")}}, "beta_fast in config.json must be a finite"),
        ({"rope_parameters": YARN | {"attention_factor": 0.0}}, "attention_factor in config.json must be a finite"),
        ({"rope_parameters": YARN | {"original_max_position_embeddings": 0.5}}, "original_max_position_embeddings in"),
        ({"rope_parameters": {"partial_rotary_factor": float("nan")}}, "partial_rotary_factor in config.json must be"),
        ({"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor in config.json must be"),
        ({"architectures": 7}, "architectures in config.json must be a list of names, got 7"),
        ({"architectures": [["LlamaForCausalLM"]]}, "is not supported"),
    ],
    ids=str,
)
def test_invalid_configs_are_rejected(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_folder(folder)


def test_unusable_folders_are_rejected(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="is not a folder"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="is not a folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model(tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(folder)
    (folder / "config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ModelError, match="nested too deeply"):
        load_model(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        load_model(folder)


def test_unusable_weights_are_rejected(folder):
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    removed = tensors.pop("model.norm.weight")
    save_file(tensors, weights)
    with pytest.raises(ModelError, match=r"has no tensor 'model\.norm\.weight'"):
        load_model(folder)
    save_file(tensors | {"model.norm.weight": removed[:5].clone()}, weights)
    with pytest.raises(ModelError, match=r"has shape \(5,\), but config\.json implies \(64,\)"):
        load_model(folder)
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(folder)
    weights.unlink()
    os.mkfifo(folder / "pipe.safetensors")
    with pytest.raises(ModelError, match=r"has no \.safetensors file"):
        load_model(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="skipjoin convert"):
        load_model(folder)


def write_header(file, header: object, data: bytes = b"", size: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)


A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "size"),
    [
        ({"a": A, "b": A}, 8, None),
        ({"a": A, "b": A | {"data_offsets": [4, 12]}}, 12, None),
        ({"a": A | {"data_offsets": [0, 8000], "shape": [2000]}}, 8, None),
        ({"a": A | {"data_offsets": [-8, 0]}}, 8, None),
        ({"a": A | {"data_offsets": [8, 0]}}, 8, None),
        ({"a": A, "b": A | {"data_offsets": [16, 24]}}, 24, None),
        ({"a": A}, 80, None),
        ({"a": A | {"shape": [2**62, 8]}}, 8, None),
        ({"a": A}, 8, 2**63),
        ({"a": A}, 8, 99_000_000),
        (b"{" * 100_000, 0, None),
        (b"[1]", 0, None),
        (b"", 0, None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_invalid_weight_headers_are_rejected(folder, header, data, size):
    write_header(folder / "model.safetensors", header, b"\0" * data, size)
    with pytest.raises(ModelError, match=r"the weights in .* cannot be read: Error while deserializing header"):
        load_model(folder)


@pytest.mark.parametrize(("dtype", "torch_type"), [("F8_E4M3", torch.float8_e4m3fn), ("I64", torch.int64)])
def test_unsupported_weight_types_are_rejected(folder, dtype, torch_type):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch_type)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"norm.weight has type {dtype}; supported are F64, F32, BF16, F16"):
        load_model(folder)


def write_index(folder, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", ["{outside}", "../outside.safetensors", "a/../../outside.safetensors"])
def test_index_files_outside_the_folder_are_rejected(folder, tmp_path, name):
    tensors = load_file(folder / "model.safetensors")
    outside = tmp_path / "outside.safetensors"
    (folder / "a").mkdir()
    (folder / "model.safetensors").rename(outside)
    write_index(folder, dict.fromkeys(tensors, name.format(outside=outside)))
    with pytest.raises(ModelError, match=r"weight_map in .* must name files inside its folder, got "):
        load_model(folder)


@pytest.mark.parametrize("weight_map", [None, [], "model.safetensors", {"a": 1}, {"a": ["model.safetensors"]}], ids=str)
def test_invalid_indexes_are_rejected(folder, weight_map):
    write_index(folder, weight_map)
    with pytest.raises(ModelError, match=r"weight_map in .* must give the name of a file for each tensor"):
        load_model(folder)


@pytest.mark.parametrize("has_index", [True, False])
def test_weight_links_are_limited_to_the_folder_or_the_hub_cache(folder, tmp_path, has_index):
    expected = logits(load_model(folder))
    repository = tmp_path / "models--some--model"
    snapshot, blobs = repository / "snapshots" / "main", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in folder.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    if has_index:
        write_index(snapshot, dict.fromkeys(load_file(blobs / "model.safetensors"), "model.safetensors"))
    torch.testing.assert_close(logits(load_model(snapshot)), expected)
    (tmp_path / "whole").symlink_to(snapshot)
    torch.testing.assert_close(logits(load_model(tmp_path / "whole")), expected)
    (blobs / "model.safetensors").rename(tmp_path / "elsewhere")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=r"must not be a link to a file outside its folder, .* make a hard link"):
        load_model(snapshot)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "dtype must be auto"),
        ({"device": "tpu9"}, "device must be auto, cpu, cuda or cuda:N"),
        ({"device": "meta"}, "device must be auto"),
        ({"attention": "magic"}, "attention must be"),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected(folder, arguments, message):
    with pytest.raises(ModelError, match=message):
        load_model(folder, LoadSpec(**arguments))


@pytest.mark.skipif(load_library() is None or not Path("/proc/self/maps").exists(), reason="needs compiled products")
def test_a_loaded_model_keeps_no_file_mapped(tmp_path):
    # Resident pages of the file would be a second copy of the weights.
    folder = tmp_path / "tied"
    make_reference("qwen3", tie_word_embeddings=True).save_pretrained(folder)
    model = load_model(folder)
    assert model.ops.name == "cpp"
    assert str(folder) not in Path("/proc/self/maps").read_text()


def test_sharded_folder(folder, tmp_path):
    reference = make_reference("llama")
    reference.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    seen = []
    sharded = load_model(tmp_path / "shards", progress=lambda done, total: seen.append((done, total)))
    torch.testing.assert_close(logits(sharded), logits(load_model(folder)))
    assert seen == [(i + 1, len(seen)) for i in range(len(seen))]
    # Tools that edit models leave indexes without some tensors, or with the names of other files.
    of = json.loads((tmp_path / "shards" / INDEX).read_text())["weight_map"]
    first, *_, last = sorted(of.values())
    edited = {name: last if file == first else file for name, file in of.items() if name != "lm_head.weight"}
    write_index(tmp_path / "shards", edited | {"removed": first, "norm": first})
    torch.testing.assert_close(logits(load_model(tmp_path / "shards")), logits(load_model(folder)))
    next((tmp_path / "shards").glob("*.safetensors")).unlink()
    with pytest.raises(ModelError, match="named in its index"):
        load_model(tmp_path / "shards")


def test_a_tied_model_has_the_output_of_its_files_as_in_transformers(tmp_path):
    reference = save_reference("llama-tied-mha", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    for output in (table.clone(), table.flip(0)):
        save_file(tensors | {"lm_head.weight": output}, tmp_path / "model.safetensors", {"format": "pt"})
        loaded = load_model(tmp_path)
        assert loaded.config.tie_embeddings == torch.equal(output, table)
        with torch.no_grad():
            expected = type(reference).from_pretrained(tmp_path)(input_ids=torch.tensor(IDS)).logits[0, -1]
        torch.testing.assert_close(logits(loaded)[-1], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "prefix"), [("opt", "model."), ("gpt-neox", "gpt_neox.")])
def test_names_without_prefix(tmp_path, name, prefix):
    save_reference(name, tmp_path)
    expected = logits(load_model(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k.removeprefix(prefix): v for k, v in tensors.items()}, tmp_path / "model.safetensors")
    torch.testing.assert_close(logits(load_model(tmp_path)), expected)


def test_names_with_another_prefix(folder):
    expected, tensors = logits(load_model(folder)), load_file(folder / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    torch.testing.assert_close(logits(load_model(folder)), expected)
    save_file({f"module.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor 'model.embed_tokens.weight', but 'module.model.embed_tokens.we"):
        load_model(folder)


@pytest.mark.parametrize("name", ["llama", "llama-tied-mha", "opt"])
@pytest.mark.parametrize("shards", [1, 2])
def test_convert(tmp_path, name, shards):
    reference = save_reference(name, tmp_path / "known")
    source, target = tmp_path / "old", tmp_path / "new"
    source.mkdir()
    shutil.copy(tmp_path / "known" / "config.json", source)
    (source / "vocab.txt").write_text("x")
    state = reference.state_dict()
    names = list(state)
    if shards == 1:
        torch.save(state, source / "pytorch_model.bin")
    else:
        files = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
        halves = names[: len(names) // 2], names[len(names) // 2 :]
        for file, half in zip(files, halves, strict=True):
            torch.save({n: state[n] for n in half}, source / file)
        where = {n: file for file, half in zip(files, halves, strict=True) for n in half}
        (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    before = sorted(source.iterdir())
    with pytest.raises(ModelError, match="skipjoin convert"):
        load_model(source)
    assert convert_folder(source, target) == target
    assert sorted(source.iterdir()) == before
    assert (target / "vocab.txt").read_text() == "x"
    assert not list(target.glob("*.bin*"))
    torch.testing.assert_close(logits(load_model(target)), logits(load_model(tmp_path / "known")))


class _Evil:
    def __reduce__(self):
        return print, ("run",)


def test_convert_rejects_unsafe_and_missing_inputs(tmp_path, capsys):
    source = tmp_path / "source"
    with pytest.raises(ModelError, match="is not a folder"):
        convert_folder(source, tmp_path / "target")
    source.mkdir()
    with pytest.raises(ModelError, match="to convert"):
        convert_folder(source, tmp_path / "target")
    torch.save({"a": _Evil()}, source / "pytorch_model.bin")
    with pytest.raises(ModelError, match="other than plain tensors"):
        convert_folder(source, tmp_path / "target")
    assert capsys.readouterr().out == ""
    torch.save([1], source / "pytorch_model.bin")
    with pytest.raises(ModelError, match="not a table"):
        convert_folder(source, tmp_path / "other")
    with pytest.raises(ModelError, match="not an empty folder"):
        convert_folder(source, source)


def test_steps_that_do_not_fit_are_rejected():
    raw = CONFIGS["llama"]().to_dict() | {"architectures": ["LlamaForCausalLM"]}
    model = random_model(raw)
    kv = PagedKV(50, 4, model.config, model.dtype, "cpu")
    for segment, size, message in (
        (Segment([1], 128, list(range(33))), 4, "context of 129 tokens, the model has 128"),
        (Segment([1], 0, [50]), 4, "the batch has block 50 of 4 tokens, the cache 50 of 4"),
        (Segment([1], 0, [1]), 8, "the batch has block 1 of 8 tokens, the cache 50 of 4"),
    ):
        with pytest.raises(ValueError, match=message):
            model.forward(PackedBatch.build([segment], size), kv)
    with pytest.raises(IndexError):
        model.forward(PackedBatch.build([Segment([101], 0, [1])], 4), kv)


def test_random_models_are_reproducible():
    raw = CONFIGS["qwen3"]().to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    first, again, other = (random_model(raw, seed) for seed in (1, 1, 2))
    assert torch.equal(logits(first), logits(again))
    assert not torch.equal(logits(first), logits(other))
    assert first.weight_bytes == again.weight_bytes > 0


def test_dummy_weights_need_no_files_and_are_reproducible(folder):
    saved = load_model(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelError, match=r"has no \.safetensors file"):
        load_model(folder)
    first, again = (load_model(folder, LoadSpec(load_format="dummy")) for _ in range(2))
    assert torch.equal(logits(first), logits(again))
    assert not torch.equal(logits(first), logits(saved))
    assert first.weight_bytes == saved.weight_bytes
    assert (first.config, first.dtype) == (saved.config, saved.dtype)
    with pytest.raises(ModelError, match="load_format must be one of auto, dummy; got 'random'"):
        load_model(folder, LoadSpec(load_format="random"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_dummy_weights_are_generated_on_the_device(folder):
    first, again = (
        load_model(folder, LoadSpec(load_format="dummy", device="cuda", dtype="bfloat16")) for _ in range(2)
    )
    batch = PackedBatch.build([Segment([5, 9, 33], 0, [1])], 4, first.device)
    outcome = [model.forward(batch, PagedKV(4, 4, model.config, model.dtype, "cuda")) for model in (first, again)]
    assert torch.equal(*outcome)
    assert outcome[0].isfinite().all()
    assert outcome[0].std() > 0.01


@pytest.mark.parametrize(
    ("weights", "in_index", "fetched"),
    [
        (("model.safetensors", "consolidated.safetensors", "onnx/model.safetensors"), (), ["model.safetensors"]),
        (("a-1.safetensors", "b.safetensors", "original/b.safetensors"), ("a-1.safetensors",), ["a-1.safetensors"]),
        (("parts/a.safetensors", "a.safetensors"), ("parts/a.safetensors",), ["parts/a.safetensors"]),
        (("a.safetensors", "b.safetensors", "original/a.safetensors"), (), ["a.safetensors", "b.safetensors"]),
        (("pytorch_model.bin", "model.gguf"), (), []),
    ],
)
def test_only_weights_that_are_read_are_downloaded(tmp_path, monkeypatch, weights, in_index, fetched):
    others = ["config.json", "1_Pooling/config.json", "tokenizer.model"]
    weights = [*weights, "2_Dense/model.safetensors"]

    def download(name, **patterns):
        for file in filter_repo_objects([*others, *weights, *([INDEX] if in_index else [])], **patterns):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(json.dumps({"weight_map": dict(enumerate(in_index))}))
        return str(tmp_path)

    def there(pattern):
        return sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob(pattern))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resolve_folder("some/model", weights=False)
    assert [*there("*.safetensors"), *there("*.bin")] == []
    assert resolve_folder("some/model") == tmp_path
    assert [*there("*.safetensors"), *there("*.bin")] == sorted(["2_Dense/model.safetensors", *fetched])
    assert {*others} <= {*there("*.*")}


def test_copies_of_weights_for_other_programs_are_not_read(folder):
    save_file({"layers.0.attention.wq.weight": torch.zeros(2, 2)}, folder / "consolidated.safetensors")
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    assert load_model(folder).weight_bytes > 0


def test_resolve_folder(tmp_path):
    assert resolve_folder(tmp_path) == tmp_path
    with pytest.raises(ModelError, match="is not a folder"):
        resolve_folder("./nothing/here")
