from __future__ import annotations

import functools
import json

import pytest
import torch
from model_zoo import CONFIGS, VOCAB, PagedRunner, greedy, make_reference, save_reference
from safetensors.torch import load_file, save_file

from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.config import ModelConfig
from skipjoin.model.errors import ModelError
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model
from support.worlds import checkered, exhaustive

LENGTHS = (1, 5, 18, 40)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    """Return a function that saves each reference once, although pytest sets `saved` up again for each test."""

    @functools.cache
    def saved_as(name: str):
        folder = tmp_path_factory.mktemp(name)
        return save_reference(name, folder), folder

    return saved_as


# Those that are made of the same parts as others, whose logits are compared all the same.
ALIKE = {"dots1", "solar-open", "exaone-moe", "glm4-moe-lite", "youtu", "deepseek-v2", "gemma4-experts", "minimax-m2"}


@pytest.fixture(scope="module", params=[exhaustive(name) if name in ALIKE else name for name in sorted(CONFIGS)])
def saved(request, saved_once):
    return saved_once(request.param)


def sequences(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


@torch.no_grad()
def expected_logits(reference, tokens: list[int]) -> torch.Tensor:
    return reference(torch.tensor([tokens], device=reference.device)).logits[0]


@pytest.mark.parametrize(
    ("saved", "attention", "block_size"),
    [
        pytest.param(name, attention, size, marks=() if (number + turn + place) % 3 == 0 else pytest.mark.exhaustive)
        for number, name in enumerate(sorted(CONFIGS))
        for turn, attention in enumerate(["torch", "auto"])
        for place, size in enumerate([1, 4, 16])
    ],
    indirect=["saved"],
)
def test_chunked_logits_equal_those_of_transformers(saved, block_size, attention):
    reference, folder = saved
    model = load_model(folder, LoadSpec(dtype="float32", attention=attention))
    tokens = sequences(block_size)
    logits = PagedRunner(model, tokens, block_size, seed=block_size).run()
    for ids, ours in zip(tokens, logits, strict=True):
        torch.testing.assert_close(ours, expected_logits(reference, ids), atol=1e-4, rtol=0)


def test_moved_blocks_change_no_logits(saved):
    _, folder = saved
    model = load_model(folder, LoadSpec(dtype="float32"))
    still = PagedRunner(model, sequences(7), 4, seed=3).run()
    moving = PagedRunner(model, sequences(7), 4, seed=4)
    for ours, expected in zip(moving.run(between=moving.move_a_block), still, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_greedy_tokens_equal_those_of_transformers(saved):
    reference, folder = saved
    model = load_model(folder, LoadSpec(dtype="float32"))
    prompts = sequences(11)
    ours = greedy(model, prompts, 12)
    for prompt, tokens in zip(prompts, ours, strict=True):
        # Each token must be the best one after those before it.
        assert tokens == expected_logits(reference, prompt + tokens)[len(prompt) - 1 : -1].argmax(1).tolist()


def test_logits_are_computed_for_wanted_rows_only(saved):
    _, folder = saved
    model = load_model(folder, LoadSpec(dtype="float32"))
    ids = sequences(5)[2]
    kv = PagedKV(40, 4, model.config, model.dtype, "cpu")
    tables = [list(range(i * 8, i * 8 + 8)) for i in range(4)]
    every = model.forward(PackedBatch.build([Segment(ids, 0, tables[0], False, True)], 4), kv)
    mixed = [
        Segment(ids, 0, tables[1], True, False),
        Segment(ids[:6], 0, tables[2], False, False),
        Segment(ids[:3], 0, tables[3], False, True),
    ]
    batch = PackedBatch.build(mixed, 4)
    some = model.forward(batch, kv)
    assert batch.row_starts == [0, 1, 1, 4]
    assert some.dtype == torch.float32
    torch.testing.assert_close(some, torch.cat([every[-1:], every[:3]]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("saved", "dtype"), checkered(sorted(CONFIGS), ["bfloat16", "float16"]), indirect=["saved"])
def test_half_types_stay_close(saved, dtype):
    reference, folder = saved
    model = load_model(folder, LoadSpec(dtype=dtype))
    ids = sequences(2)[3]
    (ours,) = PagedRunner(model, [ids], 4, seed=1).run()
    expected = expected_logits(reference, ids)
    errors = (ours - expected).norm(dim=1) / expected.norm(dim=1)
    # Of logits that are nearly equal, rounding may choose another expert.
    assert (errors.mean() if model.config.experts is None else errors.median()) < (
        0.05 if dtype == "bfloat16" else 0.01
    )


def test_queries_grow_with_rotary_positions_of_any_kind(tmp_path):
    kind = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    kind |= {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}
    reference = make_reference("ministral3", rope_parameters=kind)
    reference.save_pretrained(tmp_path)
    ids = sequences(3)[3]
    (ours,) = PagedRunner(load_model(tmp_path, LoadSpec(dtype="float32")), [ids], 4, seed=1).run()
    torch.testing.assert_close(ours, expected_logits(reference, ids), atol=1e-4, rtol=0)


SEEING = {"Gemma3": "gemma3", "Gemma4": "gemma4", "Mistral3": "ministral3", "Qwen2_5_VL": "qwen2", "Qwen3VL": "qwen3"}


def check_saved(kind, config, folder, change=lambda folder: None) -> None:
    """Compare the language model of a model that sees, in a folder that is changed, with transformers'."""
    torch.manual_seed(0)
    reference = kind(config).eval()
    for parameter in reference.parameters():
        if parameter.dim() > 1:  # so that positions matter
            torch.nn.init.normal_(parameter, std=0.12)
    reference.save_pretrained(folder)
    change(folder)
    ids = sequences(11)[3]
    (ours,) = PagedRunner(load_model(folder, LoadSpec(dtype="float32")), [ids], 4, seed=1).run()
    torch.testing.assert_close(ours, expected_logits(reference, ids), atol=3e-4, rtol=0)


@pytest.mark.parametrize("name", SEEING)
def test_language_models_of_models_with_images(name, tmp_path):
    import transformers  # noqa: PLC0415 - takes seconds

    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text, more = CONFIGS[SEEING[name]]().to_dict(), {"image_size": 28, "patch_size": 14, "head_dim": 16}
    if name.startswith("Qwen"):
        more = {"num_heads": 2, "depth": 1, "out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": [0]}
        sections = {"mrope_section": [4, 2, 2] if name == "Qwen2_5_VL" else [8, 4, 4], "mrope_interleaved": True}
        text = {**text, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **sections}}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config={**vision, **more})
    check_saved(getattr(transformers, f"{name}ForConditionalGeneration"), config, tmp_path)


_SHAPE = {
    **{"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
}
# Their heads are rotated as a whole, and have no length in config.json.
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_LATENT = {
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 4},
}
OTHERS = {
    "Glm4v": {"model_type": "glm4v_text", **_SHAPE, **_SECTIONS},
    "GlmOcr": {"model_type": "glm_ocr_text", **_SHAPE, **_SECTIONS},
    "Mistral3": {"model_type": "mistral4", **_SHAPE, **_LATENT},
    "Qwen2_5OmniThinker": {"model_type": "qwen2_5_omni_text", **_SHAPE, **_SECTIONS},
}
_AUDIO = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": 64}
HEARING = {"Qwen2_5OmniThinker": {"audio_config": _AUDIO}}
# Those of which transformers has a class of the whole only, also with experts whose code calls no interface.
WHOLES = {
    "PaddleOCRVL": {"model_type": "paddleocr_vl_text", **_SHAPE, **_SECTIONS, "head_dim": 16},
    "Step3p7": {
        **{"model_type": "step3p5", **_SHAPE, "head_dim": 16, "num_hidden_layers": 3, "sliding_window": 9},
        **{"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        **{"mlp_layer_types": ["dense", "sparse", "sparse"], "moe_intermediate_size": 32, "num_local_experts": 4},
        **{"num_experts_per_tok": 2, "share_expert_dim": 32, "swiglu_limits": None, "swiglu_limits_shared": None},
    },
}


def without_other_parts(folder):
    """Leave out the tensors that no text uses, and make a model that thinks the part of one that also speaks."""
    file, settings = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    thinks = settings["model_type"].endswith("_thinker")
    tensors = {f"thinker.{name}" if thinks else name: tensor for name, tensor in load_file(file).items()}
    others = ("thinker.audio", "thinker.visual", "visual.", "vision_model.", "vit_large", "mlp_AR.")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(others)}
    assert len(kept) < len(tensors)
    save_file(kept, file, {"format": "pt"})
    outer = {"architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "thinker_config": settings}
    (folder / "config.json").write_text(json.dumps(outer if thinks else settings))


@pytest.mark.parametrize("name", [*OTHERS, *WHOLES])
def test_language_models_of_types_of_their_own(name, tmp_path):
    import transformers  # noqa: PLC0415 - takes seconds

    is_cut = name in WHOLES or name.endswith("Thinker")
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1, "num_heads": 2}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14, "head_dim": 16, "out_hidden_size": 64}
    config = getattr(transformers, f"{name}Config")(
        text_config=(OTHERS | WHOLES)[name], vision_config=vision, **HEARING.get(name, {})
    )
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    check_saved(kind, config, tmp_path, *([without_other_parts] if is_cut else []))


# Models without a class of their own for their language model, and a type of their part that sees.
PARTS = {"Llava": ("llama", "clip_vision_model"), "SmolVLM": ("llama", ""), "InternVL": ("qwen2", "internvl_vision")}


@pytest.mark.parametrize("name", PARTS)
def test_language_models_that_are_a_part_of_any_other(name, tmp_path):
    import transformers  # noqa: PLC0415 - takes seconds

    text, kind = PARTS[name]
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, **({"model_type": kind} if kind else {})}
    vision |= {"image_size": [28, 28], "patch_size": [14, 14]} if name == "InternVL" else {}
    config = getattr(transformers, f"{name}Config")(text_config=CONFIGS[text]().to_dict(), vision_config=vision)
    check_saved(getattr(transformers, f"{name}ForConditionalGeneration"), config, tmp_path)


def test_language_models_whose_sizes_are_the_defaults_of_their_type():
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    config = ModelConfig.from_dict({"architectures": ["LlavaForConditionalGeneration"], "text_config": text})
    assert (config.hidden_size, config.vocab_size, config.family) == (4096, 32064, "llama")
    with pytest.raises(ModelError, match="architecture OwnForConditionalGeneration is not supported"):
        ModelConfig.from_dict({"architectures": ["OwnForConditionalGeneration"], "text_config": {"model_type": "t5"}})


def test_language_models_run_alone_where_the_whole_cannot():
    text = {"model_type": "nemotron_h", "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_num_heads": 8, "mamba_head_dim": 16}
    text |= {"ssm_state_size": 16, "n_groups": 2, "layers_block_type": ["mamba", "attention"]}
    config = ModelConfig.from_dict({"architectures": ["NemotronH_Omni_Reasoning_V3"], "text_config": text})
    assert (config.architecture, config.num_layers) == ("NemotronHForCausalLM", 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_families_compute_the_same_logits_on_cuda(saved):
    reference, folder = saved
    model = load_model(folder, LoadSpec(dtype="float32", device="cuda"))
    tokens = sequences(3)
    logits = PagedRunner(model, tokens, 4, seed=2).run()
    for ids, ours in zip(tokens, logits, strict=True):
        # CUDA may multiply float32 matrices in another order and with fused operations.
        torch.testing.assert_close(ours.cpu(), expected_logits(reference, ids), atol=1e-3, rtol=0)
