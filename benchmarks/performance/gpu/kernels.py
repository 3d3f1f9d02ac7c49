"""The parts `attention`, `activations` and `copies`: kernels alone, measured by separate modules."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from common import HERE, Figures, Task


def measure_attention(task: Task) -> Figures:
    """Measure attention; see `attention.py`."""
    return _figures_of("attention", task)


def measure_activations(task: Task) -> Figures:
    """Measure products with activations; see `model_step/activations.py`."""
    sys.path.append(str(HERE.parent / "model_step"))
    from activations import measure  # noqa: PLC0415

    return {"cases": measure(task.device, tiny=task.is_rehearsal)}


def measure_copies(task: Task) -> Figures:
    """Measure copies; see `copies.py`."""
    return _figures_of("copies", task)


def _figures_of(module: str, task: Task) -> Figures:
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        return {"missing": str(error)}
    figures = found.measure(task.device)
    return figures if isinstance(figures, dict) else {"cases": figures}
