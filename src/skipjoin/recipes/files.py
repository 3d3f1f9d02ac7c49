from __future__ import annotations

import importlib.util
import sys
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from skipjoin.options import ConfigError

_SUFFIX = ".py"


class RecipeFile(NamedTuple):
    """Parts of a name such as `./my_policy.py:edf`."""

    path: Path
    recipe: str  # empty if the name has none


def parse(name: str) -> RecipeFile | None:
    if name.endswith(_SUFFIX):
        return RecipeFile(Path(name).absolute(), "")
    # The last colon, as a folder's name may contain one.
    file, _, recipe = name.rpartition(":")
    return RecipeFile(Path(file).absolute(), recipe.strip().replace("_", "-")) if file.endswith(_SUFFIX) else None


_RAN: dict[str, Path] = {}  # files that ran in this process, as tracebacks name them


def run(path: Path) -> str:
    """Run a file as a module, and return the module's name. Raise `ConfigError` with the line if it fails."""
    name = f"skipjoin_recipes_{path.stem}_{zlib.crc32(str(path).encode()):08x}"  # files may share their stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses resolve annotations there
    _RAN[str(path)] = path
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _located(error, path) from error
    return name


@contextmanager
def located_errors() -> Iterator[None]:
    """Convert an exception that passes through the code of a recipe file to a `ConfigError` that names the line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        path = next((_RAN[frame.filename] for frame in reversed(frames) if frame.filename in _RAN), None)
        if path is None:
            raise
        raise _located(error, path) from error


def _located(error: Exception, path: Path) -> ConfigError:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    place = f"{path}, line {lines[-1]}" if lines else str(path)
    why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return ConfigError(f"recipe: {place}: {why}")
