"""Run small tensors on one thread, because more would only wait for each other on a busy machine.

Triton kernels are interpreted where there is no CUDA device.
"""

from __future__ import annotations

import pytest
import torch

from support.interpreted import quick_interpreter  # noqa: F401 (before triton is imported)


@pytest.fixture(autouse=True, scope="session")
def single_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
