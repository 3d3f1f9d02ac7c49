"""One thread for tiny tensors: more only wait for each other, and the machine may be busy.

Triton kernels are interpreted where there is no CUDA device.
"""

from __future__ import annotations

import pytest
import torch

import support.interpreted  # noqa: F401 (read when triton is imported)


@pytest.fixture(autouse=True, scope="session")
def single_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
