"""Resolve what users install: all extras, alone and with each supported release of vLLM.

    python tools/resolve.py

Each is resolved to its highest versions and to the lowest that pyproject.toml allows. If all extras fit together, each
of them fits. The tool needs a network and reads metadata only.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lock import ROOT, install_uv
from skipjoin.vllm.compat import TESTED

PROJECT = ROOT / "pyproject.toml"
RESOLUTIONS = ("highest", "lowest-direct")


class Case(NamedTuple):
    """Requirements that one command of pip gets."""

    extras: tuple[str, ...]
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([f"skipjoin[{','.join(self.extras)}]" if self.extras else "skipjoin", *self.more])


def cases() -> Iterator[Case]:
    yield Case(("all",))
    for version in TESTED:
        yield Case(("all", "vllm"), (f"vllm=={version}",))
    # A bound that no recent release of vLLM meets would not fail here: pip would install an old one.
    yield Case((), ("vllm",))


def main() -> None:
    """Print each resolution, and exit with 1 if one fails."""
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        uv = install_uv(Path(folder, "venv"))
        for case in cases():
            for resolution in RESOLUTIONS if case.extras else RESOLUTIONS[:1]:
                why, found = resolve(uv, case, resolution, Path(folder, "more.in"))
                print(f"{case}, {resolution}: {why or ', '.join(shown(found))}", flush=True)
                failed |= why is not None
    sys.exit(failed)


def resolve(uv: Path, case: Case, resolution: str, file: Path) -> tuple[str | None, dict[str, str]]:
    """Return why a case does not resolve to a supported release, or None, and the versions by name."""
    file.write_text("\n".join(case.more))
    command = [str(uv), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version=3.11"]
    command += ["--python-platform=linux", f"--resolution={resolution}", *(f"--extra={one}" for one in case.extras)]
    done = subprocess.run([*command, str(PROJECT), str(file)], capture_output=True, text=True, check=False)
    found = dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE))
    if done.returncode:
        return done.stderr.strip() or f"uv exited with {done.returncode}", found
    if (version := found.get("vllm")) is not None and release(version) < release(TESTED[0]):
        return f"vLLM {version} is older than {TESTED[0]}, the oldest supported release", found
    return None, found


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def shown(found: dict[str, str]) -> Iterator[str]:
    yield f"{len(found)} packages"
    for name in ("vllm", "torch", "transformers", "llguidance"):
        if name in found:
            yield f"{name} {found[name]}"


if __name__ == "__main__":
    main()
