from __future__ import annotations

import errno
from pathlib import Path

import pytest

from skipjoin.model.ops import build
from skipjoin.system.disk import has_space, why_not_written


def test_a_write_error_names_the_folder_of_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert why_not_written(OSError(errno.ENOSPC, "No space left"), path).startswith(
        f"disk full: no space is left in the folder {tmp_path};"
    )
    assert why_not_written(OSError(errno.EACCES, "Permission denied"), path) == "Permission denied"


def test_space_of_a_folder_is_compared_with_what_is_needed(tmp_path: Path) -> None:
    assert has_space(tmp_path, 1)
    assert not has_space(tmp_path, 1 << 60)


def test_operations_are_not_compiled_into_a_full_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_BUILD_BYTES", 1 << 60)
    monkeypatch.setenv("CXX", "true")
    assert build.will_compile()
    with pytest.raises(OSError, match=f"disk full: .*{tmp_path}.*XDG_CACHE_HOME"):
        build.compiled_library()
