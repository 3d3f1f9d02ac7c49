"""Files that power losses, full disks and killed writers leave whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skipjoin.system.durable import is_sealed, locked, scratch_folder, sealed, write_durably


def test_a_file_is_synchronized_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its folder afterwards."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda one, other: (calls.append("replace"), replace(one, other)))
    write_durably(tmp_path / "file", b"new")
    assert calls == ["fsync", "replace", "fsync"]
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"new")]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "file"
    write_durably(file, b"old")
    monkeypatch.setattr(os, fails, fail)
    with pytest.raises(OSError, match="No space"):
        write_durably(file, b"new")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"]


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
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


def test_a_seal_is_broken_by_any_loss() -> None:
    whole = sealed(b"content")
    assert is_sealed(whole)
    assert not any(is_sealed(whole[:size]) for size in range(len(whole)))
    assert not is_sealed(bytes(len(whole)))
    assert not is_sealed(b"C" + whole[1:])


def test_a_lock_is_not_taken_through_a_link(tmp_path: Path) -> None:
    """Opening it would empty the file that somebody linked there."""
    victim = tmp_path / "victim"
    victim.write_text("content")
    (tmp_path / "cache.lock").symlink_to(victim)
    with locked(tmp_path / "cache.json") as problem:
        assert problem
    assert victim.read_text() == "content"
