"""Recipes in users' files, such as `./my_policy.py:edf`."""

from __future__ import annotations

import importlib.util
import sys
import traceback
import zlib
from pathlib import Path
from typing import NamedTuple

from skipjoin.options import ConfigError

_SUFFIX = ".py"


class RecipeFile(NamedTuple):
    """Parts of a name such as `./my_policy.py:edf`; `recipe` is empty if the name has none."""

    path: Path
    recipe: str

    @property
    def short(self) -> str:
        return f"{self.path.name}:{self.recipe}"


def parse(name: str) -> RecipeFile | None:
    if name.endswith(_SUFFIX):
        return RecipeFile(Path(name).absolute(), "")
    # The last colon, as a folder's name may contain one.
    file, _, recipe = name.rpartition(":")
    return RecipeFile(Path(file).absolute(), recipe.strip().replace("_", "-")) if file.endswith(_SUFFIX) else None


def run(path: Path) -> str:
    """Run a file as a module, and return the module's name. Raise `ConfigError` with the line if it fails."""
    name = f"skipjoin_recipes_{path.stem}_{zlib.crc32(str(path).encode()):08x}"  # files may share their stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses resolve annotations there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"recipe: {_place(error, path)}: {why}") from error
    return name


def _place(error: Exception, path: Path) -> str:
    """Return the file with the line that raised the error. A syntax error's text has its own line."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}, line {lines[-1]}" if lines else str(path)
