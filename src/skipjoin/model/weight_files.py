"""Weight files of a model folder. Files outside the folder are rejected."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from skipjoin.model.config import ModelError, read_json

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
