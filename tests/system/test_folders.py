from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skipjoin.config import ServerConfig
from skipjoin.forecast.store import default_folder
from skipjoin.model.kernels.tuning import table_path
from skipjoin.server.batches.disk import batch_folder
from skipjoin.system import folders
from skipjoin.system.own_folder import OwnFolder


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("XDG_CACHE_HOME", "SKIPJOIN_FORECAST_DIR", "SKIPJOIN_BATCH_DIR", "SKIPJOIN_KERNEL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folders._temporary.cache_clear()
    yield tmp_path
    folders._temporary.cache_clear()


def test_without_a_home_folder_a_temporary_folder_is_used_with_a_warning(
    temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = temporary / f"skipjoin-{os.getuid()}"
    found = (folders.cache_folder(), default_folder(), batch_folder(ServerConfig()), table_path("gpu", "1").parent)
    assert found == (root, root / "forecasts", root / "batches", root / "kernels")
    assert root.stat().st_mode & 0o777 == 0o700
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"no home folder is found: caches, forecasts and batches are kept in {root}; "
    )


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_temporary_folder_writable_by_others_is_not_used(temporary: Path, kind: str) -> None:
    taken = temporary / f"skipjoin-{os.getuid()}"
    if kind == "a link":
        (temporary / "elsewhere").mkdir(mode=0o700)
        taken.symlink_to(temporary / "elsewhere")
    else:
        taken.mkdir()
        taken.chmod(0o777)
    found = folders.cache_folder()
    assert found != taken
    assert found.stat().st_mode & 0o777 == 0o700


MAKE = (
    "from skipjoin.system.own_folder import OwnFolder; own = OwnFolder('test-'); print(own.path, flush=True); input()"
)


def test_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of live processes, new folders, links and files are kept."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command, environment = [sys.executable, "-c", MAKE], {**os.environ, "TMPDIR": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(command, **pipes) as killed, subprocess.Popen(command, **pipes) as alive:  # type: ignore[call-overload]
        stale, kept = (Path(process.stdout.readline().strip()) for process in (killed, alive))
        killed.kill()
        killed.wait()
        (stale / "engine").touch()
        for name in ("test-unlocked", "other-folder", "new-test-young", "new-test-old"):
            (tmp_path / name).mkdir()
        (tmp_path / "test-file").touch()
        (tmp_path / "test-link").symlink_to(tmp_path / "other-folder")
        os.utime(tmp_path / "new-test-old", (0, 0))
        own = OwnFolder("test-")
        assert own.path.stat().st_mode & 0o777 == 0o700
        expected = {kept.name, own.path.name, "other-folder", "new-test-young", "test-file", "test-link"}
        assert {file.name for file in tmp_path.iterdir()} == expected
        own.close()
        own.close()
        assert not own.path.exists()
        alive.communicate("\n")


def test_taken_folder_name_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rename, taken = Path.rename, []

    def taken_once(made: Path, name: Path) -> Path:
        if not taken:
            name.touch()
            taken.append(name)
        return rename(made, name)

    monkeypatch.setattr(Path, "rename", taken_once)
    own = OwnFolder("test-")
    assert own.path not in taken
    assert sorted(tmp_path.iterdir()) == sorted([own.path, *taken])
    own.close()
