"""One thread for tiny tensors: more only wait for each other, and the machine may be busy."""

from __future__ import annotations

import os

import pytest
import torch

# Triton decides at its import, which is later, whether kernels run on a GPU or are interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="session")
def single_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
