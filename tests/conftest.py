"""What all tests share: the helpers in `support`, and a hypothesis profile that gives the same examples every time."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from skipjoin.config.profile import CACHE_VARIABLE

try:
    from hypothesis import settings
except ImportError:  # on a machine where only the tests of a GPU run
    settings = None

sys.path.insert(0, str(Path(__file__).parent))
# Torch's threads wait for each other actively: two on a machine whose cores are busy take ten times as long as one.
# Read when torch is imported, here and in the programs that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    from support.groups import Groups, group, place
except ImportError:  # the same
    Groups = None

if settings is not None:
    settings.register_profile("stable", derandomize=True, deadline=None)
    settings.load_profile("stable")


# A shell that starts the tests in the background makes them ignore interrupts, and with them all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2` tests are dealt out by groups; another `--dist` is left alone."""
    return Groups(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if Groups is None:
        return
    for item in items:
        if item.get_closest_marker("ray") and group(item.nodeid) != "ray":
            raise pytest.UsageError(f"{item.path.name} has a test that uses Ray: add it to RAY in support/groups.py")
    items.sort(key=lambda item: place(item.nodeid))


@pytest.fixture(scope="session", autouse=True)
def profile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines of one run of the tests share their profiles, and neither read nor write the user's."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a folder of its own in that of the run
        folder = folder.parent
    os.environ[CACHE_VARIABLE] = str(folder / "profiles")
    return folder / "profiles"


@pytest.fixture(scope="session", autouse=True)
def forecast_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What servers and engines of the tests learn of output lengths is not kept where the user's is."""
    os.environ["SKIPJOIN_FORECAST_DIR"] = str(tmp_path_factory.mktemp("forecasts"))


@pytest.fixture(scope="session", autouse=True)
def no_batch_folder() -> None:
    """Servers of the tests have no batches unless a test names a folder: the user's is left alone."""
    os.environ["SKIPJOIN_BATCH_DIR"] = "none"
