from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from chaos.plan import World
from chaos.served import GONE_S, Place, Served

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POOL = 1 << 30
# Other programs may allocate this much GPU memory during the test.
SLACK = 64 << 20


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place(World("card"))
    yield found
    found.close()


def test_killed_engine_leaves_no_gpu_memory(place: Place) -> None:
    before = free_bytes()
    for _ in range(2):  # A restart needs the memory again.
        served = Served(place, "--device", "cuda", pools=("--kv-cache-gib", "1", "--swap-space", "0"))
        try:
            assert before - free_bytes() > POOL
            for engine in served.engines():
                engine.kill()
            end = time.monotonic() + GONE_S
            while before - free_bytes() > SLACK:
                assert time.monotonic() < end, f"{(before - free_bytes()) >> 20} MiB of GPU memory are still allocated"
                time.sleep(0.1)
        finally:
            served.close()


def free_bytes() -> int:
    free, _ = torch.cuda.mem_get_info(0)
    return int(free)
