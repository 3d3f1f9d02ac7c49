from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from skipjoin.model.ops import build
from skipjoin.system.disk import has_space, why_not_written
from skipjoin.system.durable import is_sealed, locked, scratch_folder, sealed, write_durably


def test_file_is_synced_before_rename_and_folder_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda one, other: (calls.append("replace"), replace(one, other)))
    write_durably(tmp_path / "file", b"new")
    assert calls == ["fsync", "replace", "fsync"]
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"new")]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "file"
    write_durably(file, b"old")
    monkeypatch.setattr(os, fails, fail)
    with pytest.raises(OSError, match="No space"):
        write_durably(file, b"new")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"]


def test_stale_temporary_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".new-file").touch()
    (tmp_path / ".new-folder").mkdir()
    (tmp_path / ".new-folder" / "part").touch()
    for name in (".new-file", ".new-folder"):
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / ".new-young").touch()
    write_durably(tmp_path / "file", b"")
    with scratch_folder(tmp_path):
        pass
    assert sorted(file.name for file in tmp_path.iterdir()) == [".new-young", "file"]


def test_seal_detects_truncation_and_corruption() -> None:
    whole = sealed(b"content")
    assert is_sealed(whole)
    assert not any(is_sealed(whole[:size]) for size in range(len(whole)))
    assert not is_sealed(bytes(len(whole)))
    assert not is_sealed(b"C" + whole[1:])


def test_lock_does_not_follow_a_symbolic_link(tmp_path: Path) -> None:
    """Opening a link would truncate the file that another user linked."""
    victim = tmp_path / "victim"
    victim.write_text("content")
    (tmp_path / "cache.lock").symlink_to(victim)
    with locked(tmp_path / "cache.json") as problem:
        assert problem
    assert victim.read_text() == "content"


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
    with pytest.raises(OSError, match=f"disk full: .*{tmp_path}.*XDG_CACHE_HOME"):
        build.compiled_library()
