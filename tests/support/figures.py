"""Helpers for tests of the figures under `benchmarks/papers`."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.scripts import load

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run_figure(evaluation: str, figure: str, out: Path, *options: str) -> dict[str, Any]:
    """Run a figure's program in this process, which saves its imports, and return its result."""
    path = BENCHMARKS / "papers" / evaluation / figure / "run.py"
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(sys, "argv", [str(path), "--out", str(out), *options])
        runpy.run_path(str(path), run_name="__main__")
    signal.signal(signal.SIGTERM, handler)
    return json.loads((out / "result.json").read_text(encoding="utf-8"))


def figure_module(evaluation: str, figure: str) -> ModuleType:
    return load(f"benchmarks/papers/{evaluation}/{figure}/run.py")


def assert_documented(evaluation: str, figures: Sequence[str]) -> None:
    overview = (BENCHMARKS / "papers" / evaluation / "README.md").read_text(encoding="utf-8")
    for name in figures:
        assert f"`{name}`" in overview
        readme = (BENCHMARKS / "papers" / evaluation / name / "README.md").read_text(encoding="utf-8")
        assert f"benchmarks/papers/{evaluation}/{name}/run.py" in readme


def assert_tables_are_current(evaluation: str, figure: str, result: dict[str, Any], scratch: Path) -> None:
    """Fail if a table between the marks of a figure's README differs from that of its result."""
    from papers.figures.report import fill_readme  # noqa: PLC0415 (the caller adds benchmarks to the path)

    readme = (BENCHMARKS / "papers" / evaluation / figure / "README.md").read_text(encoding="utf-8")
    copy = scratch / "README.md"
    copy.write_text(readme, encoding="utf-8")
    fill_readme(copy, result)
    assert copy.read_text(encoding="utf-8") == readme
