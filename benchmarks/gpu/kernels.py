"""The parts `attention` and `copies`: kernels alone, as measured by the modules in this folder."""

from __future__ import annotations

import importlib
from typing import Any

from common import Figures, Task


def measure_attention(task: Task) -> Figures:
    """See `attention.py`."""
    return _figures_of("attention", task)


def measure_copies(task: Task) -> Figures:
    """See `copies.py`."""
    return _figures_of("copies", task)


def _figures_of(module: str, task: Task) -> Figures:
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        return {"missing": str(error)}
    figures = found.measure(task.device)
    return figures if isinstance(figures, dict) else {"cases": figures}
