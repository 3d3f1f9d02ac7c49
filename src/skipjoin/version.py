from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

_NAME = "skipjoin"


def _installed() -> str:
    try:
        return importlib.metadata.version(_NAME)
    except importlib.metadata.PackageNotFoundError:
        return "0+source"  # run from a source tree, where nothing says so


VERSION = _installed()


def needs(feature: str, packages: str, *extras: str) -> str:
    called = f"extra{'s' if len(extras) > 1 else ''} {' and '.join(extras)}"
    return f"{feature} needs {packages} ({called}): {install_command(*extras)}"


def install_command(*extras: str, source: Path = Path(__file__).parents[2]) -> str:
    """Return a command that adds extras to this installation, from any folder.

    It names what Skipjoin was installed from, because no package index has it, or the packages themselves.
    """
    if (source / "pyproject.toml").is_file():
        return f"pip install -c '{source}/constraints.txt' -e '{source}[{','.join(extras)}]'"
    origin = _origin()
    if origin is None or not origin.exists():
        return " ".join(["pip install", *(f"'{requirement}'" for requirement in _requirements(extras))])
    constraints = f"-c '{origin}/constraints.txt' " if origin.is_dir() else ""
    return f"pip install {constraints}'{origin}[{','.join(extras)}]'"


def _origin() -> Path | None:
    """Return the checkout or wheel that pip installed, which it records in direct_url.json (PEP 610)."""
    try:
        record = importlib.metadata.distribution(_NAME).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    url = urlsplit(json.loads(record)["url"]) if record else None
    return Path(unquote(url.path)) if url is not None and url.scheme == "file" else None


def _requirements(extras: tuple[str, ...]) -> dict[str, None]:
    found: dict[str, None] = {}
    for line in importlib.metadata.requires(_NAME) or ():
        requirement, _, marker = map(str.strip, line.partition(";"))
        if any(f'extra == "{extra}"' in marker.replace("'", '"') for extra in extras):
            nested = tuple(_nested(requirement))
            found |= _requirements(nested) if nested else {requirement: None}
    return found


def _nested(requirement: str) -> Iterator[str]:
    if requirement.startswith(f"{_NAME}["):
        yield from requirement.removeprefix(f"{_NAME}[").rstrip("]").split(",")
