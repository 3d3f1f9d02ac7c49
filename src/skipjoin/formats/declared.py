"""Formats that checkpoints declare: the `response_template` of transformers in tokenizer_config.json.

Patterns of delimiters are reduced to text, because a downloaded pattern could take exponential time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from skipjoin.formats.table import FORMATS, Calls, OutputFormat, Think

_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALLS, _CONTENT = "tool_calls", "content"
_TOKEN = re.compile(
    r"(?P<space>\\s(?:[*+?]|\{\d+(?:,\d*)?\})?)"
    r"|(?P<group>\(\?P<name>(?:\\w|\.|\[\^?(?:\\.|[^\]\\])+\])[+*]\??\))"
    r"|\\(?P<escape>[^\w\s]|n)"
    r"|(?P<text>[^\\.^$*+?{}\[\]|()])"
)
# Texts of special tokens within a mark.
_TAG = re.compile(r"<[^<>]{1,64}>|\[[^\[\]]{1,64}\]")
_NAMED = {"name": "{name}", "arguments": "{content}"}
_LISTED = {"name": "{name}", "arguments": "{arguments}"}
_WHOLE = ("{content}", {"name": "{content.name}", "arguments": "{content.arguments}"})


class UnknownTemplateError(ValueError):
    """The template has a part that is not understood, which the text names."""


def declared_format(template: Any, known: OutputFormat | None) -> OutputFormat:
    """Return the format that a response template declares; `known` completes it.

    Raises:
        UnknownTemplateError: It cannot be read while tokens arrive, or not be enforced.
    """
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping) or template.get("version", 1) != 1:
        raise UnknownTemplateError("fields")
    if unknown := sorted(set(fields) - {*_REASONING, _CALLS, _CONTENT}):
        raise UnknownTemplateError(f"fields.{unknown[0]}")
    if any(not isinstance(field, Mapping) for field in fields.values()):
        raise UnknownTemplateError("fields")
    if {"open", "open_pattern"} & set(fields.get(_CONTENT, {})):
        raise UnknownTemplateError("fields.content.open")
    name = next((name for name in _REASONING if name in fields), None)
    think = None if known is None else known.think
    if name is not None:
        think = _think(fields[name], f"fields.{name}")
    calls = None if known is None else known.calls
    if _CALLS in fields:
        calls = _calls(fields[_CALLS], calls)
    base = OutputFormat(name="response_template", signs=()) if known is None else known
    marks = [mark for mark in (think and think.open, think and think.close, calls and calls.trigger) if mark]
    marks += [calls.begin, calls.before, calls.middle, calls.after, calls.close or ""] if calls is not None else []
    tags = (tag for mark in marks for tag in (mark, *_TAG.findall(mark)) if tag)
    return replace(base, think=think, calls=calls, markers=tuple(dict.fromkeys((*base.markers, *tags))))


def _think(field: Mapping[str, Any], path: str) -> Think:
    if field.get("content", "text") != "text" or "transform" in field:
        raise UnknownTemplateError(f"{path}.content")
    opening, closing = _mark(field, "open", path), _mark(field, "close", path)
    if not opening.strip() or not closing.strip():
        raise UnknownTemplateError(f"{path}.close")
    patterns = [rf"\s{{0,8}}{re.escape(mark.strip())}\s{{0,8}}" for mark in (opening, closing)]
    return Think(open=opening, close=closing.strip(), open_pattern=patterns[0], close_pattern=patterns[1])


def _calls(field: Mapping[str, Any], known: Calls | None) -> Calls:
    path = f"fields.{_CALLS}"
    before, middle = _opening(field, path)
    kind = field.get("content", "text")
    if kind != "json" or field.get("content_args"):
        rows = [known, *(row.calls for row in FORMATS)]
        return next((row for row in rows if row is not None and _is_of(row, before, kind)), None) or _unknown(path)
    transform, each = field.get("transform", {"function": "{content}"}), bool(field.get("transform_each"))
    function = transform.get("function") if isinstance(transform, Mapping) else None
    mark, end = before.strip(), _mark(field, "close", path, default="").strip()
    if not mark:
        raise UnknownTemplateError(f"{path}.open")
    found = Calls(
        open=rf"\s{{0,8}}{re.escape(mark)}",
        close=end or None,
        between="\n" if end else None,
        before=mark + '{"name": "',
        middle='", "arguments": ',
        after="}" + end,
        trigger=mark,
    )
    if middle is not None and function == _NAMED and not each:
        middle = middle.strip()
        name = rf"\s{{0,8}}(?P<name>[^\s{{<{re.escape(middle[:1])}]{{1,256}})\s{{0,8}}"
        return replace(found, head=rf"{name}{re.escape(middle)}\s{{0,8}}\{{", before=mark, middle=middle, after=end)
    if middle is None and each and function == _LISTED:
        return replace(found, begin=mark + "[", end="]" + end, between=", ", before='{"name": "', after="}")
    if middle is None and not each and function in _WHOLE:
        # The table knows the white space of the same calls.
        is_same = known is not None and (known.trigger, known.head) == (mark, found.head)
        return known if known is not None and is_same else found
    return _unknown(path)


def _is_of(row: Calls, before: str, kind: str) -> bool:
    is_kind = row.tags is not None if kind == "xml-inline" else row.has_own_strings
    return is_kind and "".join(row.before.split()) == "".join(before.split())


def _unknown(path: str) -> NoReturn:
    raise UnknownTemplateError(path)


def _opening(field: Mapping[str, Any], path: str) -> tuple[str, str | None]:
    pattern = field.get("open_pattern")
    if not isinstance(pattern, str):
        return _mark(field, "open", path), None
    before, name, after = _texts(pattern, f"{path}.open_pattern")
    return before, after if name else None


def _mark(field: Mapping[str, Any], name: str, path: str, default: str | None = None) -> str:
    value, pattern = field.get(name, default), field.get(f"{name}_pattern")
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if isinstance(pattern, str):
        value, has_name, _ = _texts(pattern, f"{path}.{name}_pattern")
        if has_name:
            raise UnknownTemplateError(f"{path}.{name}_pattern")
    if not isinstance(value, str):
        raise UnknownTemplateError(f"{path}.{name}")
    return value


def _texts(pattern: str, path: str) -> tuple[str, bool, str]:
    """Return the text of a pattern before and after its group `name`, and whether it has one. White space may vary."""
    found, has_name, at = ["", ""], False, 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None or (token["group"] and has_name):
            raise UnknownTemplateError(path)
        at = token.end()
        has_name = has_name or bool(token["group"])
        text = "\n" if token["escape"] == "n" else token["escape"] or token["text"] or ""
        found[has_name] += text
    return found[0], has_name, found[1]
