"""Configuration of all tests: groups for pytest-xdist, private cache folders and deterministic hypothesis examples."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib.util
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer import testing

from skipjoin.config.profile import CACHE_VARIABLE
from skipjoin.server import logs

try:
    from hypothesis import settings
except ImportError:  # A machine that only runs the GPU tests may lack it.
    settings = None

sys.path.insert(0, str(Path(__file__).parent))
# Torch's threads wait actively: on busy cores two threads take ten times as long as one. Torch reads the variable
# when it is imported, here and in the programs that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    import certifi
except ImportError:  # The same machine may lack HTTP clients.
    certifi = None

try:
    from support.groups import Groups, group, order
except ImportError:  # A machine that only runs the GPU tests may lack pytest-xdist.
    Groups = None

if settings is not None:
    settings.register_profile("stable", max_examples=8, derandomize=True, deadline=None)
    settings.register_profile("exhaustive", settings.get_profile("stable"), max_examples=100)
    settings.load_profile("stable")


# Programs that a shell starts in the background ignore interrupts, and so would the programs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests by groups with `-n 2`, unless another `--dist` is chosen."""
    return Groups(config, log) if config.getoption("dist") == "load" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Build compiled operations while one process imports everything and the others wait for it."""
    if not has_bytecode():
        build = subprocess.Popen([sys.executable, str(Path(__file__).with_name("model") / "build_ops.py")])
        config.add_cleanup(build.kill)


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """After an installation, let one process import everything first, because otherwise each would compile it."""
    with Path(__file__).open() as this:
        fcntl.flock(this, fcntl.LOCK_SH if has_bytecode() else fcntl.LOCK_EX)
        if has_bytecode():  # or another process has compiled it meanwhile
            fcntl.flock(this, fcntl.LOCK_UN)
        yield


def has_bytecode() -> bool:
    """Return whether bytecode of the largest package exists, or will never exist."""
    torch = importlib.util.find_spec("torch")
    return sys.dont_write_bytecode or torch is None or torch.cached is None or Path(torch.cached).exists()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude modules and test items from garbage collections, each of which would visit all of them."""
    gc.disable()
    with compiled_once():
        done = yield
    gc.freeze()
    # The default of 700 new objects takes a twentieth of the time of tests.
    gc.set_threshold(10_000)
    gc.enable()
    return done


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, object, object]:
    """Make no tests of parameters that `-m` would deselect: two fifths of all, which are a sixth of the collection."""
    done = yield
    if "not exhaustive" in metafunc.config.option.markexpr:
        usual = [call for call in metafunc._calls if all(mark.name != "exhaustive" for mark in call.marks)]
        metafunc._calls[:] = usual or metafunc._calls[:1]
    return done


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if Groups is None:
        return
    for item in items:
        if item.get_closest_marker("ray") and group(item.nodeid) != "ray":
            raise pytest.UsageError(f"{item.path.name} has a test that uses Ray: add it to RAY in support/groups.py")
    items.sort(key=lambda item: order(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    """Fail tests that leave a level to the log, by which later ones would see other records: see `log_of_process`."""
    done = yield
    logger = logging.getLogger("skipjoin")
    level, logger.level = logger.level, logging.NOTSET
    assert level == logging.NOTSET
    return done


@pytest.fixture
def log_of_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the log after a test that runs a server's command in this process."""
    logger, handlers, level = logging.getLogger("skipjoin"), logging.root.handlers.copy(), logging.root.level
    monkeypatch.setattr(logs, "_spell", str)
    for name in (logs._LEVEL, logs._FORM):
        monkeypatch.setenv(name, "")  # to be restored even if it is not set
        monkeypatch.delenv(name)
    yield
    logger.setLevel(logging.NOTSET)
    logging.root.setLevel(level)
    logging.root.handlers[:] = handlers


@pytest.fixture(scope="session", autouse=True)
def profile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Let all engines of a test run share one profile cache."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # Each worker has its own folder in that of the run.
        folder = folder.parent
    os.environ[CACHE_VARIABLE] = str(folder / "profiles")
    return folder / "profiles"


@pytest.fixture(scope="session", autouse=True)
def forecast_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the forecasts of tests out of the user's folder."""
    os.environ["SKIPJOIN_FORECAST_DIR"] = str(tmp_path_factory.mktemp("forecasts"))


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let clients trust one certificate authority, because each client would load all of them in 20 ms."""
    if certifi is None:
        return
    authority = Path(certifi.where()).read_text(encoding="ascii").partition("-----END")[0]
    file = tmp_path_factory.mktemp("authorities") / "one.pem"
    file.write_text(f"{authority}-----END CERTIFICATE-----\n", encoding="ascii")
    os.environ["SSL_CERT_FILE"] = str(file)


@pytest.fixture(scope="session", autouse=True)
def each_command_once() -> Iterator[None]:
    """Let typer's runner keep the commands of an application, which it would make again in 50 ms for each call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "_get_command", functools.cache(testing._get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_batch_folder() -> None:
    """Disable batches unless a test names a folder."""
    os.environ["SKIPJOIN_BATCH_DIR"] = "none"
