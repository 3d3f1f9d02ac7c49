from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.groups import Groups, order

CONFTEST = """
from support.groups import Groups

def pytest_xdist_make_scheduler(config, log):
    return Groups(config, log)
"""
# Many groups have finished before the first process crashes, and others have not begun when the last one does.
TESTS = """
import os, pytest

@pytest.mark.parametrize("number", range(40))
def test_one(number):
    if number in (10, 30):
        os._exit(1)
"""


@pytest.mark.exhaustive  # it is about the run of these tests; those below have the groups
def test_run_ends_and_reports_each_crash_once(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "core" / "test_core.py").write_text(TESTS)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "xdist",
            "-n",
            "2",
            "-p",
            "no:cacheprovider",
            "-q",
            "--rootdir",
            str(tmp_path),
            ".",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "2 failed, 38 passed" in done.stdout, done.stdout + done.stderr
    for number in (10, 30):
        assert f"crashed while running 'core/test_core.py::test_one[{number}]'" in done.stdout


class Process:
    """Stands in for a process of pytest-xdist that runs the first test of what it is sent and never finishes."""

    def __init__(self) -> None:
        self.shutting_down, self.gateway = False, SimpleNamespace(id="gw")
        self.sent: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_processes_divide_tests_that_wait_and_tests_that_compute() -> None:
    files = ("core/test_a", "exec/test_ray_nodes", "exec/test_b", "model/test_ops_amx", "server/test_c", "sim/test_d")
    tests = sorted((f"tests/{file}.py::test_{number}" for number in range(3) for file in files), key=order)
    config: Any = SimpleNamespace(option=SimpleNamespace(), getvalue=lambda name: ["3*popen"])
    groups, processes = Groups(config), [Process() for _ in range(3)]
    for process in processes:
        groups.add_node(process)
        groups.add_node_collection(process, tests)
    groups.schedule()
    begun = [{tests[index].split("/", 1)[1].split(".")[0] for index in process.sent} for process in processes]
    assert begun == [{"model/test_ops_amx"}, {"exec/test_ray_nodes"}, {"server/test_c"}]
    assert tests[-1].startswith("tests/core/")
    finished = [0] * len(processes)
    while groups.workqueue:
        for number, process in enumerate(processes):
            groups.mark_test_complete(process, process.sent[finished[number]])
            finished[number] += 1
    assert sorted(index for process in processes for index in process.sent) == list(range(len(tests)))
