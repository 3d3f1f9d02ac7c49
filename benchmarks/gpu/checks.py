"""The parts `tests` and `sanitizer`: whether what runs on the card is right."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from common import HERE, ROOT, Figures, Task

_TESTS = ROOT / "tests"
_NAMED = 40  # most failures that are kept
_TAIL = 1500


def measure_tests(task: Task) -> Figures:
    """The tests with the mark `gpu`, and those of the Triton kernels, compiled and not interpreted. In a rehearsal they
    are only collected."""
    figures: Figures = {}
    runs = {
        "gpu": ["-m", "gpu", *_files("mark.gpu")],
        "kernels": ["-m", "not gpu", *_files("triton", _TESTS / "model")],
    }
    for name, arguments in runs.items():
        if not any(argument.endswith(".py") for argument in arguments):
            figures[name] = {"passed": 0, "failed": 0, "skipped": 0, "output": "there are none"}
        else:
            figures[name] = _pytest(task, arguments, max(20.0, task.left_s / (2 if name == "gpu" else 1)))
        task.keep(figures)
    return figures


def _files(text: str, folder: Path = _TESTS) -> list[str]:
    """The files of tests that have this text."""
    return [str(file) for file in sorted(folder.rglob("test_*.py")) if text in file.read_text(encoding="utf-8")]


def _pytest(task: Task, arguments: Sequence[str], limit_s: float) -> Figures:
    report = task.into.with_name("junit.xml")
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", str(report), *arguments]
    # A file whose imports are missing here must not keep the others from running.
    command += ["--continue-on-collection-errors"]
    command += ["--collect-only"] if task.is_rehearsal else []
    try:
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=limit_s, check=False)
        output, status = run.stdout + run.stderr, f"exit code {run.returncode}"
    except subprocess.TimeoutExpired as error:
        output, status = str(error.stdout or b"", "utf-8", "replace"), f"stopped after {limit_s:.0f} s"
    figures: Figures = {"status": status, "passed": 0, "failed": 0, "skipped": 0, "failures": []}
    if report.is_file():
        figures |= _counts(report)
    if figures["failed"] or not status.endswith("code 0"):
        figures["output"] = output[-_TAIL:]
    return figures


def _counts(report: Path) -> Figures:
    figures: Figures = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    for case in ET.parse(report).iter("testcase"):
        wrong = [child for child in case if child.tag in ("failure", "error")]
        if wrong:
            figures["failed"] += 1
            message = (wrong[0].get("message") or "")[:200]
            figures["failures"].append(f"{case.get('classname')}::{case.get('name')}: {message}")
        else:
            figures["skipped" if case.find("skipped") is not None else "passed"] += 1
    figures["failures"] = figures["failures"][:_NAMED]
    return figures


def measure_sanitizer(task: Task) -> Figures:
    """compute-sanitizer on a script that runs every kind of step at small sizes; in a rehearsal the script alone."""
    program = [sys.executable, str(HERE / "small_steps.py"), task.device]
    tool = shutil.which("compute-sanitizer")
    if task.is_rehearsal or tool is None:
        why = "a rehearsal" if task.is_rehearsal else "there is no compute-sanitizer"
        return {"tool": None, "reason": why, "alone": _checked(program, max(30.0, task.left_s))}
    figures: Figures = {"tool": tool}
    for check in ("memcheck", "racecheck"):
        limit = max(30.0, task.left_s / (2 if check == "memcheck" else 1))
        options = ["--tool", check, "--error-exitcode", "99", "--print-limit", "20"]
        figures[check] = _checked([tool, *options, *program], limit)
        task.keep(figures)
    return figures


def _checked(command: list[str], limit_s: float) -> Figures:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        return {
            "status": f"stopped after {limit_s:.0f} s",
            "output": str(error.stdout or b"", "utf-8", "replace")[-_TAIL:],
        }
    return {"status": f"exit code {run.returncode}", "output": (run.stdout + run.stderr)[-_TAIL:]}
