from __future__ import annotations

from typing import Any

from skipjoin.schemas.keywords import types_of
from skipjoin.schemas.numbers import is_number
from skipjoin.schemas.pointers import target_of

# Bounds of the search: nested schemas, references included, and rounds. Beyond them a schema is left to the compiler.
_MAX_DEPTH = 100
_MAX_ROUNDS = 16


def endless_reference(schema: Any) -> str | None:
    """Return a reference that each value of `schema` needs again and again, or None if some value ends."""
    search = _Search(schema)
    # Each round may find targets whose values contain those of the round before.
    for _ in range(_MAX_ROUNDS):
        known = len(search.ending)
        if search.round_ends():
            return None
        if len(search.ending) == known:
            return search.endless or None
    return None


class _Search:
    """One round over all references: some value ends of those in `ending`; `endless` is the first other one."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.ending: set[str] = set()
        self._visited: set[str] = set()
        self._depth = 0
        self.endless = ""

    def round_ends(self) -> bool:
        """Return whether some value of the root is known to end."""
        self.endless = ""
        self._visited.clear()
        return self._ends(self._root)

    def _ends(self, node: Any) -> bool:
        if not isinstance(node, dict) or self._depth == _MAX_DEPTH:
            return True  # false allows nothing, and has its own error
        self._depth += 1
        try:
            return self._has_end(node)
        finally:
            self._depth -= 1

    def _has_end(self, node: dict[str, Any]) -> bool:
        if "$ref" in node and not self._refers_to_end(node["$ref"]):
            return False
        if not all(self._ends(part) for part in _list(node, "allOf")):
            return False
        for union in ("anyOf", "oneOf"):
            if (options := _list(node, union)) and not any(self._ends(option) for option in options):
                return False
        if "enum" in node or "const" in node:
            return True
        types = types_of(node)
        if types - {"object", "array"}:
            return True
        return ("object" in types and self._object_ends(node)) or ("array" in types and self._array_ends(node))

    def _refers_to_end(self, ref: Any) -> bool:
        if not isinstance(ref, str) or ref in self.ending:
            return True
        if ref not in self._visited:  # at most once in a round, so that its time is linear
            self._visited.add(ref)
            if self._ends(target_of(self._root, ref)):
                self.ending.add(ref)
                return True
        self.endless = self.endless or ref
        return False

    def _object_ends(self, node: dict[str, Any]) -> bool:
        properties = node.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        # Whether a pattern matches a name is the compiler's to find.
        others = None if node.get("patternProperties") else node.get("additionalProperties")
        return all(self._ends(properties.get(name, others)) for name in _list(node, "required"))

    def _array_ends(self, node: dict[str, Any]) -> bool:
        low = node.get("minItems", 0)
        low = low if is_number(low) else 0
        given = node.get("items")
        # Drafts before 2020-12 have the first items there.
        first: list[Any] = given if isinstance(given, list) else _list(node, "prefixItems")
        items = node.get("additionalItems") if first is given else given
        needed = [*first[: int(low)], *([items] if low > len(first) else [])]
        return all(self._ends(item) for item in needed)


def _list(node: dict[str, Any], name: str) -> list[Any]:
    found = node.get(name)
    return found if isinstance(found, list) else []
