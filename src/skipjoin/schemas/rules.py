"""Grammars of JSON schemas. Numbers that the compiler would change are written as rules of their texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

from skipjoin.schemas.keywords import TYPES, types_of
from skipjoin.schemas.notation import Notation
from skipjoin.schemas.numbers import NumberRange, is_number
from skipjoin.schemas.pointers import target_of, unescaped
from skipjoin.schemas.reasons import reason
from skipjoin.schemas.simplify import LITERALS, NUMBER, Simplified, simplify
from skipjoin.structured_output import GrammarError

# Notation of strings in which each has one spelling: control characters only have the shortest escape.
_ESCAPED = r'\\["\\bfnrt]|\\u00(0[0-7be-f]|1[0-9a-f])'
_KEY = rf'"([^"\\\x00-\x1f\x7f]|{_ESCAPED})*"'
# Keywords that combine with rules of objects and lists. Others are left to the compiler, or refused.
_OBJECT = frozenset({"properties", "required", "additionalProperties", "patternProperties"})
_ARRAY = frozenset({"items", "prefixItems", "additionalItems", "minItems", "maxItems"})
_PLACES = frozenset({"$defs", "definitions", "$schema", "$id", "$anchor", "id", "x-guidance"})


class _ImpossibleError(Exception):
    pass


class Rules(NamedTuple):
    """Part of a grammar in llguidance's variant of Lark: an expression, and lines of the rules that it names."""

    expression: str
    lines: list[str]
    impossible: list[str]


def schema_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"must be a JSON schema: {error}") from None


def json_rules(schema: Any, notation: Notation, prefix: str = "json") -> Rules:
    """Return the grammar of a schema's JSON texts, or raise `GrammarError` for what cannot be enforced."""
    simple = simplify(schema, is_lenient=notation.is_lenient)
    writer = _Writer(simple, notation, prefix)
    try:
        return Rules(writer.value(simple.schema, "#"), writer.lines, simple.impossible)
    except _ImpossibleError as error:
        raise GrammarError(reason(f"Unsatisfiable schema: {error}", simple.impossible)) from None


class _Writer:
    def __init__(self, simple: Simplified, notation: Notation, prefix: str) -> None:
        self.lines: list[str] = []
        self._root = simple.schema
        self._options = {**notation.options(), **simple.options}
        self._notation, self._prefix = notation, prefix
        self._count = 0
        self._refs: dict[str, str] = {}
        self._odd: dict[int, bool] = {}  # by identity of schemas, which live as long as the root

    @cached_property
    def _space(self) -> str:
        if self._notation.whitespace is None:
            return ""
        return self._rule(self._terminal(f"{_slashed(self._notation.whitespace)} & /(?s:.)+/") + "?")

    def value(self, node: Any, path: str) -> str:
        if node is False:
            raise _ImpossibleError(f"{path} allows no value")
        if not self._is_odd(node):
            return self._compiled(node)
        keywords = node.keys() - _PLACES
        if "$ref" in keywords:
            self._alone(node, {"$ref"}, path)
            return self._reference(node["$ref"], path)
        if "allOf" in keywords:
            self._alone(node, {"allOf"}, path)
            if len(node["allOf"]) != 1:
                raise self._refused("allOf", path)
            return self.value(node["allOf"][0], f"{path}/allOf/0")
        for union in ("anyOf", "oneOf"):
            if union in keywords:
                self._alone(node, {union}, path)
                return self._union(node[union], union, path)
        return self._typed(node, path)

    def _alone(self, node: dict[str, Any], allowed: set[str], path: str) -> None:
        if more := sorted(node.keys() - _PLACES - allowed - {"type"}):
            raise self._refused(more[0], path)

    def _refused(self, keyword: str, path: str) -> GrammarError:
        return GrammarError(
            f'cannot be enforced: the keyword "{keyword}" together with numbers of 2^53 or more, or of more than 15 '
            f"digits: write them without it (at {path})"
        )

    # -- parts that the compiler has ----------------------------------------------------------------------------------

    def _is_odd(self, node: Any) -> bool:
        """Return whether a schema, or one that it refers to, has numbers that the compiler would change."""
        if (known := self._odd.get(id(node))) is None:
            known = self._odd[id(node)] = self._has_odd(node)
        return known

    def _has_odd(self, node: Any) -> bool:
        seen: set[str] = set()
        waiting = [node]
        while waiting:
            schema = waiting.pop()
            if isinstance(schema, list):
                waiting += schema
            elif isinstance(schema, dict):
                if NUMBER in schema or LITERALS in schema:
                    return True
                waiting += [
                    value for key, value in schema.items() if key not in ("$defs", "definitions", "enum", "const")
                ]
                ref = schema.get("$ref")
                if isinstance(ref, str) and ref not in seen:
                    seen.add(ref)
                    waiting.append(target_of(self._root, ref))
        return False

    def _compiled(self, node: Any) -> str:
        node = {} if node is True else node
        shared = {} if node is self._root else self._definitions(node)
        guidance = node.get("x-guidance")
        options = {**(guidance if isinstance(guidance, dict) else {}), **self._options}
        return f"%json {_json({**node, **shared, 'x-guidance': options})}"

    def _definitions(self, node: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        waiting, seen = list(_refs_in(node)), set[str]()
        while waiting:
            ref = waiting.pop()
            if ref in seen:
                continue
            seen.add(ref)
            parts = ref.split("/")
            if parts[0] != "#" or len(parts) < 3 or parts[1] not in ("$defs", "definitions"):
                raise GrammarError(
                    f'cannot be enforced: the reference to "{ref}", together with numbers of 2^53 or more: put its '
                    "target in $defs"
                )
            target = target_of(self._root, "/".join(parts[:3]))
            if target is not None:
                found.setdefault(parts[1], {})[unescaped(parts[2])] = target
                waiting += _refs_in(target)
        return found

    # -- rules --------------------------------------------------------------------------------------------------------

    def _rule(self, body: str) -> str:
        self._count += 1
        name = f"{self._prefix}_r{self._count}"
        self.lines.append(f"{name}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        self._count += 1
        name = f"{self._prefix.upper()}_T{self._count}"
        self.lines.append(f"{name}: {body}")
        return name

    def _reference(self, ref: str, path: str) -> str:
        if (name := self._refs.get(ref)) is None:
            self._count += 1
            name = f"{self._prefix}_r{self._count}"
            self._refs[ref] = name  # which the target may refer to
            target = target_of(self._root, ref)
            if target is None:
                raise GrammarError(reason(f"Pointer '{ref.removeprefix('#')}' does not exist"))
            try:
                self.lines.append(f"{name}: {self.value(target, path)}")
            except _ImpossibleError:
                self._refs[ref] = ""
                raise
        if not name:
            raise _ImpossibleError(f"{path} allows no value")
        return name

    def _union(self, options: list[Any], union: str, path: str) -> str:
        if union == "oneOf" and not self._notation.is_lenient:
            raise self._refused("oneOf", path)
        return self._any(lambda: ((option, f"{path}/{union}/{at}") for at, option in enumerate(options)), path)

    def _any(self, options: Callable[[], Iterator[tuple[Any, str]]], path: str) -> str:
        found = []
        for option, at in options():
            try:
                found.append(self.value(option, at))
            except _ImpossibleError:
                continue
        if not found:
            raise _ImpossibleError(f"{path} allows no value")
        return self._rule(" | ".join(found))

    def _typed(self, node: dict[str, Any], path: str) -> str:
        """Return the values of a schema without combinations: some texts, or one rule for each odd type."""
        if LITERALS in node:
            return self._listed(node, path)
        types = types_of(node)
        found = []
        for kind, keywords, make in (("object", _OBJECT, self._object), ("array", _ARRAY, self._array)):
            if kind in types and any(self._is_odd(node.get(keyword)) for keyword in keywords):
                types.discard(kind)
                try:
                    found.append(make(node, path))
                except _ImpossibleError:
                    continue
        if NUMBER in node and types & {"integer", "number"}:
            types -= {"integer", "number"}
            found.append(self._number(node[NUMBER]))
        if types:
            dropped = {NUMBER, *_PLACES, *(() if "object" in types else _OBJECT), *(() if "array" in types else _ARRAY)}
            rest = {key: value for key, value in node.items() if key not in dropped}
            found.append(self._compiled({**rest, "type": [kind for kind in TYPES if kind in types]}))
        if not found:
            raise _ImpossibleError(f"{path} allows no value")
        return found[0] if len(found) == 1 else self._rule(" | ".join(found))

    def _number(self, numbers: NumberRange) -> str:
        patterns = numbers.patterns()
        assert patterns is not None
        return self._terminal(" & ".join(_slashed(f"({pattern})") for pattern in patterns))

    def _listed(self, node: dict[str, Any], path: str) -> str:
        found = []
        if node["enum"]:
            found.append(self._compiled({key: value for key, value in node.items() if key not in (LITERALS, *_PLACES)}))
        if numbers := [value for value in node[LITERALS] if is_number(value)]:
            found.append(self._terminal(" | ".join(_quoted(json.dumps(value)) for value in numbers)))
        found += [self._rule(self._literal(value)) for value in node[LITERALS] if not is_number(value)]
        return found[0] if len(found) == 1 else self._rule(" | ".join(found))

    def _literal(self, value: Any) -> str:
        if isinstance(value, dict):
            members = [self._member(key, self._literal(item)) for key, item in value.items()]
            return self._joined("{", members, "}")
        if isinstance(value, list):
            return self._joined("[", [self._literal(item) for item in value], "]")
        return _quoted(_json(value))

    def _joined(self, opening: str, parts: list[str], closing: str) -> str:
        inner = f" {self._comma()} ".join(parts)
        return " ".join(
            filter(None, [_quoted(opening), self._space, inner, self._space if parts else "", _quoted(closing)])
        )

    def _comma(self) -> str:
        return " ".join(filter(None, [self._space, _quoted(self._notation.item_separator), self._space]))

    def _member(self, name: str, value: str) -> str:
        return " ".join(filter(None, [_quoted(_json(name)), self._colon(), value]))

    def _colon(self) -> str:
        return " ".join(filter(None, [self._space, _quoted(self._notation.key_separator), self._space]))

    def _object(self, node: dict[str, Any], path: str) -> str:
        if more := {"minProperties", "maxProperties"} & node.keys():
            raise self._refused(min(more), path)
        properties, required = node.get("properties", {}), list(node.get("required", []))
        additional = node.get("additionalProperties", True)
        patterns = node.get("patternProperties") or {}
        if patterns and not (list(patterns.values()) == [True] and additional is False):
            raise self._refused("patternProperties", path)
        additional = True if patterns else additional
        parts: list[tuple[str, bool]] = []
        for name in dict.fromkeys([*properties, *required]):
            schema = properties.get(name, additional)
            try:
                value = self.value(schema, f"{path}/properties/{name}")
            except _ImpossibleError:
                if name in required:
                    raise
                continue
            parts.append((self._rule(self._member(name, value)), name in required))
        try:
            value = self.value(additional, f"{path}/additionalProperties")
        except _ImpossibleError:
            pass
        else:
            parts.append((self._others({*properties, *required}, value), False))
        return self._rule(f"{_quoted('{')} {self._space} {self._sequence(parts)} {self._space} {_quoted('}')}")

    def _others(self, names: set[str], value: str) -> str:
        excluded = " | ".join(_quoted(_json(name)) for name in sorted(names))
        key = self._terminal(_slashed(_KEY) + (f" & ~({excluded})" if names else ""))
        rule = self._rule(f"{key} {self._colon()} {value}")
        return self._rule(f"{rule} ({self._comma()} {rule})*")

    def _sequence(self, parts: list[tuple[str, bool]]) -> str:
        """Return parts in order, of which some are optional, with commas between those that are there."""
        after, first = '""', '""'  # the rest after another part, and at the beginning
        for part, is_required in reversed(parts):
            some = self._rule(f"{part} {after}")
            first = some if is_required else self._rule(f"{some} | {first}")
            after = self._rule(f"{self._comma()} {some}" + ("" if is_required else f" | {after}"))
        return first

    def _array(self, node: dict[str, Any], path: str) -> str:
        prefix, items = node.get("prefixItems", []), node.get("items", True)
        if isinstance(items, list):  # drafts before 2020-12
            prefix, items = items, node.get("additionalItems", True)
        low, high = node.get("minItems", 0), node.get("maxItems")
        parts, item = [], ""
        try:
            for number, schema in enumerate(prefix[:high]):
                parts.append(self.value(schema, f"{path}/prefixItems/{number}"))
        except _ImpossibleError:
            high = len(parts)
        if high is None or high > len(parts):
            try:
                item = self.value(items, f"{path}/items")
            except _ImpossibleError:
                high = len(parts)
        if high is not None and low > high:
            raise _ImpossibleError(f"{path} allows no list")
        return self._rule(
            f"{_quoted('[')} {self._space} {self._items(parts, item, low, high)} {self._space} {_quoted(']')}"
        )

    def _items(self, parts: list[str], item: str, low: int, high: int | None) -> str:
        comma = self._comma()
        count = len(parts)
        tail = ""
        if item:
            most = "" if high is None else str(high - count)
            if parts:
                tail = f"({comma} {item}){{{max(0, low - count)},{most}}}"
            elif high == 1:
                return item if low else f"({item})?"
            else:
                more = "" if high is None else str(high - 1)
                whole = f"{item} ({comma} {item}){{{max(0, low - 1)},{more}}}"
                return whole if low else f"({whole})?"
        for number in range(count - 1, -1, -1):
            part = f"{comma if number else ''} {parts[number]} {tail}"
            tail = self._rule(part) if number < low else f"({self._rule(part)})?"
        return tail


def _refs_in(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(ref := node.get("$ref"), str):
            yield ref
        for key, value in node.items():
            if key not in ("enum", "const", "$defs", "definitions"):
                yield from _refs_in(value)
    elif isinstance(node, list):
        for item in node:
            yield from _refs_in(item)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _slashed(pattern: str) -> str:
    found, is_escaped = [], False
    for char in pattern:
        found.append(r"\/" if char == "/" and not is_escaped else r"\n" if char == "\n" else char)
        is_escaped = char == "\\" and not is_escaped
    return f"/{''.join(found)}/"
