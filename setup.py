"""Wheels with compiled CPU operations; pyproject.toml has everything else.

    python -m build --wheel --no-isolation -C--build-option=--plat-name=manylinux_2_28_x86_64

A platform of the form manylinux_X_Y_MACHINE adds the libraries of `skipjoin.model.ops.variants` for glibc X.Y and that
machine, which `ziglang` compiles on any other. Without a platform the wheel is pure, and a machine that runs it
compiles the sources at its first start.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

OPS = Path(__file__).parent / "src/skipjoin/model/ops"
# Only the entry points are exported: the C++ library inside must not meet that of torch.
EXPORTS = "{ global: skipjoin_*; local: *; };"


def load_variants() -> ModuleType:
    """Load the table of variants. Importing its package would need the dependencies."""
    spec = importlib.util.spec_from_file_location("variants", OPS / "variants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["variants"] = module
    spec.loader.exec_module(module)
    return module


def compile_variants(platform: str, folder: Path) -> None:
    """Compile all variants for a platform into a folder."""
    found = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", platform)
    variants = load_variants()
    if found is None or found[3] not in variants.VARIANTS:
        known = " or ".join(variants.VARIANTS)
        raise SystemExit(f"plat-name must be manylinux_X_Y_MACHINE with the machine {known}, got {platform}")
    if importlib.util.find_spec("ziglang") is None:
        raise SystemExit("a wheel for a platform needs ziglang: install it, and build with --no-isolation")
    target = f"{found[3]}-linux-gnu.{found[1]}.{found[2]}"
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", target]
    with tempfile.TemporaryDirectory() as scratch:
        exports = Path(scratch, "exports.map")
        exports.write_text(EXPORTS)
        for variant in variants.VARIANTS[found[3]]:
            print(f"compiling {variant.path} for {target}", flush=True)
            objects = [str(Path(scratch, f"{variant.path}-{source}.o")) for source in variants.SOURCES]
            for source, made in zip(variants.SOURCES, objects, strict=True):
                flags = [flag for flag in variants.FLAGS if flag != "-shared"] + [f"-mcpu={variant.cpu}"]
                # Compilers prefer narrower vectors on processors with AVX-512; the sources choose the width themselves.
                flags += ["-mprefer-vector-width=512"] if found[3] == "x86_64" else []
                subprocess.run([*compiler, *flags, "-c", source, "-o", made], check=True, cwd=OPS)
            # The processor is not named here, so that the C++ library runs on all and is compiled once.
            link = ["-shared", "-s", f"-Wl,--version-script={exports}", *objects]
            subprocess.run([*compiler, *link, "-o", str((folder / variant.file).resolve())], check=True)


class BuildPy(build_py):
    """Copies the package, and compiles the operations for `platform` unless it is None."""

    platform: str | None = None

    def run(self) -> None:
        """Leave no libraries of an earlier build in the folder."""
        folder = Path(self.build_lib) / "skipjoin/model/ops"
        for stale in folder.glob("*.so"):
            stale.unlink()
        super().run()
        if self.platform is not None:
            compile_variants(self.platform, folder)


class Wheel(bdist_wheel):
    """Pure wheel, or one with libraries if --plat-name is given. Either runs on any Python."""

    def finalize_options(self) -> None:
        """Install a wheel with libraries where compiled packages belong."""
        if self.plat_name is not None:
            self.distribution.has_ext_modules = lambda: True
        super().finalize_options()

    def run(self) -> None:
        """Pass the platform to the build of the package."""
        if self.plat_name_supplied:
            self.distribution.get_command_obj("build_py").platform = self.plat_name
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """Libraries are loaded by ctypes, so they depend on no version of Python."""
        return "py3", "none", self.plat_name if self.plat_name_supplied else "any"


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel})
