"""How the texts of workload options are read: numbers and names, and what is said when one is wrong."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

from skipjoin.config import ConfigError


def number(field: str, text: str, *, above: float = 0.0, most: float = math.inf) -> float:
    """The finite number that `text` spells, in (above, most]. Raises `ConfigError` otherwise."""
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{field} must be a number, got {text.strip()!r}") from None
    return in_bounds(field, value, above=above, most=most)


def in_bounds(field: str, value: float | None, *, above: float = 0.0, most: float = math.inf) -> float:
    """`value`, if it is finite and in (above, most]. Raises `ConfigError` otherwise."""
    if value is None or not (above < value <= most and math.isfinite(value)):
        bound = f"a number above {above:g}" if most == math.inf else f"in ({above:g}, {most:g}]"
        raise ConfigError(f"{field} must be {bound}, got {value}")
    return value


def unknown(field: str, got: str, known: Iterable[str]) -> ConfigError:
    """What to raise for a name that is not one of `known`: it tells the nearest of them, or all."""
    known = sorted(known)
    near = difflib.get_close_matches(got, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(known)}"
    return ConfigError(f"{field}: there is no {got!r}; {hint}")
