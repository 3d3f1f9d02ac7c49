"""Loads numpy with single-threaded linear algebra, unless the environment sets a number of threads.

A forecast's products are small. OpenBLAS would spread them over one thread per core, which wait for each other and for
cores that the engine uses: this raises the cost from 2.2 to 3.0 ms per request, and to 12 ms on shared cores.
"""

from __future__ import annotations

import importlib
import os

_THREADS = "OPENBLAS_NUM_THREADS"


def _load_numpy() -> None:
    """Import numpy with the variable set only meanwhile, so that child processes do not inherit it."""
    is_given = _THREADS in os.environ
    os.environ.setdefault(_THREADS, "1")
    try:
        importlib.import_module("numpy")
    finally:
        if not is_given:
            del os.environ[_THREADS]


_load_numpy()
