"""Version, and how missing extras are installed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path


def _installed() -> str:
    try:
        return importlib.metadata.version("skipjoin")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"  # run from a source tree, where nothing says so


VERSION = _installed()


def install_command(extra: str, source: Path = Path(__file__).parents[2]) -> str:
    if not (source / "pyproject.toml").is_file():
        return f"pip install 'skipjoin[{extra}]'"
    return f"pip install -c '{source}/constraints.txt' -e '{source}[{extra}]'"
