"""Which version this is."""

from __future__ import annotations

import importlib.metadata


def _installed() -> str:
    try:
        return importlib.metadata.version("skipjoin")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"  # run from a source tree, where nothing says so


VERSION = _installed()
