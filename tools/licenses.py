"""Print THIRD_PARTY.md with the license of every locked distribution, and fail for licenses that are not allowed.

python tools/licenses.py > THIRD_PARTY.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# Licenses of distributions that code of another license may use. MPL-2.0 applies to its own files only.
ALLOWED = {
    *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "CNRI-Python", "ISC", "MIT", "MIT-0", "MIT-CMU"),
    *("MPL-2.0", "PSF-2.0", "Zlib"),
}
# SPDX expressions for the classifiers and texts of older metadata.
NAMES = {
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "3-Clause BSD License": "BSD-3-Clause",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
# Licenses of distributions that only other platforms install, or that declare none in their metadata.
ELSEWHERE = {
    "axe-playwright-python": "MIT AND MPL-2.0",
    "cffi": "MIT-0",
    "colorama": "BSD-3-Clause",
    "pycparser": "BSD-3-Clause",
}
HEADER = """# Third-party distributions

Written by `make lock`; `tools/licenses.py` says which licenses are allowed. pip installs the distributions: none is a
part of this repository. torch (BSD-3-Clause) is not in the locks. Its wheel for GPUs brings triton (MIT) and NVIDIA's
libraries, which have a license of NVIDIA's own.

| distribution | version | license | needed by |
|---|---|---|---|
"""


class Locked(NamedTuple):
    """An entry of a lock; `marker` names the environments that need it, and is empty for all."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]


def read_lock(path: Path) -> dict[str, Locked]:
    """Return the entries of a lock by name."""
    found = {}
    for entry in re.split(r"\n(?=[a-z0-9])", path.read_text(encoding="utf-8").split("\n", 1)[1]):
        head, *hashes = re.split(r"\s+--hash=", entry.replace("\\\n", "").strip())
        match = re.fullmatch(r"([a-z0-9.-]+)==(\S+)(?: ; (.+))?", head.strip())
        if match is None:
            raise ValueError(f"{path.name}: {head!r} is not NAME==VERSION")
        found[match[1]] = Locked(match[1], match[2], match[3] or "", tuple(hashes))
    return found


def license_of(found: Distribution) -> str:
    """Return the license that a distribution declares, as an SPDX expression where its text is known."""
    declared = found.metadata
    if expression := declared.get("License-Expression"):
        return str(expression)
    text = (declared.get("License") or "").strip()
    classifiers = [line.rpartition(" :: ")[2] for line in declared.get_all("Classifier") or () if "License" in line]
    for name in (text, *classifiers):
        if name in NAMES:
            return NAMES[name]
        if name and set(re.split(r" AND | OR ", name)) <= ALLOWED:
            return name
    return text.partition("\n")[0] or "unknown"


def is_allowed(expression: str) -> bool:
    """Return whether an SPDX expression without parentheses requires allowed licenses only."""
    return all(any(one in ALLOWED for one in part.split(" OR ")) for part in expression.split(" AND "))


def rows() -> Iterator[tuple[Locked, str, str]]:
    runtime = read_lock(ROOT / "requirements.lock")
    for name, entry in read_lock(ROOT / "requirements-dev.lock").items():
        try:
            license_name = license_of(distribution(name))
        except PackageNotFoundError:
            license_name = "unknown"
        if license_name == "unknown":
            license_name = ELSEWHERE.get(name, "unknown")
        yield entry, license_name, "all" if name in runtime else "extras, development"


def main() -> int:
    """Print the table; return 1 if a license is not allowed."""
    lines, refused = [], []
    for entry, license_name, needed_by in rows():
        lines.append(f"| {entry.name} | {entry.version} | {license_name} | {needed_by} |\n")
        if not is_allowed(license_name):
            refused.append(f"{entry.name} {entry.version}: license {license_name!r} is not allowed")
    sys.stdout.write(HEADER + "".join(lines))
    sys.stderr.write("".join(f"{line}; see tools/licenses.py\n" for line in refused))
    return bool(refused)


if __name__ == "__main__":
    sys.exit(main())
