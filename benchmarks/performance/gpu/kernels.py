"""The parts `attention`, `activations` and `copies`: kernels alone, measured by separate modules."""

from __future__ import annotations

import sys

import attention
import copies
from common import HERE, Figures, Task


def measure_attention(task: Task) -> Figures:
    """Measure attention; see `attention.py`."""
    return {"cases": attention.measure(task.device)}


def measure_activations(task: Task) -> Figures:
    """Measure products with activations; see `model_step/activations.py`."""
    sys.path.append(str(HERE.parent / "model_step"))
    from activations import measure  # noqa: PLC0415

    figures: Figures = {"cases": []}
    for case in measure(task.device, tiny=task.is_rehearsal):
        figures["cases"].append(case)
        task.keep(figures)
    return figures


def measure_copies(task: Task) -> Figures:
    """Measure copies; see `copies.py`."""
    return copies.measure(task.device, keep=task.keep)
