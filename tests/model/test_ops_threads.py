from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import c_int64
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from skipjoin.model.ops import build, cpp_ops, threads
from skipjoin.model.ops.cpp_ops import CppOps

LIBRARY = build.load_library()
needs_library = pytest.mark.skipif(LIBRARY is None, reason="no compiled operations")
THREADS = 3


@pytest.fixture
def share():
    threads.share_between(THREADS)
    yield
    del threads._own.count


@pytest.fixture(params=["between steps", "in a step"])
def step(request) -> Iterator[None]:
    ops = CppOps(LIBRARY, torch.float32)
    ops._spins = request.param == "in a step"
    with ops.step():
        yield


def products(ops: CppOps, seed: int) -> torch.Tensor:
    """Compute a large product repeatedly and assert that all results are equal."""
    generator = torch.Generator().manual_seed(seed)
    linear = ops.linear(torch.randn(400, 96, generator=generator), None)
    x = torch.randn(130, 96, generator=generator)
    first = linear(x)
    assert all(torch.equal(linear(x), first) for _ in range(25))
    return first


@needs_library
def test_concurrent_callers_get_right_results(share, step):
    alone = [products(CppOps(LIBRARY, torch.float32), seed) for seed in range(4)]
    with ThreadPoolExecutor(4, initializer=partial(threads.share_between, THREADS)) as callers:
        together = list(callers.map(lambda seed: products(CppOps(LIBRARY, torch.float32), seed), range(4)))
    assert all(map(torch.equal, alone, together))


# A forked child has none of the threads, and the parent's other thread runs a product during the forks.
FORK = """
import os, signal, sys, threading
import torch
from skipjoin.model.ops import build, cpp_ops, threads
from skipjoin.model.ops.cpp_ops import CppOps
ops = CppOps(build.load_library(), torch.float32)
threads.share_between(3)
linear, x = ops.linear(torch.ones(400, 96), None), torch.ones(130, 96)
linear(x)
def run():
    threads.share_between(3)
    own = CppOps(ops.library, torch.float32).linear(torch.ones(400, 96), None)
    while not done:
        own(x)
done = []
other = threading.Thread(target=run)
other.start()
codes = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if (linear(x) == 96).all() and threads.threads_here() == 3 else 1)
    codes.append(os.waitpid(child, 0)[1])
done.append(True)
other.join()
assert (linear(x) == 96).all()
sys.exit(max(codes))
"""


@needs_library
def test_forked_processes_start_their_own_threads():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=True, timeout=120)


@needs_library
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are not shown here")
def test_threads_sleep_while_idle(share, step):
    products(CppOps(LIBRARY, torch.float32), 0)
    tasks = [task for task in Path("/proc/self/task").iterdir() if "pool" in (task / "comm").read_text()]
    assert len(tasks) >= THREADS - 1
    awake = list(tasks)
    while awake:  # bounded by the test's timeout
        awake = [task for task in awake if (task / "stat").read_text().rpartition(")")[2].split()[0] != "S"]


def test_number_of_threads_follows_the_limits(monkeypatch, caplog):
    monkeypatch.setattr(threads, "usable_cpus", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert threads.default_threads() == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert threads.default_threads() == 1
    with caplog.at_level(logging.WARNING):
        assert threads.default_threads(2) == 2
        assert not caplog.records
        assert threads.default_threads(4) == 4
    assert "threads 4: only 2 can run at once (affinity and CPU quota)" in caplog.text


@needs_library
def test_threads_that_share_cores_do_not_spin_in_steps(monkeypatch):
    monkeypatch.setattr(cpp_ops, "usable_cpus", lambda: 2)

    def opened(count: int) -> list[str]:
        ops, calls = CppOps(LIBRARY, torch.float32), []
        ops.library = SimpleNamespace(
            skipjoin_open_step=lambda: calls.append("open"), skipjoin_close_step=lambda: calls.append("close")
        )
        ops.use_threads(count)
        with suppress(ValueError), ops.step():
            raise ValueError
        return calls

    with ThreadPoolExecutor(1) as another:
        assert [another.submit(opened, count).result() for count in (1, 2, 3)] == [[], ["open", "close"], []]


@needs_library
def test_torch_uses_the_calling_thread_only():
    def count() -> tuple[int, int]:
        CppOps(LIBRARY, torch.float32).use_threads(2)
        return threads.threads_here(), torch.get_num_threads()

    with ThreadPoolExecutor(1) as another:
        assert another.submit(count).result() == (2, 1)


def test_types_of_arguments_are_set_once():
    """Setting them again frees what ctypes converts the arguments of other threads' calls by."""
    function = SimpleNamespace(argtypes=None, restype=None)
    first = build.declare(function, c_int64).argtypes
    assert build.declare(function, c_int64).argtypes is first
    sources = Path(cpp_ops.__file__).parents[1].rglob("*.py")
    assert [file.name for file in sources if ".argtypes" in file.read_text(encoding="utf-8")] == ["build.py"]
