from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

from skipjoin.schemas.keywords import is_anything, types_of

# Escapes without \u, by which every string has one spelling.
_PLAIN_ESCAPES = 'nrbtf\\"'
_EVERY_KEY = "^"
# Characters of which a pattern admits two spellings, and those that it does not exclude reliably.
_CONTROL, _QUOTED = re.compile(r"[\x00-\x1f\x7f]"), re.compile(r'["\\\\]')


def one_spelling(objects: Sequence[tuple[dict[str, Any], str]], refuse: Callable[[str, str], None]) -> dict[str, Any]:
    """Exclude other spellings of names, in place, and return compiler options; `refuse` gets paths without a way.

    The compiler takes a name with a Unicode escape for another one, which additional properties may have.
    """
    named: list[tuple[dict[str, Any], str, list[str]]] = []
    hard: list[tuple[dict[str, Any], str, list[str]]] = []
    for node, path in objects:
        additional, patterns = node.get("additionalProperties", True), node.get("patternProperties")
        names = [name for key in ("properties", "required") for name in _names(node.get(key))]
        if additional is False or "object" not in types_of(node) or not (names or patterns):
            continue
        is_plain = is_anything(additional) and not patterns and not any(map(_CONTROL.search, names))
        (named if is_plain else hard).append((node, path, names))
    if hard and _has_exact_keys():
        return {"json_allowed_escapes": _PLAIN_ESCAPES}
    for node, _, _ in named:
        # The compiler takes names out of patterns, and spells what matches a pattern in one way.
        node["patternProperties"], node["additionalProperties"] = {_EVERY_KEY: True}, False
    for node, path, names in hard:
        additional = node.get("additionalProperties", True)
        if not node.get("patternProperties") and not any(map(_QUOTED.search, names)):
            node["patternProperties"] = {_none_of(names): additional}
        elif not is_anything(additional):
            refuse(path, "these additional properties need llguidance 1.8: use additionalProperties: false")
        node["additionalProperties"] = False
    return {}


@cache
def _has_exact_keys() -> bool:
    major, minor = version("llguidance").split(".")[:2]
    return (int(major), int(minor)) >= (1, 8)


def _names(given: Any) -> list[str]:
    return [name for name in given if isinstance(name, str)] if isinstance(given, list | dict) else []


def _none_of(names: list[str]) -> str:
    tree: dict[str, Any] = {}
    for name in names:
        at = tree
        for char in name:
            at = at.setdefault(char, {})
        at[""] = {}
    return f"^{_others(tree)}$"


def _others(tree: dict[str, Any]) -> str:
    chars = [char for char in tree if char]
    options = [f"[^{''.join(map(_in_class, chars))}](?s:.)*" if chars else "(?s:.)+"]
    options += [_in_class(char) + _others(tree[char]) for char in chars]
    return f"(?:{'|'.join(options)}){'' if '' in tree else '?'}"


def _in_class(char: str) -> str:
    return rf"\x{{{ord(char):x}}}" if not char.isalnum() or not char.isascii() else char
