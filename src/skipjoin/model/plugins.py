from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

_loaded: set[EntryPoint] = set()


class PluginError(Exception):
    pass


def load_plugins(group: str, is_registered: Callable[[object], bool], must_name: str) -> None:
    for point in entry_points(group=group):
        if point in _loaded:
            continue
        source = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown distribution"
        what = f"entry point {point.name} = {point.value} in group {group} of {source}"
        try:
            loaded = point.load()
        except Exception as error:
            raise PluginError(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error
        if not is_registered(loaded):
            raise PluginError(f"{what} must name {must_name}")
        _loaded.add(point)
