"""Loads numpy with single-threaded linear algebra, unless the environment sets a number of threads.

OpenBLAS would spread a forecast's small products over threads, which wait for each other and for the engine's cores.
"""

from __future__ import annotations

import importlib
import os

_THREADS = "OPENBLAS_NUM_THREADS"


def _load_numpy() -> None:
    is_given = _THREADS in os.environ
    os.environ.setdefault(_THREADS, "1")
    try:
        importlib.import_module("numpy")
    finally:
        if not is_given:
            del os.environ[_THREADS]


_load_numpy()
