"""Where the user's files are kept."""

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
    """A user without a home folder, and where its temporary files are."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("XDG_CACHE_HOME", "SKIPJOIN_FORECAST_DIR", "SKIPJOIN_BATCH_DIR", "SKIPJOIN_KERNEL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folders._temporary.cache_clear()
    yield tmp_path
    folders._temporary.cache_clear()


def test_without_a_home_folder_all_is_kept_in_a_temporary_one_after_a_warning(
    temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = temporary / f"skipjoin-{os.getuid()}"
    places = (folders.cache_folder(), default_folder(), batch_folder(ServerConfig()), table_path("gpu", "1").parent)
    assert places == (kept, kept / "forecasts", kept / "batches", kept / "kernels")
    assert kept.stat().st_mode & 0o777 == 0o700
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"no home folder is found: caches, forecasts and batches are kept in {kept}; "
    )


@pytest.mark.parametrize("kind", ["open to others", "a link"])
def test_a_folder_that_others_can_write_to_is_not_used(temporary: Path, kind: str) -> None:
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
