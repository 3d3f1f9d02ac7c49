"""Triton kernels, one file per operation. Imported only if Triton is installed."""

import functools
import logging
import os
from pathlib import Path

from skipjoin.system.folders import is_trusted
from skipjoin.system.own_folder import OwnFolder

_log = logging.getLogger(__name__)


def protect_triton_cache() -> None:
    """Move Triton's cache of compiled libraries to a folder of this process if another user can change it."""
    if not is_trusted(_triton_cache(), "Triton's cache"):
        folder = _own_folder().path
        os.environ["TRITON_CACHE_DIR"] = str(folder)
        _log.warning("Triton's kernels are compiled for this process alone, in %s", folder)


def _triton_cache() -> Path:
    if folder := os.environ.get("TRITON_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton", "cache")


@functools.cache
def _own_folder() -> OwnFolder:
    return OwnFolder("skipjoin-triton-")


# Multiplications and additions are fused; Triton 3.9 warns if this is not set.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
protect_triton_cache()  # before a kernel is compiled or loaded
