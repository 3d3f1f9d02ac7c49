"""Packages that are built and installed, for tests of plugins with entry points."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "1.0"

[tool.setuptools]
py-modules = [{modules}]
"""


def project(
    name: str, modules: Mapping[str, str], entry_points: Mapping[str, Mapping[str, str]] | None = None
) -> dict[str, str]:
    """Return the files of a distribution by path.

    Args:
        modules: Source by module name.
        entry_points: By group, each entry point's object reference ("module:attribute") by its name.
    """
    pyproject = _PYPROJECT.format(name=name, modules=", ".join(f'"{module}"' for module in modules))
    for group, entries in (entry_points or {}).items():
        pyproject += f'\n[project.entry-points."{group}"]\n'
        pyproject += "".join(f'{entry} = "{reference}"\n' for entry, reference in entries.items())
    return {"pyproject.toml": pyproject} | {f"{module}.py": source for module, source in modules.items()}


def install(files: Mapping[str, str], folder: Path) -> Path:
    """Install a project below `folder` without a network, and return the directory for `sys.path` or PYTHONPATH."""
    source, site = folder / "source", folder / "site"
    for path, text in files.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(text, encoding="utf-8")
    # As pip does, which starts four processes for it.
    program = "import setuptools.build_meta as backend; backend.build_wheel('..')"
    done = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as built:
        built.extractall(site)
    return site


@contextmanager
def importable(site: Path) -> Iterator[None]:
    """Put a directory of `install` on `sys.path`, and remove it and its modules afterwards."""
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(site))
        for name, module in list(sys.modules.items()):
            if (file := getattr(module, "__file__", None)) is not None and Path(file).is_relative_to(site):
                del sys.modules[name]
        importlib.invalidate_caches()
