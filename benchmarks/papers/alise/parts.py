"""Training and evaluation parts of the traces with texts, which are not in the repository."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import harness
from skipjoin.cli.predict import is_training_row, objects_of

# A trained forecaster is called this, with its encoder.
ENCODERS = ("hashed", "minilm")


def folder() -> Path:
    if "SKIPJOIN_TRACES" not in os.environ:
        sys.exit("SKIPJOIN_TRACES must name the folder of the traces with texts, which are not in the repository")
    return Path(os.environ["SKIPJOIN_TRACES"])


def write_parts(name: str, into: Path, rows: int | None = None) -> tuple[Path, Path]:
    """Write the training and the evaluation part of a trace, split as `skipjoin predict evaluate` splits it."""
    found = list(objects_of(folder() / f"{name}.jsonl.gz"))[:rows]
    parts: tuple[list[str], list[str]] = ([], [])
    for place, one in enumerate(found):
        parts[not is_training_row(one, place, len(found))].append(json.dumps(one) + "\n")
    files = into / f"{name}-training.jsonl", into / f"{name}.jsonl"
    for file, lines in zip(files, parts, strict=True):
        file.write_text("".join(lines), encoding="utf-8")
    return files


def train(trace: Path, encoder: str, out: Path) -> dict[str, object]:
    """Train ALISE's forecaster on a trace, and return what training found."""
    harness.run_skipjoin("predict", "train", "--trace", trace, "--encoder", encoder, "--out", out)
    found: dict[str, object] = json.loads((out / "state.json").read_text(encoding="utf-8"))["trained"]
    return found
