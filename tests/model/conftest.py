"""One thread for tiny tensors: more only wait for each other, and the machine may be busy."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def single_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
