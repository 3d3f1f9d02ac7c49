"""A server on a card: what is left there when its engine is killed."""

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
# What other programs may take of the card meanwhile.
SLACK = 64 << 20


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place(World("card"))
    yield found
    found.close()


def test_killed_engine_leaves_no_gpu_memory(place: Place) -> None:
    before = free_bytes()
    for _ in range(2):  # a restart finds the memory free, and leaves none either
        served = Served(place, "--device", "cuda", pools=("--kv-cache-gib", "1", "--swap-space", "0"))
        try:
            assert before - free_bytes() > POOL
            for engine in served.engines():
                engine.kill()
            end = time.monotonic() + GONE_S
            while before - free_bytes() > SLACK:
                assert time.monotonic() < end, f"{(before - free_bytes()) >> 20} MiB of the card are still taken"
                time.sleep(0.1)
        finally:
            served.close()


def free_bytes() -> int:
    """Of the first card, beside what this process has of it."""
    free, _ = torch.cuda.mem_get_info(0)
    return int(free)
