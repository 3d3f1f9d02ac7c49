from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

# References to follow from one alternative.
_MAX_REFERENCES = 8
# Alternatives that are compared in pairs.
_MAX_ALTERNATIVES = 200
_ALL = frozenset({"null", "boolean", "number", "string", "array", "object"})

Resolve = Callable[[str], Any]


def are_disjoint(options: Sequence[Any], resolve: Resolve) -> bool:
    """Return whether types, constants and required properties show that a `oneOf` means the same as `anyOf`."""
    if len(options) > _MAX_ALTERNATIVES:
        return False
    found = [_resolved(option, resolve) for option in options]
    return all(_exclude(item, other, resolve) for item, other in combinations(found, 2))


def _resolved(node: Any, resolve: Resolve) -> Any:
    for _ in range(_MAX_REFERENCES):
        if not (isinstance(node, dict) and isinstance(node.get("$ref"), str)):
            break
        node = resolve(node["$ref"])
    return node if isinstance(node, dict) else {}


def _exclude(one: dict[str, Any], other: dict[str, Any], resolve: Resolve) -> bool:
    shared = _types(one) & _types(other)
    if not shared:
        return True
    first, second = _constants(one), _constants(other)
    if first is not None and second is not None:
        return not first & second
    return shared == {"object"} and any(
        (own := _constants(_property(one, name, resolve))) is not None
        and (others := _constants(_property(other, name, resolve))) is not None
        and not own & others
        for name in _required(one) & _required(other)
    )


def _types(node: dict[str, Any]) -> set[str]:
    given = node.get("type", _ALL)
    types = {given} if isinstance(given, str) else {item for item in given if isinstance(item, str)}
    types = {"number" if type_ == "integer" else type_ for type_ in types}
    if (constants := _constants(node)) is not None and "type" not in node:
        types = {_type_of(json.loads(text)) for text in constants}
    return types


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = ((str, "string"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "number")


def _constants(node: dict[str, Any]) -> set[str] | None:
    values = node.get("enum", [node["const"]] if "const" in node else None)
    return {json.dumps(_whole(value), sort_keys=True) for value in values} if isinstance(values, list) else None


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _required(node: dict[str, Any]) -> set[str]:
    found = node.get("required")
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def _property(node: dict[str, Any], name: str, resolve: Resolve) -> dict[str, Any]:
    properties = node.get("properties")
    return _resolved(properties.get(name), resolve) if isinstance(properties, dict) else {}
