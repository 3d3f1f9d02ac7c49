"""What all tests share: the helpers in `support`, and a hypothesis profile that gives the same examples every time."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from skipjoin.profile import CACHE_VARIABLE

try:
    from hypothesis import settings
except ImportError:  # on a machine where only the tests of a GPU run
    settings = None

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS))
# Folders of tests that start no process and share nothing that is slow to make: any worker may run any of them.
PURE = {"core", "model", "observe", "policies", "recipes", "sim"}
# Torch's threads wait for each other actively: two on a machine whose cores are busy take ten times as long as one.
# Read when torch is imported, here and in the programs that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if settings is not None:
    settings.register_profile("stable", derandomize=True, deadline=None)
    settings.load_profile("stable")


# A shell that starts the tests in the background makes them ignore interrupts, and with them all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests one worker of pytest-xdist runs (`--dist loadgroup`), and in which order workers take them.

    All that use Ray are one group, because a machine has room for one cluster. Those of a file are one group outside
    the folders of `PURE`, because they share servers, engines and ports. The longest group comes first, and what can be
    dealt out test by test comes last.
    """
    order: dict[pytest.Item, int] = {}
    for item in items:
        folder, *_ = item.path.relative_to(TESTS).parts
        if item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.xdist_group("ray"))
        elif folder not in PURE:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        order[item] = 0 if item.get_closest_marker("ray") else 1 if item.get_closest_marker("xdist_group") else 2
    items.sort(key=order.__getitem__)


@pytest.fixture(scope="session", autouse=True)
def profile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines of one run of the tests share their profiles, and neither read nor write the user's."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a folder of its own in that of the run
        folder = folder.parent
    os.environ[CACHE_VARIABLE] = str(folder / "profiles")
    return folder / "profiles"
