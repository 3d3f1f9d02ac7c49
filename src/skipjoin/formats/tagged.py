"""Calls whose arguments are elements between tags instead of JSON: how they are read, and their grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from skipjoin.structured_output import GrammarError

if TYPE_CHECKING:
    from skipjoin.formats.table import Calls, Tags

# Types whose values are JSON. Strings are plain text.
_JSON_TYPES = frozenset({"integer", "number", "boolean", "null", "object", "array"})
# Keywords of strings that the grammar does not express.
_UNENFORCED = ("pattern", "format", "minLength", "maxLength")
_SCALARS = re.compile(r"true|false|null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def read_tagged(calls: Calls, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[str, str] | None:
    """Return the name and the arguments, as JSON, of the call in a region, or None if it is not a call.

    Args:
        schemas: Schema of the arguments of each function, which tells strings from JSON.
    """
    assert calls.tags is not None
    head = re.match(calls.head, text)
    if head is None:
        return None
    rest, name = text[head.end() :], head["name"]
    element = _element(calls.tags)
    if element.sub("", rest).strip().removesuffix(calls.tags.end).strip():
        return None
    properties = _properties(schemas.get(name, {}))
    found = {key: _value(value, properties.get(key)) for key, value in element.findall(rest)}
    return name, json.dumps(found, ensure_ascii=False)


@lru_cache(maxsize=16)
def _element(tags: Tags) -> re.Pattern[str]:
    # Models may leave out line breaks.
    opening, middle, closing = (
        re.escape(mark).replace("\\\n", r"\n?") for mark in (tags.open, tags.middle, tags.close)
    )
    return re.compile(rf"\s{{0,8}}{opening}([^<>\n]{{1,256}}?){middle}(.*?){closing}", re.DOTALL)


def _value(text: str, schema: Any) -> Any:
    """Parse a value by its schema. Without one, parse only what looks like JSON."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    is_text = kind == "string" or (isinstance(schema, Mapping) and text in schema.get("enum", ()))
    is_json = kind is not None or _SCALARS.fullmatch(text) or text[:1] in ("{", "[")
    if is_text or not is_json:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def tagged_arguments(
    tags: Tags, name: str, schema: dict[str, Any], rule: Callable[[str], str], *, is_strict: bool
) -> tuple[str, list[str]]:
    """Return the rule of a function's arguments, and further lines, whose names begin with `name`.

    Raises:
        GrammarError: If a strict function has a keyword that cannot be enforced.
    """
    properties = _properties(schema)
    required, shared = (
        set(schema.get("required", ())),
        {k: v for k, v in schema.items() if k in ("$defs", "definitions")},
    )
    names, lines = [], []
    for number, (key, value) in enumerate(properties.items()):
        own = f"{name}_{number}"
        body, more = _value_rule(own, value, shared, rule(tags.close), is_strict=is_strict)
        lines += [f"{own}: {rule(tags.open + key + tags.middle)} {body}", *more]
        names.append(own if key in required else f"{own}?")
    if not properties and schema.get("additionalProperties", True) is not False and schema.get("type") == "object":
        lines += [
            f"{name}_any: {rule(tags.open)} /[A-Za-z0-9_.-]{{1,64}}/ {rule(tags.middle)} {name}_value",
            _text_rule(f"{name}_value", rule(tags.close)),
        ]
        names.append(f"{name}_any*" if "properties" not in schema else "")
    return " ".join(filter(None, names)), lines


def _value_rule(own: str, schema: Any, shared: dict[str, Any], close: str, *, is_strict: bool) -> tuple[str, list[str]]:
    given: dict[str, Any] = schema if isinstance(schema, dict) else {}
    options = given.get("enum", [given["const"]] if "const" in given else None)
    if options is not None:
        texts = (one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in options)
        return f"({' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}) {close}", []
    if given.get("type") in _JSON_TYPES:
        # The compiler finds keywords that it cannot enforce.
        guidance = {
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
            "lenient": not is_strict,
        }
        text = json.dumps({**given, **shared, "x-guidance": guidance}, ensure_ascii=False, separators=(",", ":"))
        return f"%json {text} {close}", []
    unknown = [keyword for keyword in _UNENFORCED if keyword in given]
    if is_strict and (unknown or given.get("type") != "string"):
        what = f"the keyword {unknown[0]!r} of strings" if unknown else "a parameter without one type"
        raise GrammarError(f"cannot be enforced: {what}, because this model's format of calls has no JSON strings")
    return f"{own}_text", [_text_rule(f"{own}_text", close)]


def _text_rule(name: str, close: str) -> str:
    """Return the rule of any text that ends with the first `close`."""
    is_token = close.startswith("<[")  # which no text contains
    return f"{name}{'' if is_token else '[lazy]'}: /(.|\\n)*/ {close}"


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}
