from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from skipjoin.options import ConfigError, nearest

PREFIX = "SKIPJOIN_"
# Variables that are not options of a command.
_OTHERS = ("KERNEL_CACHE", "PROFILE_CACHE", "FORECAST_API_KEY", "TRACES")
# How YAML writes no value. As texts these would be names of files, or API keys.
_NULLS = ("~", "null", "Null", "NULL")
# Value in a file: one text or several.
Texts = str | list[str]


def variable(flag: str) -> str:
    return PREFIX + flag.lstrip("-").replace("-", "_").upper()


def unknown_variables(known: Iterable[str], environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    names = [*known, *(PREFIX + name for name in _OTHERS)]
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in names:
            hint = nearest(name[len(PREFIX) :], [name[len(PREFIX) :].lower() for name in names])
            yield f"{name} is no setting{hint}"


def read_settings(path: Path, known: Mapping[str, str], several: Collection[str] = ()) -> dict[str, Texts]:
    """Return a file's settings as texts, by parameter name; `several` may have lists. Errors name the line."""
    try:
        # BaseLoader does not guess types: otherwise `profile: off` would be false.
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"config {path}: its values are nested too deeply") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config {path}: not YAML: {' '.join(str(error).split())}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"config {path} must be a mapping, such as port: 8000")
    found: dict[str, Texts] = {}
    for key, value in root.value:
        where = f"config {path}, line {key.start_mark.line + 1}"
        name = _name(where, key, known)
        if name in found:
            raise ConfigError(f"{where}: {key.value} is given twice")
        where = f"{where}: {key.value}"
        found[name] = _texts(where, value) if name in several else _text(where, value)
    return found


def _name(where: str, key: yaml.Node, known: Mapping[str, str]) -> str:
    flag = key.value.strip().replace("_", "-") if isinstance(key, yaml.ScalarNode) else ""
    if flag not in known:
        raise ConfigError(f"{where}: there is no setting {flag!r}{nearest(flag, known)}")
    return known[flag]


def _texts(where: str, value: Any) -> list[str]:
    if isinstance(value, yaml.SequenceNode):
        return [_text(where, item) for item in value.value]
    if isinstance(value, yaml.MappingNode):
        return [f"{_text(where, name)}={_text(where, item)}" for name, item in value.value]
    return [_text(where, value)]


def _text(where: str, node: Any) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigError(f"{where} must have one value, not several")
    if not node.value or (node.style is None and node.value in _NULLS):
        raise ConfigError(f"{where} must have a value; without the line it has its default")
    return str(node.value)
