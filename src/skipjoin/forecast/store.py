"""Storage of forecaster states, one folder per served model, forecaster, encoder and owner.

state.json                  format, identity, counts, name and hash of the arrays' file
arrays-<hash>.safetensors   the arrays

The JSON file is replaced last, so updates are atomic.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load, save

from skipjoin.forecast.mass import Array
from skipjoin.system.durable import make_private, write_durably
from skipjoin.system.folders import cache_folder, is_trusted

# Incremented when older states can no longer be read.
FORMAT = 1
STATE = "state.json"
# Environment variable that names the folder of all states.
FOLDER_VARIABLE = "SKIPJOIN_FORECAST_DIR"
# Damaged states that are kept for inspection.
_KEPT_BAD = 3
# Maximum size of an arrays file; a million entries take less.
_MAX_BYTES = 4 << 30
_ORPHAN_S = 3600.0

_log = logging.getLogger(__name__)


class StateError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Identity:
    served: str
    forecaster: str
    encoder: str
    width: int
    owner: str = ""
    base: str = ""

    def fields(self) -> dict[str, str | int]:
        named = dataclasses.asdict(self)
        return {name: value for name, value in named.items() if name not in ("owner", "base") or value}

    def folder(self, parent: Path) -> Path:
        digest = hashlib.sha256(json.dumps(self.fields(), sort_keys=True).encode()).hexdigest()[:12]
        name = re.sub(r"[^\w.-]+", "-", self.served)[-40:].strip("-.") or "model"
        return parent / f"{name}-{self.forecaster}-{digest}"


def default_folder() -> Path:
    if folder := os.environ.get(FOLDER_VARIABLE):
        return Path(folder)
    return cache_folder() / "forecasts"


def save_state(
    parent: Path, identity: Identity, arrays: dict[str, Array], counts: dict[str, int], *, quiet: bool = False
) -> bool:
    folder = identity.folder(parent)
    if not is_own(folder):
        return False
    try:
        make_private(parent)
        make_private(folder)
        write_state(folder, identity, arrays, counts=counts)
    except OSError as error:
        if not quiet:
            reason = error.strerror or error
            _log.warning("forecasts cannot be saved in %s, the state of before stays: %s", folder, reason)
        return False
    return True


def is_own(folder: Path) -> bool:
    """Return whether no other user can change the state, whose checksum is in the same folder."""
    return is_trusted(folder, "the folder of forecasts") and is_trusted(folder / STATE, "the state of forecasts")


def write_state(folder: Path, identity: Identity, arrays: dict[str, Array], **fields: Any) -> None:
    content = save(arrays)
    digest = hashlib.sha256(content).hexdigest()
    name = f"arrays-{digest[:16]}.safetensors"
    before = described_field(folder, "arrays")
    stored = {"format": FORMAT, "arrays": name, "sha256": digest, "bytes": len(content)}
    write_durably(folder / name, content)
    write_durably(folder / STATE, json.dumps(fields | stored | identity.fields(), indent=1).encode())
    for file in folder.iterdir():
        if file.name != name and (file.name == before or _is_orphan(file)):
            file.unlink(missing_ok=True)


def described_field(folder: Path, field: str) -> str | None:
    try:
        return str(read_description(folder).get(field))
    except (StateError, OSError):
        return None


def _is_orphan(file: Path) -> bool:
    return file.name != STATE and time.time() - file.stat().st_mtime > _ORPHAN_S


def load_state(parent: Path, identity: Identity, restore: Callable[[dict[str, Array]], None]) -> bool:
    """Pass the arrays of this identity to `restore`. An unusable state is moved aside."""
    folder = identity.folder(parent)
    if not is_own(folder):
        return False
    try:
        if not (folder / STATE).exists():
            return False
        restore(_read(folder, identity))
    except (StateError, OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        _log.warning("forecasts begin again: the state in %s cannot be used (%s)%s", folder, reason, _set_aside(folder))
        return False
    return True


def read_description(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / STATE).read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise StateError(f"{STATE} is not JSON") from None
    if not isinstance(found, dict):
        raise StateError(f"{STATE} has no JSON object")
    return found


def _read(folder: Path, identity: Identity) -> dict[str, Array]:
    described = read_description(folder)
    check_description(described, {"owner": None, "base": None} | identity.fields())
    return read_arrays(folder, described)


def check_description(described: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in ({"format": FORMAT} | wanted).items():
        if described.get(name) != value:
            raise StateError(f"{name} is {described.get(name)!r}, not {value!r}")


def read_arrays(folder: Path, described: dict[str, Any]) -> dict[str, Array]:
    name = str(described.get("arrays"))
    if Path(name).name != name or not (folder / name).is_file():
        raise StateError(f"{name} is missing")
    if (folder / name).stat().st_size > _MAX_BYTES:
        raise StateError(f"{name} is larger than {_MAX_BYTES >> 30} GiB")
    content = (folder / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != described.get("sha256"):
        raise StateError(f"{name} is not what was written")
    try:
        return dict(load(content))
    except SafetensorError as error:
        raise StateError(f"{name}: {error}") from None


def _set_aside(folder: Path) -> str:
    aside = folder.with_name(f"{folder.name}.bad-{time.time_ns()}")
    try:
        folder.rename(aside)
        for old in sorted(folder.parent.glob(f"{folder.name}.bad-*"))[:-_KEPT_BAD]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        return f" and cannot be set aside: {error.strerror}"
    return f"; it is now {aside.name}"
