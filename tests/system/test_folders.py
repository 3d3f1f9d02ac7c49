from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from skipjoin.config import ServerConfig
from skipjoin.forecast.store import default_folder
from skipjoin.model.kernels.tuning import table_path
from skipjoin.server.batches.folder import batch_folder
from skipjoin.system import folders


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
