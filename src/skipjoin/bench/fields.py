"""Parses numbers in the texts of workload options, with the errors for wrong ones."""

from __future__ import annotations

import math

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
