"""Keywords of JSON Schema, of which `make reference` writes a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Schema = Mapping[str, Any]

# Types of JSON values that the keywords of the groups below concern.
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_REMOVE = "no grammar expresses it; remove it"


class Enforced(NamedTuple):
    """Keywords that every output follows, with an example of a schema, and values that it allows and does not."""

    names: tuple[str, ...]
    meaning: str
    example: Schema
    good: Any
    bad: Any


class Ignored(NamedTuple):
    names: tuple[str, ...]
    meaning: str


class Refused(NamedTuple):
    """Keyword that is an error, unless it constrains nothing."""

    name: str
    remedy: str
    example: Schema
    is_idle: Callable[[Schema], bool]
    idle: str
    idle_example: Schema


def is_anything(schema: Any) -> bool:
    return schema is True or (isinstance(schema, Mapping) and not schema.keys() - ANNOTATIONS)


def types_of(schema: Schema) -> set[str]:
    given = schema.get("type", TYPES)
    given = [given] if isinstance(given, str) else given
    types = {item for item in given if isinstance(item, str)} if isinstance(given, list | tuple) else set(TYPES)
    return types | {"integer"} if "number" in types else types


def _are(of: Callable[[Any], bool], values: Any) -> bool:
    return isinstance(values, Mapping) and all(map(of, values.values()))


def _is_empty(value: Any) -> bool:
    return value == [] or is_anything(value)


def _names_any(schema: Any) -> bool:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        schema = {key: value for key, value in schema.items() if key != "type"}
    return is_anything(schema)


ENFORCED = (
    Enforced(
        ("type",),
        "one type, or a list of types; a number without a fraction is an integer",
        {"type": ["string", "null"]},
        None,
        1,
    ),
    Enforced(
        ("enum", "const"), "exactly, also integers beyond 2^53", {"enum": ["a", 2**60 + 1]}, 2**60 + 1, 2**60
    ),
    Enforced(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        "exactly, also beyond 2^53; a number with a fraction is a double",
        {"type": "integer", "minimum": 2**53 + 1, "exclusiveMaximum": 2**53 + 3},
        2**53 + 1,
        2**53,
    ),
    Enforced(
        ("multipleOf",),
        "exactly, as decimal numbers; refused if it has many digits and is not decided by the last digits of a number",
        {"type": "number", "multipleOf": 0.25},
        0.75,
        0.7,
    ),
    Enforced(
        ("minLength", "maxLength", "pattern"),
        "a regular expression without back-references, and with look-ahead at its beginning only; it cannot exclude "
        "the quote or the backslash",
        {"type": "string", "pattern": "^a", "maxLength": 2},
        "ab",
        "abc",
    ),
    Enforced(
        ("properties", "required", "additionalProperties"),
        "properties come in the schema's order, additional ones last; a named property appears once, in one spelling",
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
        {"a": None, "b": 1},
        {"b": 1},
    ),
    Enforced(
        ("patternProperties",),
        "patterns must exclude each other; with llguidance before 1.8, properties that match none are not allowed",
        {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False},
        {"xa": None},
        {"xa": 1},
    ),
    Enforced(
        ("minProperties", "maxProperties"),
        "if every named property is required; at most one additional property can be demanded",
        {"type": "object", "minProperties": 1},
        {"a": 1},
        {},
    ),
    Enforced(
        ("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        "in all drafts' forms",
        {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}, "minItems": 1},
        [None, True],
        [True],
    ),
    Enforced(
        ("anyOf", "allOf"), "as in the standard", {"anyOf": [{"const": 1}, {"type": "string"}]}, "a", None
    ),
    Enforced(
        ("oneOf",),
        "if the alternatives exclude each other by types, constants, or constants of a required property",
        {"oneOf": [{"type": "null"}, {"type": "boolean"}]},
        None,
        1,
    ),
    Enforced(
        ("$ref", "$defs", "definitions", "$id", "$anchor", "$schema"),
        "references within the schema, also recursive ones; others are refused and never fetched",
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}},
        None,
        1,
    ),
)  # fmt: skip

IGNORED = (
    Ignored(
        ("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"),
        "describe the schema",
    ),
    Ignored(("contentEncoding", "contentMediaType", "contentSchema"), "describe the content of a string"),
    Ignored(
        ("nullable", "discriminator", "xml", "externalDocs"),
        "OpenAPI's; `null` needs a type, and alternatives are told apart by their schemas",
    ),
    Ignored(("$vocabulary", "$dynamicAnchor", "$recursiveAnchor"), "matter for `$dynamicRef` only"),
)
ANNOTATIONS = frozenset(name for row in IGNORED for name in row.names)

REFUSED = (
    Refused(
        "not",
        "no grammar expresses it; list what is allowed instead",
        {"not": {"type": "string"}},
        lambda node: node["not"] is False,
        "`false`; `{}` allows nothing",
        {"not": False},
    ),
    Refused(
        "uniqueItems",
        "no grammar expresses it; remove it, and check the items yourself",
        {"type": "array", "uniqueItems": True},
        lambda node: node["uniqueItems"] is False or node.get("maxItems") in (0, 1),
        "`false`, or `maxItems` of at most 1",
        {"type": "array", "uniqueItems": False},
    ),
    Refused(
        "contains",
        f"{_REMOVE}, or use items or prefixItems",
        {"type": "array", "contains": {"type": "integer"}},
        lambda node: node.get("minContains") == 0 and "maxContains" not in node,
        "`minContains` of 0 without `maxContains`",
        {"type": "array", "contains": {"type": "integer"}, "minContains": 0},
    ),
    Refused(
        "minContains",
        _REMOVE,
        {"type": "array", "contains": True, "minContains": 2},
        lambda node: node["minContains"] == 0 or "contains" not in node,
        "0, or no `contains`",
        {"type": "array", "minContains": 2},
    ),
    Refused(
        "maxContains",
        _REMOVE,
        {"type": "array", "contains": True, "minContains": 0, "maxContains": 2},
        lambda node: "contains" not in node,
        "no `contains`",
        {"type": "array", "maxContains": 2},
    ),
    Refused(
        "propertyNames",
        "no grammar expresses it; use patternProperties with additionalProperties: false",
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        lambda node: _names_any(node["propertyNames"]),
        '`true`, `{}` or `{"type": "string"}`; an `enum` of names is enforced as `properties`',
        {"type": "object", "propertyNames": {"type": "string"}},
    ),
    Refused(
        "dependentRequired",
        "no grammar expresses it; use anyOf of objects",
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        lambda node: _are(_is_empty, node["dependentRequired"]),
        "`{}`, or empty lists",
        {"type": "object", "dependentRequired": {}},
    ),
    Refused(
        "dependentSchemas",
        "no grammar expresses it; use anyOf of objects",
        {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
        lambda node: _are(_is_empty, node["dependentSchemas"]),
        "`{}`, or schemas that allow everything",
        {"type": "object", "dependentSchemas": {"a": True}},
    ),
    Refused(
        "dependencies",
        "no grammar expresses it; use anyOf of objects",
        {"type": "object", "dependencies": {"a": ["b"]}},
        lambda node: _are(_is_empty, node["dependencies"]),
        "`{}`, or empty lists",
        {"type": "object", "dependencies": {}},
    ),
    Refused(
        "if",
        "no grammar expresses it; use anyOf",
        {"if": {"type": "string"}, "then": {"maxLength": 1}},
        lambda node: all(is_anything(node.get(name, True)) for name in ("then", "else")),
        "no `then` and `else`",
        {"if": {"type": "string"}},
    ),
    Refused(
        "then",
        "no grammar expresses it; use anyOf",
        {"if": {"type": "string"}, "then": {"maxLength": 1}},
        lambda node: "if" not in node or is_anything(node["then"]),
        "no `if`",
        {"then": {"maxLength": 1}},
    ),
    Refused(
        "else",
        "no grammar expresses it; use anyOf",
        {"if": {"type": "string"}, "else": False},
        lambda node: "if" not in node or is_anything(node["else"]),
        "no `if`",
        {"else": {"maxLength": 1}},
    ),
    Refused(
        "unevaluatedProperties",
        "no grammar expresses it beside references and combinations; use additionalProperties",
        {"type": "object", "allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False},
        lambda node: is_anything(node["unevaluatedProperties"]) or "additionalProperties" in node,
        "`true` or `{}`; without references and combinations it is enforced as `additionalProperties`",
        {"type": "object", "unevaluatedProperties": True},
    ),
    Refused(
        "unevaluatedItems",
        "no grammar expresses it beside references and combinations; use items",
        {"type": "array", "allOf": [{"prefixItems": [True]}], "unevaluatedItems": False},
        lambda node: is_anything(node["unevaluatedItems"]) or isinstance(node.get("items"), bool | dict),
        "`true` or `{}`; without references and combinations it is enforced as `items`",
        {"type": "array", "unevaluatedItems": True},
    ),
    Refused("$dynamicRef", "use $ref", {"$dynamicRef": "#a", "$dynamicAnchor": "a"}, lambda _: False, "", {}),
    Refused("$recursiveRef", "use $ref", {"$recursiveRef": "#"}, lambda _: False, "", {}),
)
