"""Loads numpy so that its linear algebra runs in one thread.

A forecast's products are small. OpenBLAS would spread them over a thread per core, which wait for each other and for
the cores that the engine beside has: forecasts then cost a request 3.0 ms until its first token in place of 2.2, and 12
in place of 1.8 on cores that other work shares. A number of threads in the environment wins.
"""

from __future__ import annotations

import importlib
import os

_THREADS = "OPENBLAS_NUM_THREADS"


def _load_numpy() -> None:
    """Import numpy. OpenBLAS reads the environment meanwhile; child processes, torch's among them, do not get it."""
    is_given = _THREADS in os.environ
    os.environ.setdefault(_THREADS, "1")
    try:
        importlib.import_module("numpy")
    finally:
        if not is_given:
            del os.environ[_THREADS]


_load_numpy()
