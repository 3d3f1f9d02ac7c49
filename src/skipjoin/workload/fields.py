from __future__ import annotations

import math
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

from skipjoin.config import ConfigError, unknown

Choice = TypeVar("Choice", bound=StrEnum)

# Maximum number of requests of a run, which take some gigabytes of memory.
MAX_REQUESTS = 5_000_000


def number(field: str, text: str, *, above: float = 0.0, most: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{field} must be a number, got {text.strip()!r}") from None
    return in_bounds(field, value, above=above, most=most)


def in_bounds(field: str, value: float | None, *, above: float = 0.0, most: float = math.inf) -> float:
    if value is None or not (above < value <= most and math.isfinite(value)):
        bound = f"a number above {above:g}" if most == math.inf else f"in ({above:g}, {most:g}]"
        raise ConfigError(f"{field} must be {bound}, got {value}")
    return value


def check_requests(rate_rps: float, duration_s: float | None, limit: int | None, *, calls: int = 1) -> None:
    """Raise `ConfigError` if a run would draw more than `MAX_REQUESTS`, of which each arrival makes `calls`."""
    if limit is not None and limit * calls > MAX_REQUESTS:
        raise ConfigError(f"requests must be at most {MAX_REQUESTS // calls}, got {limit}: choose fewer")
    expected = 0.0 if duration_s is None else rate_rps * duration_s * calls
    if expected > MAX_REQUESTS:
        raise ConfigError(
            f"rates: {rate_rps:g} per second for {duration_s:g} s (--duration) are {expected:.3g} requests, and a run "
            f"has at most {MAX_REQUESTS}: choose a lower rate or a shorter duration"
        )


class FieldTexts(dict[str, str]):
    """Texts by field name, parsed from text such as `name=batch,lengths=uniform:512-1024,32-128,share=0.5`."""

    def __init__(self, what: str, text: str, *, known: Sequence[str], needed: Sequence[str]) -> None:
        super().__init__()
        self._what = what
        for part in re.split(r",(?=\s*\w+\s*=)", text):
            self._add(part, known)
        for name in needed:
            if not self.get(name):
                raise ConfigError(f"{what} needs {name}=, got {text!r}")

    def _add(self, part: str, known: Sequence[str]) -> None:
        name, equals, value = (item.strip() for item in part.partition("="))
        if not equals:
            raise ConfigError(f"{self._what} must consist of KEY=VALUE fields, got {part!r}")
        if name not in known:
            raise unknown(self._what, name, known)
        if name in self:
            raise ConfigError(f"{self._what}: {name} is given twice")
        self[name] = value

    def number(self, name: str, *, most: float = math.inf) -> float:
        return number(f"{self._what}: {name}", self[name], most=most)

    def integer(self, name: str, usual: int) -> int:
        try:
            return int(self.get(name, usual))
        except ValueError:
            raise ConfigError(f"{self._what}: {name} must be an integer, got {self[name]!r}") from None

    def choice(self, name: str, usual: Choice) -> Choice:
        text = self.get(name, usual.value)
        kinds = {item.value: item for item in type(usual)}
        if text not in kinds:
            raise unknown(f"{self._what}: {name}", text, kinds)
        return kinds[text]
