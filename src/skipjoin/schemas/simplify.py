from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from skipjoin.schemas.disjoint import are_disjoint
from skipjoin.schemas.endless import endless_reference
from skipjoin.schemas.formats import COMPILED_FORMATS, IGNORED_FORMATS, PATTERN_FORMATS
from skipjoin.schemas.keys import one_spelling
from skipjoin.schemas.keywords import ANNOTATIONS, REFUSED, TYPES, is_anything, types_of
from skipjoin.schemas.look_ahead import check_escapes, without_look_ahead
from skipjoin.schemas.numbers import NumberRange, exact, is_inexact, is_number
from skipjoin.schemas.pointers import Names, quoted, target_of, unescaped
from skipjoin.structured_output import GrammarError

# Keys of values that the compiler cannot have. A simplified schema with one of them is written as rules.
NUMBER, LITERALS = "x-skipjoin-number", "x-skipjoin-literals"
# Deepest schema. The compiler's own limit is near.
_MAX_DEPTH = 128
# Keywords whose values are schemas, lists of schemas, and objects of schemas.
_ONE = frozenset({"additionalProperties", "additionalItems", "items"})
_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems", "items"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_COMBINATIONS = frozenset({"$ref", "anyOf", "allOf", "oneOf"})
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Lengths and counts. The compiler has no larger ones, and no output is as long.
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MAX_COUNT = 2**31 - 1
# References to follow from one schema.
_MAX_REFERENCES = 8


class Simplified(NamedTuple):
    """Schema that means the same in the compiler's keywords, `NUMBER` and `LITERALS`, and why parts allow nothing."""

    schema: Any
    options: dict[str, Any]
    impossible: list[str]


def simplify(schema: Any, *, is_lenient: bool = False) -> Simplified:
    """Rewrite a schema so that the compiler of grammars enforces exactly what it says.

    Keywords that cannot be enforced raise `GrammarError`, or are ignored with `is_lenient`.
    """
    return _Simplifier(is_lenient=is_lenient).run(schema)


class _Simplifier:
    def __init__(self, *, is_lenient: bool) -> None:
        self._is_lenient = is_lenient
        self._impossible: list[str] = []
        self._objects: list[tuple[dict[str, Any], str]] = []
        self._seen: set[str] = set()
        self._refs: list[str] = []
        self._given: Any = None
        self._names = Names(True, _inner)

    def run(self, given: Any) -> Simplified:
        self._given, self._names = given, Names(given, _inner)
        schema = self._schema(given, "#", 0)
        while self._refs:
            self._referred(schema, self._refs.pop())
        if (ref := endless_reference(schema)) is not None:
            raise GrammarError(
                f'cannot be enforced: no value ends, because each needs another one by the reference to "{ref}": leave '
                "a property of that cycle out of required, or allow null"
            )
        return Simplified(schema, one_spelling(self._objects, self._refuse), self._impossible)

    def _error(self, path: str, text: str) -> GrammarError:
        return GrammarError(f"cannot be enforced: {text} (at {path})")

    def _schema(self, node: Any, path: str, depth: int) -> Any:
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            kind = type(node).__name__
            raise GrammarError(f"must be a JSON schema: it must be an object or a boolean, got {kind} (at {path})")
        if depth > _MAX_DEPTH:
            raise GrammarError(f"cannot be enforced: the recursion limit of {_MAX_DEPTH} nested schemas was exceeded")
        self._seen.add(path)
        if "not" in node and is_anything(node["not"]):  # how zod writes `never`
            return False
        out = self._parts(node, path, depth)
        _count(out, path)
        self._drop_refused(node, out, path)
        if "oneOf" in out and "anyOf" not in out and isinstance(out["oneOf"], list):
            out = self._one_of(node, out)
        if isinstance(out.get("pattern"), str):
            _pattern(out)
        _format(out, lambda text: self._refuse(path, text))
        types = types_of(out)
        if unknown := sorted(types - set(TYPES)):
            self._refuse(path, f"the type {json.dumps(unknown[0])} is unknown: use one of {', '.join(TYPES)}")
            del out["type"]
            types = set(TYPES)
        if not types & {"integer", "number"}:
            for keyword in _BOUNDS:
                out.pop(keyword, None)
        elif any(keyword in out for keyword in _BOUNDS) and not self._bound(out, types, path):
            return False
        if ("enum" in out or "const" in out) and not self._values(out, path):
            return False
        self._objects.append((out, path))
        return out

    def _parts(self, node: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in node.items():
            at = f"{path}/{_escaped(key)}"
            if key in ANNOTATIONS or key in (NUMBER, LITERALS):
                continue
            if key in ("$id", "$anchor") and isinstance(value, str):
                continue  # references are pointers from the root, which another base would change
            if key in _MAPS and isinstance(value, dict):
                out[key] = {
                    name: self._schema(item, f"{at}/{_escaped(name)}", depth + 1) for name, item in value.items()
                }
            elif key in _LISTS and isinstance(value, list):
                out[key] = [self._schema(item, f"{at}/{number}", depth + 1) for number, item in enumerate(value)]
            elif key in _ONE:
                out[key] = self._schema(value, at, depth + 1)
            else:
                out[key] = value if isinstance(value, str | int | float) else copy.deepcopy(value)
            if key == "pattern" and isinstance(value, str):
                check_escapes(value)
            elif key == "patternProperties" and isinstance(value, dict):
                for pattern in value:
                    check_escapes(pattern)
            if key == "$ref" and isinstance(value, str):
                out[key] = quoted(self._names.pointer(value, path))
                self._refs.append(out[key])
        return out

    def _referred(self, schema: Any, ref: str) -> None:
        """Simplify the schema that a reference names where no keyword has one, as in `#/components/schemas/x`."""
        if not ref.startswith("#/") or ref in self._seen:
            return
        place, _, last = ref.rpartition("/")
        holder = target_of(schema, place)
        target = target_of(schema, ref)
        if isinstance(target, dict):
            self._seen.add(ref)
            key = int(last) if isinstance(holder, list) else unescaped(last)
            holder[key] = self._schema(target, ref, ref.count("/"))

    def _refuse(self, path: str, text: str) -> None:
        if not self._is_lenient:
            raise self._error(path, text)

    # -- keywords -----------------------------------------------------------------------------------------------------

    def _drop_refused(self, node: dict[str, Any], out: dict[str, Any], path: str) -> None:
        is_alone = not _COMBINATIONS & out.keys()
        for unevaluated, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if is_alone and unevaluated in out and plain not in out:
                out[plain] = self._schema(out.pop(unevaluated), f"{path}/{unevaluated}", 0)
        self._name_properties(out)
        for row in REFUSED:
            if row.name in out:
                del out[row.name]
                if not row.is_idle(node):
                    self._refuse(path, f'the keyword "{row.name}": {row.remedy}')
        extra = node.get("minProperties", 0)
        required = node.get("required", [])
        if is_number(extra) and isinstance(required, list) and extra > len(required) + 1:
            out.pop("minProperties")
            self._refuse(
                path,
                f"minProperties of {extra} with {len(required)} required properties: additional properties may repeat, "
                "so at most one more can be demanded; name them in required",
            )

    def _name_properties(self, out: dict[str, Any]) -> None:
        names = out.get("propertyNames")
        for _ in range(_MAX_REFERENCES):
            if not (isinstance(names, dict) and isinstance(names.get("$ref"), str)):
                break
            names = target_of(self._given, names["$ref"])
        if not isinstance(names, dict) or names.keys() - ANNOTATIONS - {"type"} != {"enum"}:
            return
        if out.keys() & {"properties", "patternProperties"} or not isinstance(names["enum"], list):
            return
        # zod requires each name of a record of an enum.
        if not all(name in names["enum"] for name in out.get("required") or ()):
            return
        value = out.get("additionalProperties", True)
        out["properties"] = {name: copy.deepcopy(value) for name in names["enum"] if isinstance(name, str)}
        out["additionalProperties"] = False
        del out["propertyNames"]

    def _one_of(self, node: dict[str, Any], out: dict[str, Any]) -> dict[str, Any]:
        """Write `anyOf` if the alternatives exclude each other. The order of keywords matters."""
        if not are_disjoint(node["oneOf"], lambda ref: target_of(self._given, ref)):
            return out
        return {"anyOf" if key == "oneOf" else key: value for key, value in out.items()}

    def _bound(self, out: dict[str, Any], types: set[str], path: str) -> bool:
        """Make the bounds of numbers exact. Return whether any value remains."""
        numbers = self._range(out, types, path)
        for keyword in _BOUNDS:
            out.pop(keyword, None)
        tight = numbers.tightened()
        if tight.is_empty or (tight.step is None and numbers.is_empty):
            self._impossible.append(f"{path} allows no number: {_described(numbers)}")
            out["type"] = sorted(types - {"integer", "number"})
            return len(types) > 1 and types != {"integer", "number"}
        if not tight.is_exact_in_doubles:
            if tight.patterns() is not None:
                out[NUMBER] = tight
                return True
            if not tight.is_compilable():
                what = "a bound of 2^53 or more" if tight.step and abs(tight.step) < 2**32 else "more than 9 digits"
                self._refuse(f"{path}/multipleOf", f"multipleOf with {what}: use a multiple of 2, 5 or 10, or none")
                return True
        out.update(_keywords(tight))
        return True

    def _range(self, out: dict[str, Any], types: set[str], path: str) -> NumberRange:
        bounds = {keyword: out[keyword] for keyword in _BOUNDS if keyword in out}
        for exclusive, plain in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            # A boolean is of draft 4.
            if isinstance(bounds.get(exclusive), bool) and bounds.pop(exclusive) and plain in bounds:
                bounds[exclusive] = bounds.pop(plain)
        for keyword, value in bounds.items():
            if not is_number(value) or (isinstance(value, float) and not math.isfinite(value)):
                raise GrammarError(f"must be a JSON schema: {keyword} must be a number, got {value!r} (at {path})")
            if keyword == "multipleOf" and value <= 0:
                raise GrammarError(f"must be a JSON schema: multipleOf must be above 0, got {value} (at {path})")
        low, is_open_low = _stricter(bounds, "minimum", "exclusiveMinimum", max)
        high, is_open_high = _stricter(bounds, "maximum", "exclusiveMaximum", min)
        step = exact(bounds["multipleOf"]) if "multipleOf" in bounds else None
        return NumberRange(low, high, is_open_low, is_open_high, step, is_integer="number" not in types)

    def _values(self, out: dict[str, Any], path: str) -> bool:
        """Separate the values that the compiler would change. Return whether any value remains."""
        values = out["enum"] if "enum" in out else [out["const"]]
        if not isinstance(values, list):
            raise GrammarError(f"must be a JSON schema: enum must be a list, got {type(values).__name__} (at {path})")
        if "enum" in out and "const" in out:
            values = [value for value in values if _is_same(value, out["const"])]
        if not values:
            self._impossible.append(f"{path} allows no value: its enum is empty, or excludes its const")
            return False
        odd = [value for value in values if is_inexact(value)]
        if not odd and NUMBER not in out:
            if "enum" in out and "const" in out:
                del out["enum"]
            return True
        for value in odd:
            _check_finite(value, path)
            if not is_number(value) and out.keys() & _CONTAINERS:
                self._refuse(
                    path, "a list or an object with a number of 2^53 or more, beside other keywords: remove them"
                )
        numbers = out.pop(NUMBER, None) or self._range(out, types_of(out), path)
        for keyword in (*_BOUNDS, "const"):
            out.pop(keyword, None)
        kept = [value for value in values if not is_number(value) or exact(value) in numbers]
        out["enum"] = [value for value in kept if value not in odd]
        out[LITERALS] = [value for value in kept if value in odd and _type_of(value) & types_of(out)]
        if not (out["enum"] or out[LITERALS]):
            self._impossible.append(f"{path} allows no value: its other keywords exclude every value of enum or const")
        return bool(out["enum"] or out[LITERALS])


# Keywords that concern the values of lists and objects.
_CONTAINERS = frozenset(
    {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"}
    | {"items", "prefixItems", "minItems", "maxItems", "anyOf", "allOf", "oneOf", "$ref"}
)


def _type_of(value: Any) -> set[str]:
    if is_number(value):
        return {"number", "integer"} if exact(value).denominator == 1 else {"number"}
    return {"array"} if isinstance(value, list) else {"object"}


def _count(out: dict[str, Any], path: str) -> None:
    """Write counts as integers, and leave out maxima that no output reaches."""
    for keyword in _COUNTS:
        value = out.get(keyword, 0)
        if not (is_number(value) and value >= 0 and value % 1 == 0):
            raise GrammarError(
                f"must be a JSON schema: {keyword} must be a whole number of at least 0, got {value!r} (at {path})"
            )
        if value <= _MAX_COUNT:
            if keyword in out:
                out[keyword] = int(value)
        elif keyword.startswith("max"):
            del out[keyword]
        else:
            raise GrammarError(f"cannot be enforced: {keyword} of more than {_MAX_COUNT} (at {path})")


def _pattern(out: dict[str, Any]) -> None:
    first, *others = without_look_ahead(out["pattern"])
    out["pattern"] = first
    if others:
        out["allOf"] = [*out.get("allOf", []), *({"pattern": pattern} for pattern in others)]


def _format(out: dict[str, Any], refuse: Callable[[str], None]) -> None:
    name = out.get("format")
    if not isinstance(name, str) or name in COMPILED_FORMATS:
        return
    del out["format"]
    if "string" not in types_of(out) or name in IGNORED_FORMATS:
        return
    if (pattern := PATTERN_FORMATS.get(name)) is None:
        # zod names the function that wrote a pattern, such as "cuid" or "ends_with".
        if any("pattern" in part for part in (out, *out.get("allOf", ())) if isinstance(part, dict)):
            return None
        return refuse(f'the format "{name}" is unknown: remove it, or use pattern')
    if "pattern" in out:
        out["allOf"] = [*out.get("allOf", []), {"pattern": pattern}]
    else:
        out["pattern"] = pattern


def _stricter(
    bounds: dict[str, Any], plain: str, exclusive: str, choose: Callable[[Iterator[Fraction]], Fraction]
) -> tuple[Fraction | None, bool]:
    given = {keyword: exact(bounds[keyword]) for keyword in (plain, exclusive) if keyword in bounds}
    if not given:
        return None, False
    bound = choose(iter(given.values()))
    return bound, given.get(exclusive) == bound


def _keywords(numbers: NumberRange) -> dict[str, Any]:
    found = {
        "exclusiveMinimum" if numbers.is_open_low else "minimum": numbers.low,
        "exclusiveMaximum" if numbers.is_open_high else "maximum": numbers.high,
        "multipleOf": numbers.step,
    }
    return {
        keyword: int(value) if value.denominator == 1 else float(value)
        for keyword, value in found.items()
        if value is not None
    }


def _described(numbers: NumberRange) -> str:
    return ", ".join(f"{keyword} {value}" for keyword, value in _keywords(numbers).items())


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)


def _check_finite(value: Any, path: str) -> None:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in values:
        _check_finite(item, path)
    if isinstance(value, float) and not math.isfinite(value):
        raise GrammarError(f"must be a JSON schema: its numbers must be finite, got {value} (at {path})")


def _inner(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly within one, with the steps from it to them."""
    for key, value in node.items() if isinstance(node, dict) else ():
        if key in _MAPS and isinstance(value, dict):
            yield from ((f"{_escaped(key)}/{_escaped(name)}", item) for name, item in value.items())
        elif key in _LISTS and isinstance(value, list):
            yield from ((f"{_escaped(key)}/{number}", item) for number, item in enumerate(value))
        elif key in _ONE:
            yield _escaped(key), value


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
