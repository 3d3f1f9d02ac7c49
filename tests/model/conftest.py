"""Run small tensors on one thread, because more would only wait for each other on a busy machine.

Triton kernels are interpreted where there is no CUDA device.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any

import pytest
import torch

import support.interpreted  # noqa: F401 (read when triton is imported)


@pytest.fixture(autouse=True, scope="session")
def single_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> None:
    """Let Triton's interpreter look for the functions that it replaces once instead of at each launch of a kernel."""
    if (interpreter := sys.modules.get("triton.runtime.interpreter")) is None:
        return

    @cache
    def builtins_of(place: Any) -> list[tuple[str, Any]]:
        return [one for one in inspect.getmembers(place) if interpreter.tl.core.is_builtin(one[1])]

    def patch(place: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins_of(place):
            if getattr(place, name) is member:  # a kernel that another one calls finds them replaced
                interpreter._patch_attr(place, name, member, builder, scope)

    interpreter._patch_builtin = patch
