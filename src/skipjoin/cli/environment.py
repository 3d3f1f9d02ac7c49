from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from skipjoin.cli.settings_file import PREFIX
from skipjoin.extras import MODULES, why_missing
from skipjoin.system.container import usable_cpus
from skipjoin.system.folders import cache_folder
from skipjoin.system.machine import cpu_name
from skipjoin.version import VERSION

_PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "fastapi", "uvicorn", "pyzmq", "triton", "ray")


def environment() -> None:
    """Print what a bug report needs: versions, processor, devices, extras and the names of set variables."""
    for name, value in _facts():
        print(f"{name:22} {value}")


def _facts() -> Iterator[tuple[str, str]]:
    yield "skipjoin", VERSION
    yield "python", f"{platform.python_version()} ({sys.platform}, {platform.machine()})"
    yield "system", f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}"
    yield "processor", f"{cpu_name()}, {usable_cpus()} usable CPUs"
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
    yield "extras", ", ".join(extra for extra in MODULES if why_missing("", extra) is None) or "none"
    if why_missing("", "serve") is None:
        yield from _devices()
    yield "cache folder", str(cache_folder())
    # Values may be secrets.
    yield "variables", ", ".join(sorted(name for name in os.environ if name.startswith(PREFIX))) or "none"


def _devices() -> Iterator[tuple[str, str]]:
    import torch  # noqa: PLC0415

    from skipjoin.model.cuda import cuda_facts  # noqa: PLC0415
    from skipjoin.model.ops.build import load_library, path_of, shipped  # noqa: PLC0415

    library = load_library()
    source = "of the wheel" if shipped() else "compiled on this machine"
    yield "CPU operations", "torch's" if library is None else f"{path_of(library)}, {source}"
    facts = cuda_facts()
    cards = ", ".join(f"{card.name} ({'.'.join(map(str, card.capability))})" for card in facts.cards)
    yield "CUDA", f"{torch.version.cuda or 'none'}, driver {facts.driver or 'none'}, {cards or 'no GPUs'}"
