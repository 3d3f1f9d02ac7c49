"""Recipes in users' files, such as `./my_policy.py:edf`."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import NamedTuple, TypeVar

from skipjoin.options import ConfigError, unknown

_SUFFIX = ".py"
_T = TypeVar("_T")


class RecipeFile(NamedTuple):
    """Parts of a name such as `./my_policy.py:edf`; `recipe` is empty if the name has none."""

    path: Path
    recipe: str

    @property
    def short(self) -> str:
        """Name without the folder, for records and metrics."""
        return f"{self.path.name}:{self.recipe}"


def parse(name: str) -> RecipeFile | None:
    """Return the file and recipe that a name refers to, or None if it is not in a file."""
    if name.endswith(_SUFFIX):
        return RecipeFile(Path(name).absolute(), "")
    # The last colon, as a folder's name may contain one.
    file, _, recipe = name.rpartition(":")
    return RecipeFile(Path(file).absolute(), recipe.strip().replace("_", "-")) if file.endswith(_SUFFIX) else None


def absolute(name: str) -> str:
    """Return the name with an absolute path, for processes with another working folder."""
    file = parse(name)
    return name if file is None else f"{file.path}:{file.recipe}"


def load(file: RecipeFile, registry: dict[str, _T]) -> _T:
    """Load a recipe from a file.

    Args:
        registry: Registry of the `@recipe` decorator, which is restored afterwards.

    Raises:
        ConfigError: The file fails to run (the error names the line) or lacks the recipe.
    """
    known = dict(registry)
    try:
        _run(file.path)
        found = {name: recipe for name, recipe in registry.items() if known.get(name) is not recipe}
    finally:
        registry.clear()
        registry.update(known)
    if not found:
        raise ConfigError(f"recipe: {file.path} has no function with the decorator @recipe of skipjoin.recipes")
    if not file.recipe:
        raise ConfigError(f"recipe must be FILE:NAME for a file: {file.path} has {', '.join(found)}")
    if file.recipe not in found:
        raise unknown(f"recipe: {file.path}", file.recipe, found)
    return found[file.recipe]


def _run(path: Path) -> None:
    name = f"skipjoin_recipes_{path.stem}"
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


def _place(error: Exception, path: Path) -> str:
    """Return the file with the line that raised the error. A syntax error's text has its own line."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}, line {lines[-1]}" if lines else str(path)
