from __future__ import annotations

import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from skipjoin.config.profile import cache_profile, cached_profile, measures_alone
from skipjoin.forecast.store import STATE, Identity, load_state, save_state
from skipjoin.model import kernels as triton_cache
from skipjoin.model.kernels.tuning import TunedTable, table_path
from skipjoin.model.ops import build
from skipjoin.model.ops.choice import Choices
from skipjoin.system import folders
from skipjoin.system.durable import make_private, sealed
from skipjoin.system.folders import why_untrusted
from support.profiles import KEY, PROFILE

OTHER = 12345
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root to change the owner of files"
)


def change_owner(path: Path) -> None:
    os.chown(path, OTHER, OTHER, follow_symlinks=False)


def open_to_group(path: Path) -> None:
    path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o020)


def open_to_all(path: Path) -> None:
    path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o002)


def replace_by_link(path: Path) -> None:
    moved = path.rename(path.with_name("moved"))
    path.symlink_to(moved)


UNTRUSTED_CASES = [
    pytest.param(change_owner, rf"belongs to user {OTHER}, not to root \(0\) or root; .*chown", marks=needs_root),
    pytest.param(open_to_group, r"has mode 07[27]0|has mode 06[26]0", id="group"),
    pytest.param(open_to_all, r"has mode 0[67]02, so other users may write to it; run: chmod go-w", id="all"),
    pytest.param(replace_by_link, r"is a symbolic link; remove it", id="link"),
]
TAMPERERS = [pytest.param(change_owner, marks=needs_root), open_to_group, open_to_all, replace_by_link]
Tamper = Callable[[Path], None]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private cache folder with one file. Warnings that are logged once are reset."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / ".cache"))
    for name in ("SKIPJOIN_PROFILE_CACHE", "SKIPJOIN_KERNEL_CACHE", "SKIPJOIN_FORECAST_DIR"):
        monkeypatch.delenv(name, raising=False)
    folder = folders.cache_folder()
    make_private(folder)
    (folder / "file").touch(mode=0o600)
    folders._warn_once.cache_clear()
    build.say_once.cache_clear()
    yield folder
    folders._warn_once.cache_clear()
    build.say_once.cache_clear()


@pytest.mark.parametrize(("tamper", "reason"), UNTRUSTED_CASES)
@pytest.mark.parametrize("which", ["file", "folder"])
def test_path_writable_by_another_user_is_untrusted(cache: Path, tamper: Tamper, reason: str, which: str) -> None:
    path = cache / "file" if which == "file" else cache
    assert why_untrusted(path) is None
    tamper(path)
    found = why_untrusted(path)
    assert found.startswith(str(path))
    assert re.search(reason, found), found


@pytest.mark.parametrize("tamper", TAMPERERS[:3])
def test_path_below_an_untrusted_folder_is_untrusted(cache: Path, tamper: Tamper) -> None:
    """Another user could create a missing path first."""
    above = cache.parent
    tamper(above)
    for path in (cache / "file", cache / "new", above / "elsewhere" / "new"):
        assert (why_untrusted(path) or "").startswith(str(above)), path


def test_own_links_and_sticky_folders_are_trusted(cache: Path) -> None:
    """Paths below /tmp and linked home folders are like this."""
    shared = cache.parent / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    inner = shared / "mine"
    inner.mkdir(mode=0o700)
    (cache / "link").symlink_to("../shared/mine")
    assert why_untrusted(cache / "link" / "file") is None
    shared.chmod(0o777)
    assert (why_untrusted(cache / "link" / "file") or "").startswith(str(shared))
    (cache / "round").symlink_to("round")
    assert "too many links" in (why_untrusted(cache / "round" / "file") or "")


@needs_root
def test_link_of_another_user_is_untrusted(cache: Path) -> None:
    (cache / "target").mkdir(mode=0o700)
    (cache / "link").symlink_to("target")
    assert why_untrusted(cache / "link" / "file") is None
    change_owner(cache / "link")
    assert "link belongs to user 12345" in (why_untrusted(cache / "link" / "file") or "")


@needs_root
def test_path_that_cannot_be_examined_is_untrusted(cache: Path) -> None:
    """As that of a home folder of another user."""
    cache.parent.chmod(0o700)
    os.seteuid(OTHER)
    try:
        found = why_untrusted(cache / "file")
    finally:
        os.seteuid(0)
    assert (found or "").endswith("cannot be examined: Permission denied")


def test_folders_above_the_home_folder_are_ignored(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_all(cache.parents[2])
    assert why_untrusted(cache) is not None
    monkeypatch.setenv("HOME", str(cache.parents[1]))
    assert why_untrusted(cache) is None
    open_to_all(cache.parents[1])
    assert why_untrusted(cache) is not None


def test_files_of_root_are_trusted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An administrator may install them."""
    owner = cache.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert (why_untrusted(cache / "file") is None) == (owner == 0)


def test_new_folders_are_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        make_private(tmp_path / "one" / "two")
    finally:
        os.umask(before)
    assert why_untrusted(tmp_path / "one" / "two") is None
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="exists"):
        make_private(tmp_path / "file")


class Compiler:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        monkeypatch.setattr(build.shutil, "which", lambda name: "/usr/bin/" + name)
        monkeypatch.setattr(build.subprocess, "run", self.run)

    def run(self, command: list[str], **_: object) -> None:
        self.runs += "-c" not in command
        Path(command[-1]).write_bytes(b"compiled here")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    build._own_folder.cache_clear()
    yield Compiler(monkeypatch)
    if build._own_folder.cache_info().currsize:
        build._own_folder().close()
    build._own_folder.cache_clear()


@pytest.fixture(autouse=True)
def warnings_alone(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Other tests start servers in this process, which log more."""
    with caplog.at_level(logging.WARNING):
        yield


@pytest.mark.parametrize("tamper", TAMPERERS)
def test_untrusted_library_is_rebuilt(
    cache: Path, compiler: Compiler, tamper: Tamper, caplog: pytest.LogCaptureFixture
) -> None:
    library = build.compiled_library()
    library.write_bytes(sealed(b"has a checksum, but belongs to another user"))
    assert build.compiled_library() == library
    assert compiler.runs == 1
    tamper(library)
    assert build.compiled_library() == library
    assert library.read_bytes() == sealed(b"compiled here")
    assert why_untrusted(library) is None
    (warning,) = caplog.messages
    assert warning.startswith(f"the compiled operations' library {library} is not used: {library}")


@pytest.mark.parametrize("tamper", TAMPERERS)
def test_untrusted_cache_is_replaced_by_a_private_folder(
    cache: Path, compiler: Compiler, tamper: Tamper, caplog: pytest.LogCaptureFixture
) -> None:
    library = build.compiled_library()
    tamper(cache)
    private = build.compiled_library()
    assert private == build.compiled_library()
    assert compiler.runs == 2
    assert private.parent != cache
    assert private.read_bytes() == sealed(b"compiled here")
    assert stat.S_IMODE(private.parent.stat().st_mode) == 0o700
    assert {file.name for file in cache.iterdir() if file.suffix != ".lock"} == {"file", library.name}
    refusal, instead = caplog.messages
    assert refusal.startswith(f"the folder of compiled operations {cache} is not used: {cache}")
    assert instead == f"CPU operations are compiled for this process alone, in {private.parent}"


def test_torch_operations_are_used_without_a_trusted_folder(
    cache: Path, tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_to_all(cache)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    temporary.chmod(0o777)  # It is not sticky, so another user can replace its files.
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert list(build.libraries()) == []
    assert compiler.runs == 0
    assert "the slower torch operations are used instead: there is no folder for them that" in caplog.messages[-1]
    assert str(temporary) in caplog.messages[-1]


def test_untrusted_profiles_are_not_used(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache_profile(PROFILE)
    assert cached_profile(KEY) == PROFILE
    open_to_group(cache / "profiles")
    with measures_alone(KEY):
        assert cached_profile(KEY) is None
        cache_profile(PROFILE)
    (warning,) = caplog.messages
    assert f"{cache / 'profiles'} has mode 0720" in warning


def test_untrusted_matmul_choices_are_not_used(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    def seconds(way: str, rows: int) -> float:
        return 1.0 if way == "floats" else 2.0

    path = cache / "products-x.json"
    path.write_bytes(sealed(json.dumps({"8x8": "vectors"}).encode()))
    path.chmod(0o600)
    assert Choices("x").way("8x8", ("vectors", "floats"), seconds) == "vectors"
    open_to_group(path)
    assert Choices("x").way("8x8", ("vectors", "floats"), seconds) == "floats"
    (warning,) = caplog.messages
    assert f"{path} has mode 0620" in warning


def test_untrusted_kernel_table_is_not_used_or_written(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = table_path("gpu", "1")
    configs = [{"size": 1}, {"size": 2}]
    TunedTable(path, lambda call, turns: 1.0).measure("name", "source", [], configs, lambda config, turn: None)
    assert TunedTable(path).known("name", "source", [])
    content = path.read_bytes()
    open_to_group(path)
    table = TunedTable(path, lambda call, turns: 1.0)
    assert not table.known("name", "source", [])
    table.measure("other", "source", [], configs, lambda config, turn: None)
    assert path.read_bytes() == content
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("which", ["folder", "state"])
def test_untrusted_forecasts_are_not_used_or_written(cache: Path, which: str, caplog: pytest.LogCaptureFixture) -> None:
    parent, identity, restored = cache / "forecasts", Identity("model", "knn", "bag", 4), []
    arrays = {"one": np.zeros(3)}
    assert save_state(parent, identity, arrays, {"requests": 1})
    assert load_state(parent, identity, restored.append)
    folder = identity.folder(parent)
    open_to_all(folder if which == "folder" else folder / STATE)
    assert not load_state(parent, identity, restored.append)
    assert not save_state(parent, identity, arrays, {"requests": 2})
    assert len(restored) == 1
    assert len(caplog.messages) == 1


def test_triton_gets_a_private_cache_if_its_cache_is_untrusted(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    triton_cache.protect_triton_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(cache)
    open_to_all(cache)
    triton_cache.protect_triton_cache()
    own = Path(os.environ["TRITON_CACHE_DIR"])
    assert own != cache
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    triton_cache._own_folder().close()
    triton_cache._own_folder.cache_clear()
    assert not own.exists()
