"""API key files: one key per line, with sections like `[priority-range=0:5]` for the keys below."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from skipjoin.options import ConfigError

PRIORITY_TIERS = ("none", "all")
OPERATOR = ("no", "yes")
_SETTINGS = {"priority-range", "priority-tier", "operator", "weight"}
_SECTION = (
    "a line that begins with [ must be like [priority-range=-2:5 priority-tier=all operator=yes weight=3], with each "
    "of the four once at most"
)
MAX_WEIGHT = 1000


class KeyRights(NamedTuple):
    """Rights of requests with a key. None means the server's default.

    `weight` is its share relative to other keys, with `--fair-by`.
    """

    priorities: tuple[int, int] | None = None
    tier: bool | None = None
    is_operator: bool = False
    weight: float = 1.0


# Priorities that everyone may have where the operator sets no range: those that run later than others.
ANY_LATER = (0, (1 << 63) - 1)
# Rights of a key outside of any section.
AS_ALL = KeyRights()


class _Line(NamedTuple):
    where: str
    text: str


def owner_of_key(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def read_keys(field: str, file: str | None) -> dict[str, KeyRights]:
    """Return the keys in a file with their rights. Errors show no key."""
    found: dict[str, KeyRights] = {}
    rights, section = AS_ALL, None
    for line in () if file is None else _lines(field, file):
        if line.text.startswith("["):
            _check_has_keys(section)
            rights, section = _rights(line), line
            continue
        check_key(f"{line.where}:", line.text)
        if found.setdefault(line.text, rights) != rights:
            raise ConfigError(f"{line.where}: this key is also further up, in another section")
        section = None
    _check_has_keys(section)
    if file is not None and not found:
        raise ConfigError(f"{field} {file} must have a key, one per line, and has none")
    return found


def check_key(field: str, key: str) -> None:
    """Raise `ConfigError`, without showing the key, if it cannot be sent in a header."""
    if not key:
        raise ConfigError(f"{field} must not be empty")
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError(f"{field} must be printable ASCII characters without blanks at the ends")


def priority_bounds(field: str, text: str) -> tuple[int, int]:
    try:
        low, high = map(int, text.split(":"))
    except ValueError:
        raise ConfigError(f"{field} must be two integers, LOW:HIGH, got {text!r}") from None
    if not -(1 << 63) <= low <= high < 1 << 63:
        raise ConfigError(f"{field} must be LOW:HIGH of 64 bits, LOW at most HIGH, got {text!r}")
    return low, high


def _lines(field: str, file: str) -> Iterator[_Line]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{field} {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{field} {file} is not UTF-8 text") from error
    for number, line in enumerate(lines, 1):
        if (text := line.strip()) and not text.startswith("#"):
            yield _Line(f"{field} {file}, line {number}", text)


def _rights(line: _Line) -> KeyRights:
    """Return the rights that a section gives. Errors do not show the line, which may be a key."""
    given = _given(line)
    priorities, tier, operator = map(given.get, ("priority-range", "priority-tier", "operator"))
    for name, value, choices in (("priority-tier", tier, PRIORITY_TIERS), ("operator", operator, OPERATOR)):
        if value not in (None, *choices):
            raise ConfigError(f"{line.where}: {name} must be one of {', '.join(choices)}, got {value!r}")
    return KeyRights(
        None if priorities is None else priority_bounds(f"{line.where}: priority-range", priorities),
        None if tier is None else tier == "all",
        operator == "yes",
        1.0 if (weight := given.get("weight")) is None else _weight(line.where, weight),
    )


def _weight(where: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight <= MAX_WEIGHT:
        raise ConfigError(f"{where}: weight must be a number in (0, {MAX_WEIGHT}], got {text!r}")
    return weight


def _given(line: _Line) -> Mapping[str, str]:
    pairs = [part.partition("=")[::2] for part in line.text[1:-1].split()]
    given = dict(pairs)
    if not line.text.endswith("]") or len(given) < len(pairs) or not given.keys() <= _SETTINGS:
        raise ConfigError(f"{line.where}: {_SECTION}")
    return given


def _check_has_keys(section: _Line | None) -> None:
    if section is not None:
        raise ConfigError(f"{section.where}: no key follows, of which this could be said")
