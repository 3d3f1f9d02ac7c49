"""Weight files of a model folder. Files outside the folder are rejected."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from skipjoin.model.config import ModelError, read_json

INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_GGUF_REMEDY = (
    "which this version cannot read: give the folder or hub id of the model that it was made from, with config.json, a "
    "tokenizer and safetensors; --quantization int8 stores weights in 8 bits"
)
# Maximum length of a file name in most file systems, which raise an error beyond it.
_MAX_NAME = 255


def read_weight_map(index: Path) -> dict[str, str]:
    weight_map: Any = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"weight_map in {index} must give the name of a file for each tensor")
    names = sorted(set(weight_map.values()))
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name or len(name) > _MAX_NAME:
            raise ModelError(f"weight_map in {index} must name files inside its folder, got {name!r}")
    folder = index.parent
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(f"{folder} lacks {', '.join(missing)}, named in its index")
    for name in names:
        check_inside(folder, name)
    return weight_map


def check_inside(folder: Path, name: str) -> None:
    """Raise `ModelError` if a file of the folder links to one outside it, except to the hub's cache of blobs."""
    target = (folder / name).resolve()
    blobs = target.parent
    is_blob = blobs.name == "blobs" and blobs.parent.name.startswith("models--")
    if not is_blob and not target.is_relative_to(folder.resolve()):
        raise ModelError(
            f"{folder / name} must not be a link to a file outside its folder, which is {target}: copy that file, or "
            "make a hard link"
        )


def safetensors_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder without an index."""
    files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    for file in files:
        check_inside(folder, file.name)
    return files


def check_weight_files(folder: Path) -> None:
    """Raise `ModelError` if a folder has no weights that can be loaded."""
    if (folder / INDEX).is_file():
        read_weight_map(folder / INDEX)
    elif not safetensors_files(folder):
        explain_no_weights(folder)


def bin_files(source: Path) -> list[Path]:
    """Return the files of a folder that `skipjoin convert` reads."""
    if (why := explain_file(source)) is not None:
        raise ModelError(why)
    if not source.is_dir():
        raise ModelError(f"{source} is not a folder")
    index = source / BIN_INDEX
    if index.is_file():
        return [source / name for name in sorted(set(read_weight_map(index).values()))]
    files = sorted(source.glob("pytorch_model*.bin"))
    if files:
        return files
    if any(source.glob("*.safetensors")):
        raise ModelError(f"{source} has safetensors, which need no conversion, and no pytorch_model*.bin")
    _explain_others(source)
    raise ModelError(f"{source} has no pytorch_model*.bin to convert")


def explain_file(path: Path) -> str | None:
    """Return why a path is not that of a model folder, if it is one of a file or of a GGUF model."""
    if path.suffix.lower() == ".gguf":
        return f"{path} is a GGUF file, {_GGUF_REMEDY}"
    if path.is_file():
        return f"{path} is a file: give its folder, which has config.json, a tokenizer and safetensors"
    return None


def explain_no_config(folder: Path) -> NoReturn:
    """Raise the error of a folder without config.json."""
    if not any(folder.iterdir()):
        raise ModelError(f"{folder} is empty: a model folder has config.json, a tokenizer and safetensors")
    _explain_others(folder)
    if below := sorted(one.parent for one in folder.glob("*/config.json")):
        some = ", ".join(map(str, below[:3])) + (", ..." if len(below) > 3 else "")
        raise ModelError(f"{folder} has no config.json, but its subfolders do: give one of {some}")
    raise ModelError(f"{folder} has no config.json: it is not a model folder in Hugging Face format")


def explain_no_weights(folder: Path) -> NoReturn:
    """Raise the error of a folder with config.json but without safetensors."""
    if any(folder.glob("pytorch_model*.bin")):
        raise ModelError(
            f"{folder} has its weights only as .bin files, which can run code when loaded; "
            f"make a copy in safetensors once with: skipjoin convert {folder} TARGET"
        )
    _explain_others(folder)
    raise ModelError(f"{folder} has no .safetensors file")


def _explain_others(folder: Path) -> None:
    """Raise the error of a folder that has something else than a model of safetensors, if it has."""
    if (folder / "adapter_config.json").is_file():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        of = f" of {base}" if isinstance(base, str) and base else ""
        raise ModelError(
            f"{folder} is a LoRA adapter{of}, not a model: merge it into the model with peft's merge_and_unload, save "
            "that with save_pretrained, and give the new folder"
        )
    if gguf := sorted(folder.glob("*.gguf")):
        raise ModelError(f"{folder} has its weights as a GGUF file, {gguf[0].name}, {_GGUF_REMEDY}")
    if pickled := sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern)):
        raise ModelError(
            f"{folder} has its weights only as {pickled[0]}, a format that can run code when loaded and is never "
            "read: give a folder with config.json, a tokenizer and safetensors"
        )
