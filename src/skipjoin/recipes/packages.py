from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from skipjoin.options import ConfigError

GROUP = "skipjoin.recipes"


def installed() -> Mapping[str, Sequence[EntryPoint]]:
    return _installed(tuple(sys.path))


@lru_cache(maxsize=1)
def _installed(path: tuple[str, ...]) -> Mapping[str, Sequence[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


def load(name: str, is_builtin: bool) -> Any:
    points = installed()[name]
    if is_builtin:
        raise ConfigError(
            f"recipe {name!r} is built in, but {described(name)} has the same name: rename it there, or uninstall that"
        )
    if len(points) > 1:
        raise ConfigError(f"recipe {name!r} is not unique: {described(name)}; uninstall all of them except one")
    try:
        return points[0].load()
    except Exception as error:
        raise ConfigError(
            f"recipe {name!r}: {described(name)} fails to load: {type(error).__name__}: {error}; update or uninstall it"
        ) from error


def described(name: str) -> str:
    return " and ".join(
        f"entry point {point.name} = {point.value} of distribution {point.dist.name} {point.dist.version}"
        for point in installed()[name]
        if point.dist is not None
    )
