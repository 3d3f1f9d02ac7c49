"""Loads numpy with single-threaded linear algebra.

A forecast's products are small. OpenBLAS would spread them over one thread per core, which wait for each other and for
cores that the engine uses: this raises the cost from 2.2 to 3.0 ms per request before its first token, and from 1.8 to
12 ms on shared cores. A number of threads in the environment takes precedence.
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
