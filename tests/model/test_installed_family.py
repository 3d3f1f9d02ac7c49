from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import PagedRunner

from skipjoin.builtin import builtin_model_path
from skipjoin.llm import LLM
from skipjoin.model import family, plugins
from skipjoin.model.config import ModelConfig
from skipjoin.model.errors import ModelError
from skipjoin.model.family import FamilyError
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model
from skipjoin.sampling import SamplingParams
from support.installed_package import importable, install, project
from support.thread_ranks import on_ranks
from support.worlds import exhaustive

GUIDE = Path(__file__).parents[2] / "docs" / "add-a-model-family.md"
SHAPE = {
    "vocab_size": 553,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "eos_token_id": 551,
}
PROMPTS = [[7, 5, 300, 2, 11], [500, 3]]


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    family._register_own()
    monkeypatch.setattr(family, "_families", dict(family._families))
    monkeypatch.setattr(plugins, "_loaded", set())


@pytest.fixture(scope="module")
def guide_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    blocks = re.findall(r"```(?:toml|python)\n# (\S+)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["pyproject.toml", "skipjoin_stablelm.py"]
    return install(dict(blocks), tmp_path_factory.mktemp("guide"))


@pytest.fixture
def guide_package(guide_site: Path) -> Iterator[None]:
    with importable(guide_site):
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a StableLM with random parameters, saved with the built-in model's tokenizer."""
    torch.manual_seed(3)
    import transformers  # noqa: PLC0415 - takes a second

    config = transformers.StableLmConfig(**SHAPE, use_qkv_bias=True)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for label, parameter in model.named_parameters():
        spread = 0.12 if parameter.dim() > 1 else 0.3
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in label and "weight" in label else 0.0, std=spread)
    folder = tmp_path_factory.mktemp("stablelm")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(builtin_model_path() / name, folder)
    return folder, model


@pytest.mark.usefixtures("guide_package")
def test_guide_family_generates_the_tokens_of_transformers(reference) -> None:
    folder, model = reference
    assert ModelConfig.from_folder(folder).family == "stablelm"
    expected = [
        model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    with LLM(
        str(folder), profile="off", threads=1, kv_cache_gib=0.01, swap_space_gib=0, generation_config="none"
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        assert [output.token_ids for output in llm.generate(PROMPTS, params)] == expected


@pytest.mark.usefixtures("guide_package")
def test_guide_family_runs_on_several_ranks(reference) -> None:
    folder, model = reference
    sequences = [[7, 5, 300, 2, 11, 8, 8, 400], [500, 3]]

    def logits(**options) -> list[torch.Tensor]:
        return PagedRunner(load_model(folder, LoadSpec(dtype="float32"), **options), sequences, 4, seed=2).run()

    with torch.inference_mode():
        expected = [model(torch.tensor([sequence])).logits[0] for sequence in sequences]
    for ours, theirs in zip(logits(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(on_ranks(2, 2, lambda group: logits(group=group))[-1], expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_architecture_runs_through_transformers_without_the_package(reference) -> None:
    assert ModelConfig.from_folder(reference[0]).family == "transformers"


@pytest.fixture(scope="module")
def broken_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    modules = {"skipjoin_raises": "import a_module_that_is_not_installed\n", "skipjoin_other": "class Decoder: ...\n"}
    points = {"skipjoin.families": {"raises": "skipjoin_raises:Decoder"}}
    return install(project("skipjoin-broken", modules, points), tmp_path_factory.mktemp("broken"))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "raises = skipjoin_raises:Decoder",
            r"entry point raises = skipjoin_raises:Decoder in group skipjoin.families of skipjoin-broken 1.0 "
            r"cannot be loaded: ModuleNotFoundError: No module named 'a_module_that_is_not_installed'",
        ),
        exhaustive(
            "other = skipjoin_other:Decoder",
            r"entry point other = skipjoin_other:Decoder in group skipjoin.families of skipjoin-broken 1.0 must name a "
            r"decoder class with the decorator",
        ),
    ],
)
def test_broken_packages_are_reported_only_when_needed(broken_site: Path, reference, entry: str, message: str) -> None:
    (points,) = broken_site.glob("*.dist-info/entry_points.txt")
    points.write_text(f"[skipjoin.families]\n{entry}\n")
    with importable(broken_site):
        with pytest.raises(ModelError, match=message):
            ModelConfig.from_folder(reference[0])
        assert ModelConfig.from_folder(builtin_model_path()).family == "llama"


def test_duplicate_family_names_and_architectures_are_rejected() -> None:
    def register(name: str, architecture: str) -> None:
        class Other: ...

        family.family(name, architectures={architecture: "other"}, fields=lambda raw, _: {}, prefix="")(Other)

    with pytest.raises(FamilyError, match=r"family 'opt' of .*Other is registered by .*opt.OPTDecoder already"):
        register("opt", "OtherForCausalLM")
    with pytest.raises(FamilyError, match="LlamaForCausalLM of family 'other' belongs to family 'llama' already"):
        register("other", "LlamaForCausalLM")


def test_family_sizes_are_bounded_and_field_names_mapped() -> None:
    def fields(raw, architecture):
        known = ModelConfig.from_folder(builtin_model_path())
        names = ("num_kv_heads", "head_dim", "intermediate_size", "max_positions", "norm_eps", "activation", "rope")
        read = {"num_layers": 2, "hidden_size": raw["width"], "num_heads": 4, "tie_embeddings": True}
        return read | {name: getattr(known, name) for name in names}

    family.family("wide", architectures={"WideForCausalLM": "wide"}, fields=fields, prefix="", sizes={"width": 4096})(
        type("Wide", (), {})
    )
    config = ModelConfig.from_dict({"model_type": "wide", "width": 64, "vocab_size": 5})
    assert (config.family, config.hidden_size, config.embed_dim, config.num_heads) == ("wide", 64, 64, 4)
    with pytest.raises(ModelError, match=r"width in config.json must be an integer in \[1, 4096\], got 5000"):
        ModelConfig.from_dict({"model_type": "wide", "width": 5000, "vocab_size": 5})
