from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from skipjoin.schemas.notation import Notation
from skipjoin.schemas.rules import json_rules
from skipjoin.structured_output import GrammarError

if TYPE_CHECKING:
    from skipjoin.formats.table import Calls, Tags

# Arguments are written as chat templates write them, so the model knows the notation.
ARGUMENTS = Notation(item_separator=", ", key_separator=": ")
# Types whose values are JSON. Strings are plain text.
_JSON_TYPES = frozenset({"integer", "number", "boolean", "null", "object", "array"})
# Keywords of strings that the grammar does not express.
_UNENFORCED = ("pattern", "format", "minLength", "maxLength")
_SCALARS = re.compile(r"true|false|null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def read_tagged(calls: Calls, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[str, str] | None:
    """Return the name and the JSON arguments of a region's call, or None; `schemas` tell strings from JSON."""
    assert calls.tags is not None
    head = re.match(calls.head, text)
    if head is None:
        return None
    elements, rest = _elements(calls.tags, text[head.end() :])
    if rest.strip().removesuffix(calls.tags.end).strip():
        return None
    properties = _properties(schemas.get(head["name"], {}))
    return head["name"], json_text({key: _value(value, properties.get(key)) for key, value in elements})


def json_text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def _elements(tags: Tags, text: str) -> tuple[list[tuple[str, str]], str]:
    """Return names and values of the elements at the beginning of a text, and the rest, in linear time."""
    opening, closing = _patterns(tags)
    found, at = [], 0
    while (head := opening.match(text, at)) is not None and (end := closing.search(text, head.end())) is not None:
        found.append((head[1], text[head.end() : end.start()]))
        at = end.end()
    return found, text[at:]


@lru_cache(maxsize=16)
def _patterns(tags: Tags) -> tuple[re.Pattern[str], re.Pattern[str]]:
    # Models may leave out line breaks.
    opening, middle, closing = (
        re.escape(mark).replace("\\\n", r"\n?") for mark in (tags.open, tags.middle, tags.close)
    )
    return re.compile(rf"\s{{0,8}}{opening}([^<>\n]{{1,256}}?){middle}"), re.compile(closing)


def _value(text: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    is_text = kind == "string" or text in _options(schema)
    is_json = kind is not None or _SCALARS.fullmatch(text) or text[:1] in ("{", "[")
    if is_text or not is_json:
        return text
    try:
        value = json.loads(text)
        json_text(value)
    except (ValueError, RecursionError):
        return text
    return value


def tagged_arguments(
    tags: Tags, name: str, schema: dict[str, Any], rule: Callable[[str], str], *, is_strict: bool
) -> tuple[str, list[str]]:
    """Return the rule of a function's arguments, and further lines, whose names begin with `name`."""
    properties = _properties(schema)
    required = found if isinstance(found := schema.get("required"), list) else []
    shared: dict[str, Any] = {keyword: schema[keyword] for keyword in ("$defs", "definitions") if keyword in schema}
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
    if options := _options(given):
        texts = (option if isinstance(option, str) else json.dumps(option, ensure_ascii=False) for option in options)
        return f"({' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}) {close}", []
    if given.get("type") in _JSON_TYPES:
        # The compiler finds keywords that it cannot enforce.
        rules = json_rules({**given, **shared}, replace(ARGUMENTS, is_lenient=not is_strict), own)
        return f"({rules.expression}) {close}", rules.lines
    unknown = [keyword for keyword in _UNENFORCED if keyword in given]
    if is_strict and (unknown or given.get("type") != "string"):
        what = f"the keyword {unknown[0]!r} of strings" if unknown else "a parameter without one type"
        raise GrammarError(f"cannot be enforced: {what}, because this model's format of calls has no JSON strings")
    return f"{own}_text", [_text_rule(f"{own}_text", close)]


def _text_rule(name: str, close: str) -> str:
    is_token = close.startswith("<[")  # which no text contains
    return f"{name}{'' if is_token else '[lazy]'}: /(.|\\n)*/ {close}"


def _options(schema: Any) -> list[Any]:
    if not isinstance(schema, Mapping):
        return []
    found = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return found if isinstance(found, list) else []


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}
