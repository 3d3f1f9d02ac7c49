"""The parts `tests` and `sanitizer`: correctness of what runs on the card."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from common import HERE, ROOT, Figures, Task

_TESTS = ROOT / "tests"
_PARALLEL = (
    ("-n", str(min(12, os.cpu_count() or 1)), "--dist", "worksteal") if importlib.util.find_spec("xdist") else ()
)
# Largest parts of the remaining time.
_SHARES = {"gpu": 0.5, "kernels": 0.7, "server": 1.0}
_MAX_FAILURES = 40
_TAIL = 4000
# Lines of pytest: one per test, also with pytest-xdist, those of its summary, files that cannot be imported, and the
# number of tests.
_OUTCOME = re.compile(r"^(?:\[gw\d+\] \[ *\d+%\] |\S+::.+? )(PASSED|FAILED|SKIPPED|ERROR)\b", re.MULTILINE)
_SUMMARY = re.compile(r"^(?:FAILED|ERROR) (.{1,300})", re.MULTILINE)
_ERROR = re.compile(r"^ERROR [^\s:]+\.py$", re.MULTILINE)
_COLLECTED = re.compile(r"\b(\d+)(?:/\d+)? tests? collected")


def measure_tests(task: Task) -> Figures:
    """Run the tests with the mark `gpu` and those of the Triton kernels, compiled; in a rehearsal only collect them."""
    figures: Figures = {}
    # Its test needs the card for itself.
    server = str(_TESTS / "server" / "test_server_gpu.py")
    runs = {
        "gpu": ["-m", "gpu", *_PARALLEL, *sorted({*_files("mark.gpu")} - {server})],
        "kernels": ["-m", "not gpu and not exhaustive", *_PARALLEL, *_files("triton", _TESTS / "model")],
        "server": ["-m", "gpu", server],
    }
    for name, arguments in runs.items():
        if not any(argument.endswith(".py") for argument in arguments):
            figures[name] = {"passed": 0, "failed": 0, "skipped": 0, "output": "no tests"}
        else:
            figures[name] = _pytest(task, arguments, max(20.0, task.left_s * _SHARES[name]))
        task.keep(figures)
    return figures


def _files(text: str, folder: Path = _TESTS) -> list[str]:
    """Return the test files that contain a text."""
    return [str(file) for file in sorted(folder.rglob("test_*.py")) if text in file.read_text(encoding="utf-8")]


def _pytest(task: Task, arguments: Sequence[str], limit_s: float) -> Figures:
    """Return the outcomes of the tests that ran."""
    command = [sys.executable, "-u", "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *arguments]
    # Warnings of other versions of torch and Triton are not failures here.
    command += ["-W", "default"]
    # A file with missing imports must not prevent the others from running.
    command += ["--continue-on-collection-errors", *(["--collect-only", "-q"] if task.is_rehearsal else [])]
    status, output = _outcome(command, limit_s)
    found = _OUTCOME.findall(output)
    counts = {word: found.count(word.upper()) for word in ("passed", "failed", "skipped")}
    counts["failed"] += found.count("ERROR") + len(_ERROR.findall(output))
    figures: Figures = {"status": status, **counts, "failures": _SUMMARY.findall(output)[:_MAX_FAILURES]}
    if task.is_rehearsal:
        figures["collected"] = sum(map(int, _COLLECTED.findall(output)))
    if figures["failed"] or status != "exit code 0":
        figures["output"] = output[-_TAIL:]
    return figures


def _outcome(command: list[str], limit_s: float) -> tuple[str, str]:
    """Run a program with a time limit and return its status and its output."""
    try:
        run = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=ROOT,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        status, output = f"stopped after {limit_s:.0f} s", str(error.stdout or b"", "utf-8", "replace")
    else:
        status, output = f"exit code {run.returncode}", run.stdout
    return status, output.replace(str(ROOT), ".").replace(sys.prefix, "python")


def measure_sanitizer(task: Task) -> Figures:
    """Run compute-sanitizer on every kind of step at small sizes; in a rehearsal run the steps alone."""
    program = [sys.executable, str(HERE / "small_steps.py"), task.device]
    tool = shutil.which("compute-sanitizer")
    if task.is_rehearsal or tool is None:
        why = "a rehearsal" if task.is_rehearsal else "there is no compute-sanitizer"
        return {"tool": None, "reason": why, "alone": _checked(program, max(30.0, task.left_s))}
    figures: Figures = {"tool": tool}
    for check in ("memcheck", "racecheck"):
        limit = max(30.0, task.left_s / (2 if check == "memcheck" else 1))
        options = ["--tool", check, "--error-exitcode", "99", "--print-limit", "20"]
        # Calls by which torch asks what CUDA supports may fail.
        options += ["--report-api-errors", "no"] if check == "memcheck" else []
        figures[check] = _checked([tool, *options, *program], limit)
        task.keep(figures)
    return figures


def _checked(command: list[str], limit_s: float) -> Figures:
    status, output = _outcome(command, limit_s)
    return {"status": status, "output": output[-_TAIL:]}
