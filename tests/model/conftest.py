"""One thread for tiny tensors: more only wait for each other, and the machine may be busy.

Triton kernels are interpreted where there is no CUDA device.
"""

from __future__ import annotations

import os

import pytest
import torch

# Read when triton is imported, which nothing has done yet.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="session")
def single_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
