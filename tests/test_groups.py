"""Distribution of tests over processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_run_ends_and_reports_each_crash_once(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "core" / "test_core.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "-q", "--rootdir", str(tmp_path), "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "2 failed, 38 passed" in done.stdout, done.stdout + done.stderr
    for number in (10, 30):
        assert f"crashed while running 'core/test_core.py::test_one[{number}]'" in done.stdout
