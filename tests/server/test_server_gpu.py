from __future__ import annotations

import pytest
import torch

from chaos.served import GONE_S, serving
from support.waiting import wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POOL = 1 << 30
# Other programs may allocate this much GPU memory during the test.
SLACK = 64 << 20


def test_killed_engine_leaves_no_gpu_memory() -> None:
    before = free_bytes()
    for _ in range(2):  # A restart needs the memory again.
        with serving("--device", "cuda", pools=("--kv-cache-gib", "1", "--swap-space", "0")) as served:
            assert before - free_bytes() > POOL
            for engine in served.engines():
                engine.kill()
            wait_until(lambda: before - free_bytes() <= SLACK, GONE_S)


def free_bytes() -> int:
    free, _ = torch.cuda.mem_get_info(0)
    return int(free)
