"""Decoders without a native family, which run transformers' modeling code over the paged KV cache."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import PagedRunner, greedy

from skipjoin.config import ConfigError, EngineConfig
from skipjoin.engine.load import check_load
from skipjoin.model import family
from skipjoin.model.config import ModelConfig
from skipjoin.model.errors import ModelError
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model, planned_model, random_model
from skipjoin.model.ops.build import load_library
from skipjoin.model.parallel import Shard
from skipjoin.model.weight_files import ModelFiles
from support.fallback_models import FALLBACKS, FURTHER
from support.worlds import checkered, exhaustive

SEQUENCES = [
    [int(token) for token in torch.randint(96, (n,), generator=torch.Generator().manual_seed(n))] for n in (1, 18, 40)
]


@pytest.fixture(scope="module", params=FALLBACKS)
def saved(request, tmp_path_factory) -> tuple[Any, Path]:
    """Return a model of transformers with random parameters, and its folder."""
    import transformers  # noqa: PLC0415 - takes seconds

    raw, folder = (FALLBACKS | FURTHER)[request.param], tmp_path_factory.mktemp(request.param)
    kind = getattr(transformers, raw["architectures"][0])
    torch.manual_seed(1)
    model = kind._from_config(kind.config_class.from_dict(raw), attn_implementation="eager").eval()
    for label, parameter in model.named_parameters():
        spread = 0.12 if parameter.dim() > 1 else 0.3
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in label and "weight" in label else 0.0, std=spread)
    model.save_pretrained(folder)
    return model, folder


OLDER = {
    "GPTJForCausalLM": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8},
    "CodeGenForCausalLM": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8},
    "GPTNeoForCausalLM": {
        **{"hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64, "window_size": 9},
        "attention_types": [[["global", "local"], 1]],
    },
    "MptForCausalLM": {"d_model": 96, "n_layers": 2, "n_heads": 6, "max_seq_len": 64},
    "GPTNeoXJapaneseForCausalLM": {
        **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64},
        "intermediate_multiple_size": 2,
    },
    "Llama4ForCausalLM": {
        **{"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 96, "max_position_embeddings": 64},
        **{"num_local_experts": 4, "moe_layers": [0, 2], "no_rope_layers": [1, 0, 1], "attention_chunk_size": 8},
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        **{"floor_scale": 4, "pad_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "FalconForCausalLM": {
        **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2},
        "new_decoder_architecture": True,
    },
}


@pytest.mark.parametrize("name", [*OLDER, "falcon_rw", "doge", "dbrx", "recurrent_gemma", "rwkv", exhaustive("jetmoe")])
def test_older_code_attends_to_paged_kv(name: str, tmp_path: Path) -> None:
    import transformers  # noqa: PLC0415 - takes seconds

    raw = {"architectures": [name], **OLDER[name]} if name in OLDER else FURTHER[name]
    kind = getattr(transformers, raw["architectures"][0])
    torch.manual_seed(1)
    # Falcon's eager attention adds linear biases twice.
    attention = "sdpa" if "alibi" in raw else "eager"
    config = kind.config_class.from_dict(raw | {"vocab_size": 96})
    theta = raw.get("attn_config", {}).get("rope_theta")
    if theta is not None:  # which transformers does not read
        config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    model = kind._from_config(config, attn_implementation=attention).eval()
    model.save_pretrained(tmp_path)
    if theta is not None:
        saved = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(saved | {"rope_parameters": None}))
    ours = load_model(tmp_path, LoadSpec(dtype="float32"))
    if "keep_window_size" in raw:  # keys are left out of longer texts
        assert ours.config.max_positions == raw["keep_window_size"]
    for ids, found in zip(SEQUENCES, PagedRunner(ours, SEQUENCES, 4, seed=2).run(), strict=True):
        torch.testing.assert_close(found, expected_logits(model, ids), atol=2e-4, rtol=0)


@torch.inference_mode()
def expected_logits(reference: Any, tokens: list[int]) -> torch.Tensor:
    return reference(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize(("saved", "attention"), checkered([*FALLBACKS], ["torch", "auto"]), indirect=["saved"])
def test_chunked_logits_and_tokens_equal_those_of_transformers(saved, attention: str) -> None:
    reference, folder = saved
    model = load_model(folder, LoadSpec(dtype="float32", attention=attention))
    for ids, ours in zip(SEQUENCES, PagedRunner(model, SEQUENCES, 4, seed=2).run(), strict=True):
        torch.testing.assert_close(ours, expected_logits(reference, ids), atol=2e-4, rtol=0)
    generated = reference.generate(torch.tensor([SEQUENCES[1]]), do_sample=False, max_new_tokens=8)
    assert greedy(model, [SEQUENCES[1]], 8) == [generated[0, 18:].tolist()]


@pytest.mark.skipif(load_library() is None, reason="no compiler")
@pytest.mark.parametrize(
    ("options", "saved"),
    checkered([{}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"}], [*FALLBACKS]),
    indirect=["saved"],
)
def test_bits_do_not_depend_on_chunks_and_neighbors(saved, options: dict[str, str]) -> None:
    reference, folder = saved
    if "kv_cache_dtype" in options and ModelConfig.from_folder(folder).has_position_keys:
        with pytest.raises(ModelError, match=r"rounds keys, and those of BloomForCausalLM have positions"):
            load_model(folder, LoadSpec(**options))
        return
    model = load_model(folder, LoadSpec(dtype="float32", **options))
    some, others = (PagedRunner(model, SEQUENCES, 4, seed=seed).run() for seed in (5, 6))
    assert all(map(torch.equal, some, others))
    if "kv_cache_dtype" in options:
        expected = expected_logits(reference, SEQUENCES[-1])
        assert 0 < ((some[-1] - expected).norm(dim=-1) / expected.norm(dim=-1)).median() < 0.03


@pytest.mark.parametrize("saved", [*FALLBACKS, "ernie_moe"], indirect=True)
def test_bfloat16_stays_close(saved) -> None:
    reference, folder = saved
    (ours,) = PagedRunner(load_model(folder, LoadSpec(dtype="bfloat16")), SEQUENCES[-1:], 4, seed=1).run()
    expected = expected_logits(reference, SEQUENCES[-1])
    distances = (ours - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert distances.median() < 0.05  # rounding may exchange experts of a token


@pytest.mark.parametrize("saved", [*FALLBACKS, "diffllama"], indirect=True)
def test_plan_has_the_bytes_of_the_loaded_model(saved) -> None:
    _, folder = saved
    spec = LoadSpec(dtype="bfloat16", attention="torch")
    planned = planned_model(ModelFiles.of(folder), ModelConfig.from_folder(folder), spec)
    loaded = load_model(folder, spec)
    assert planned.weight_bytes == pytest.approx(loaded.weight_bytes, rel=1e-3)  # a few may be kept in float32
    assert planned.parameters == loaded.parameters


def test_log_says_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    random_model(FALLBACKS["gpt2"])
    (record,) = (entry for entry in caplog.records if "GPT2LMHeadModel" in entry.message)
    assert record.levelno == logging.WARNING
    assert "has no family of Skipjoin's own: transformers' modeling code runs it, which is slower." in record.message
    assert "depend on the batch" not in record.message


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"architectures": ["xLSTMForCausalLM"]}, r"its layers keep a state that is no KV"),
        ({"architectures": ["MiniCPMForCausalLM"]}, r"[\d.]+, which have MiniCPM3ForCausalLM \(docs"),
        ({"architectures": ["GemmaForCausalLM"], "use_bidirectional_attention": True}, "could neither be cut into"),
        ({"architectures": ["AprielForCausalLM"]}, r"transformers [\d.]+ \(docs"),
        ({"architectures": ["XGLMForCausalLM"]}, r"cannot run through transformers .*: its attention cannot be rep"),
        ({"architectures": ["FalconForCausalLM"], "alibi": True}, "differ between heads that share keys"),
        ({"architectures": ["DogeForCausalLM"], "is_moe": True}, "by scores of other tokens"),
        ({"architectures": ["BertLMHeadModel"]}, "its tokens attend to others than all earlier ones"),
        ({"architectures": ["BartForCausalLM"]}, "it needs an encoder"),
        ({"architectures": ["BltForCausalLM"]}, "its layers work on patches of bytes"),
        ({"architectures": ["Gemma4AssistantForCausalLM"], "text_config": {}}, "drafts for another model, whose KV"),
        ({"architectures": ["CohereCompassForCausalLM"]}, "its code finds no 'full_attention' in config.json"),
        (
            FALLBACKS["gpt2"] | {"quantization_config": {"quant_method": "awq"}},
            "quantized weights are not supported for GPT2LMHeadModel, which has no family of Skipjoin's own",
        ),
        (
            FALLBACKS["gpt2"] | {"n_layer": 1 << 40},
            r"n_layer in config.json must be an integer in \[1, 16384\], got 1099511627776",
        ),
        (
            FALLBACKS["mimo"] | {"n_shared": 1 << 40},
            "n_shared in config.json must be at most 1048576, got 1099511627776",
        ),
        (FALLBACKS["gpt2"] | {"n_head": 3}, "GPT2LMHeadModel has no family of Skipjoin's own, and cannot run"),
        (
            {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "own.Own"}},
            r"OwnForCausalLM is not supported.* decoders in transformers .* Code in a model's folder .* is never run",
        ),
    ],
)
def test_refusals_say_why(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict(raw)


def test_several_ranks_are_refused() -> None:
    config = ModelConfig.from_dict(FALLBACKS["gpt2"])
    files = ModelFiles(Path(), {}, has_weights=False)
    with pytest.raises(ModelError, match="GPT2LMHeadModel runs through transformers on one rank only, got 2: set ten"):
        planned_model(files, config, LoadSpec(load_format="dummy"), Shard.of_rank(0, 2, 1))


def test_other_logits_than_those_of_transformers_are_refused(saved, monkeypatch: pytest.MonkeyPatch) -> None:
    from skipjoin.model.fallback import decoder  # noqa: PLC0415 - imports transformers, which takes seconds

    attend = decoder.TransformersDecoder.attend
    monkeypatch.setattr(
        decoder.TransformersDecoder,
        "attend",
        lambda self, *arguments, scale, **options: attend(self, *arguments, scale=1.5 * scale, **options),
    )
    with pytest.raises(ModelError, match=r"through transformers its logits differ by .* of their spread"):
        load_model(saved[1])


def test_missing_tensors_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415 - as above

    (tmp_path / "config.json").write_text(json.dumps(FALLBACKS["gpt2"]))
    save_file({"transformer.wte.weight": torch.zeros(96, 64)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"has no tensor 'transformer\.h\.0\.attn\.c_attn\.bias'"):
        load_model(tmp_path)


RECORD = json.loads(Path(__file__).with_name("architectures.json").read_text(encoding="utf-8"))["architectures"]


def test_record_of_architectures_has_the_native_ones() -> None:
    """`architectures.py` has the command that writes it."""
    family._register_own()
    native = {name for builder in family._families.values() for name in builder.architectures}
    assert {name for name, (outcome, _) in RECORD.items() if outcome == "native"} == native & RECORD.keys()
    assert not [name for name, (outcome, _) in RECORD.items() if outcome == "not tried"]


SAMPLED = ("StableLmForCausalLM", "GotOcr2ForConditionalGeneration")


@pytest.mark.parametrize("name", [name if name in SAMPLED else exhaustive(name) for name in RECORD])
def test_architectures_run_as_recorded_with_bits_that_do_not_depend_on_the_batch(name: str, tmp_path: Path) -> None:
    from architectures import outcome  # noqa: PLC0415 - imports transformers, which takes seconds

    assert [*outcome(name, tmp_path)] == RECORD[name]


def test_language_models_without_fields_have_the_defaults_of_transformers() -> None:
    raw = {"architectures": ["ForeignForConditionalGeneration"], "text_config": {"model_type": "gpt2"}}
    config = ModelConfig.from_dict(raw)
    assert (config.architecture, config.num_layers, config.hidden_size) == ("GPT2LMHeadModel", 12, 768)


COMPOSITES = json.loads(Path(__file__).with_name("composites.json").read_text(encoding="utf-8"))["composites"]
SAMPLED_COMPOSITES = ("LlavaForConditionalGeneration", "GraniteDoclingForConditionalGeneration")


@pytest.mark.parametrize("name", [name if name in SAMPLED_COMPOSITES else exhaustive(name) for name in COMPOSITES])
def test_models_that_see_or_hear_serve_texts_as_recorded(name: str, tmp_path: Path) -> None:
    """`composites.py` has the command that writes the record."""
    from composites import outcome  # noqa: PLC0415 - as above

    assert [*outcome(name, tmp_path)] == COMPOSITES[name]


def test_chunks_of_attention_need_blocks_that_divide_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FALLBACKS["llama4"]))
    settings = {"model": str(tmp_path), "load_format": "dummy", "block_size": 12, "kv_cache_gib": 0.01}
    with pytest.raises(ConfigError, match="chunks of 16 tokens, so that block_size must divide 16; got 12"):
        check_load(EngineConfig(max_model_len=64, **settings))
    assert check_load(EngineConfig(max_model_len=16, **settings))[1] == 16  # a single chunk
