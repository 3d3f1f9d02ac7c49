"""Build and check all artifacts of a release in the folder dist, without uploading any.

    python tools/release.py [--untagged] [--only MACHINE]

Artifacts are the source distribution, one wheel per machine with compiled CPU operations, a software bill of materials
(CycloneDX) of the locked runtime dependencies, and SHA256SUMS. The same commit gives the same bytes. The commit needs
the tag of its version, vX.Y.Z, unless --untagged is given. `make release` runs this in an environment with the tools.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
# torch's wheels need the same glibc.
GLIBC = "2_28"
MACHINES = ("x86_64", "aarch64")


def main() -> None:
    """Build, check and list the artifacts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--untagged", action="store_true", help="build a commit without the tag of its version")
    parser.add_argument("--only", choices=MACHINES, help="build one wheel instead of all")
    options = parser.parse_args()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if not options.untagged:
        check_tag(version)
    os.environ["SOURCE_DATE_EPOCH"] = epoch = output("git", "log", "-1", "--format=%ct")
    shutil.rmtree(DIST, ignore_errors=True)
    # The same folder each time, so that the compiler's cache knows unchanged sources.
    source = export_commit(ROOT / "build/release")
    run("build", "--no-isolation", "--sdist", "--outdir", str(DIST), str(source))
    (sdist,) = DIST.glob("*.tar.gz")
    normalize(sdist, int(epoch))
    for machine in MACHINES if options.only is None else (options.only,):
        platform = f"--build-option=--plat-name=manylinux_{GLIBC}_{machine}"
        run("build", "--no-isolation", "--wheel", f"-C{platform}", "--outdir", str(DIST), str(source))
    wheels = sorted(DIST.glob("*.whl"))
    check(sdist, wheels)
    bill = DIST / f"skipjoin-{version}.cdx.json"
    lock, project = ROOT / "requirements.lock", ROOT / "pyproject.toml"
    bill_options = ("--pyproject", str(project), "--output-reproducible", "--output-file", str(bill))
    run("cyclonedx_py", "requirements", *bill_options, str(lock))
    files = [sdist, *wheels, bill]
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    for file in files:
        print(f"{file.stat().st_size:>10,} {file.name}")


def check_tag(version: str) -> None:
    """Exit unless HEAD has the tag of this version and the changelog has its date."""
    tags = output("git", "tag", "--points-at", "HEAD").split()
    if f"v{version}" not in tags:
        sys.exit(f"HEAD must have the tag v{version}, it has {', '.join(tags) or 'none'}: tag it, or use --untagged")
    changes = (ROOT / "CHANGELOG.md").read_text()
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changes, re.MULTILINE):
        sys.exit(f"CHANGELOG.md must have a heading with a date, such as: ## {version} (2026-12-31)")


def export_commit(folder: Path) -> Path:
    """Copy the files of HEAD, so that files which are not committed cannot get into an artifact."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = folder / "source.tar"
    subprocess.run(["git", "archive", "--output", str(archive), "HEAD"], check=True, cwd=ROOT)
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "source", filter="data")
    return folder / "source"


def normalize(sdist: Path, epoch: int) -> None:
    """Rewrite a source distribution with fixed times, owners and order."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda one: one.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode, member.pax_headers = (0o755 if member.isdir() or member.mode & 0o100 else 0o644), {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with sdist.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as zipped:
        zipped.write(packed.getvalue())


def check(sdist: Path, wheels: list[Path]) -> None:
    """Check metadata, contents and platform tags."""
    run("twine", "check", "--strict", str(sdist), *map(str, wheels))
    for wheel in wheels:
        run("check_wheel_contents", "--toplevel", "skipjoin", str(wheel))
        shown = output(sys.executable, "-m", "auditwheel", "show", str(wheel))
        tag = wheel.stem.rpartition("-")[2]
        print(shown)
        # auditwheel reports the oldest glibc that has all symbols, which may be older than the wheel's.
        found = re.search(r"manylinux_2_(\d+)_(\w+)", " ".join(shown.split()))
        if found is None or int(found[1]) > int(GLIBC.partition("_")[2]) or not tag.endswith(found[2]):
            sys.exit(f"{wheel.name}: auditwheel finds another platform than {tag}")


def run(module: str, *arguments: str) -> None:
    """Run a tool of this environment."""
    subprocess.run([sys.executable, "-m", module, *arguments], check=True, cwd=ROOT)


def output(*command: str) -> str:
    """Return a command's standard output."""
    return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
