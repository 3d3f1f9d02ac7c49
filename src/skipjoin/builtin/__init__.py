"""The model that is part of the package, so that the server can run one without a download."""

from __future__ import annotations

from pathlib import Path

MODEL_NAME = "tally"


def builtin_model_path() -> Path:
    folder = Path(__file__).resolve().parent / MODEL_NAME
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"the built-in model is missing from {folder}; install the package again")
    return folder
