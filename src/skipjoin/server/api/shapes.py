"""Structural check of large bodies before validation.

pydantic reports all errors, and 4 MB of unknown fields would block the interpreter for half a second. msgspec stops at
the first.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import GenericAlias
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType
from pydantic import BaseModel

from skipjoin.server.api.conversation import MAX_MESSAGES, MAX_TOOLS, CalledFunction, Message, TextPart, ToolCall
from skipjoin.server.api.dialects.messages_body import BLOCKS, MessagesTurn, TextBlock
from skipjoin.server.api.dialects.ollama_body import OllamaMessage
from skipjoin.server.api.dialects.responses_items import ITEMS, ContentPart
from skipjoin.server.api.errors import ApiError, bad_request, unknown_field
from skipjoin.server.api.fields import Body
from skipjoin.server.api.pooled_bodies import MAX_INPUTS, Document
from skipjoin.server.api.protocol import MAX_PROMPTS

# Maximum token ids of one body, which take 40 ms to validate.
MAX_IDS = 1 << 20
# Maximum bytes of any other field. `metadata` can have 110,000 if all characters are escaped.
MAX_FIELD_BYTES = 1 << 17
# Maximum bytes of all tools: 1,024 with half a kilobyte each. Also of the inputs of earlier calls.
MAX_TOOLS_BYTES = 1 << 19
_FAULT = re.compile(r"(.*?)( - at `\$(.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_INNER = re.compile(rb"\[\s*(.)", re.DOTALL)


def checked(body: bytes, kind: type[Body]) -> bytes:
    """Raise 400 at the first undeclared or too large field."""
    fields = _read(body, _struct(kind), "")
    for name in kind.model_fields:
        value = getattr(fields, name)
        if value is UNSET:
            continue
        if (check := LARGE_FIELDS.get(kind.large_fields.get(name, name))) is not None:
            setattr(fields, name, check(value, name))
        else:
            _check_small(len(bytes(value)), name)
    return msgspec.json.encode(fields)


class _Counted(msgspec.Struct):
    """Element of a list. Decoding stops at the first one too many."""

    def __post_init__(self) -> None:
        _left.count -= 1
        if _left.count < 0:
            raise ValueError(f"there must be at most {MAX_MESSAGES} items, and as many parts")


class _Left(threading.local):
    count = 0


_left = _Left()


def _counted(value: Raw, kind: type[msgspec.Struct], name: str) -> list[Any]:
    _left.count = 2 * MAX_MESSAGES
    found: list[Any] = _read(value, GenericAlias(list, (kind,)) | None, name) or []
    return found


@cache
def _merged(name: str, *kinds: type[BaseModel], **known: Any) -> type[msgspec.Struct]:
    names = dict.fromkeys(name for kind in kinds for name in kind.model_fields)
    fields = [(name, known.get(name, Raw) | UnsetType, UNSET) for name in names]
    return msgspec.defstruct(name, fields, bases=(_Counted,), forbid_unknown_fields=True, kw_only=True)


@cache
def _struct(kind: type[BaseModel], **known: Any) -> type[msgspec.Struct]:
    fields = [
        (name, known.get(name, Raw)) if field.is_required() else (name, known.get(name, Raw) | UnsetType, UNSET)
        for name, field in kind.model_fields.items()
    ]
    return msgspec.defstruct(kind.__name__, fields, forbid_unknown_fields=True, kw_only=True)


def _read(data: bytes | Raw, kind: Any, at: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _fault(str(error), at) from None
    except RecursionError:
        raise bad_request("the body is not valid JSON: it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None


def _fault(text: str, at: str) -> ApiError:
    found = _FAULT.fullmatch(text)
    assert found is not None
    what, inner = found[1], found[3] or ""
    if unknown := _UNKNOWN.fullmatch(what):
        return unknown_field(_path(at, inner, unknown[1]))
    if missing := _MISSING.fullmatch(what):
        what, inner = "Field required", f"{inner}.{missing[1]}"
    param = _path(at, inner)
    return bad_request(f"{param or 'the body'}: {what.replace('`', '')}", param or None)


def _path(*parts: str) -> str:
    return ".".join(part for part in re.split(r"[.\[\]]+", ".".join(parts)) if part)


def _check_small(size: int, name: str) -> None:
    if size > MAX_FIELD_BYTES:
        raise bad_request(f"{name} must have at most {MAX_FIELD_BYTES} bytes of JSON, got {size}", name)


def _prompts(value: Raw, name: str, most: int = MAX_PROMPTS) -> Raw:
    data = bytes(value)
    if data[:1] == b'"':
        return value
    inner = _INNER.match(data)
    if inner is None:
        _check_small(len(data), name)
    elif inner[1] == b'"':
        _check_count(len(_read(data, list[str], name)), most, "texts", name)
    else:
        lists = data.count(b"[")
        _check_count(lists - 1, most, "lists", name)
        _ids(value, name, list[list[int]] if inner[1] == b"[" else list[int])
    return value


def _documents(value: Raw, name: str) -> Raw:
    documents = _read(value, GenericAlias(list, (str | _struct(Document, text=str),)), name)
    _check_count(len(documents), MAX_INPUTS, "documents", name)
    return value


def _ids(value: Raw, name: str, kind: Any = list[int]) -> Raw:
    data = bytes(value)
    _check_count(data.count(b",") + 1, MAX_IDS, "token ids", name)
    _read(data, kind, name)
    return value


def _messages(value: Raw, name: str) -> Raw:
    parts_type = GenericAlias(list, (_struct(TextPart, type=str, text=str),))
    function = _struct(CalledFunction, name=str, arguments=str | None)
    calls_type = GenericAlias(list, (_struct(ToolCall, id=str, function=function),))
    message = _struct(
        Message,
        role=str,
        content=str | parts_type | None,
        name=str | None,
        tool_calls=calls_type | None,
        reasoning=str | None,
        reasoning_content=str | None,
    )
    messages = _read(value, GenericAlias(list, (message,)) | None, name) or []
    parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    _check_count(len(messages), MAX_MESSAGES, "messages", name)
    calls = sum(len(message.tool_calls) for message in messages if isinstance(message.tool_calls, list))
    _check_count(parts, MAX_MESSAGES, "content parts", name)
    _check_count(calls, MAX_MESSAGES, "tool calls", name)
    _check_small(sum(_unread(message) for message in messages), name)
    return Raw(msgspec.json.encode(messages)) if messages else value


def _items(value: Raw, name: str) -> Raw:
    if bytes(value)[:1] == b'"':
        return value
    parts = GenericAlias(list, (_merged("Part", ContentPart, type=str, text=str),))
    item = _merged(
        "Item", *ITEMS, type=str, role=str, content=str | parts | None, arguments=str, input=str, output=str | parts
    )
    items = _counted(value, item, name)
    _check_small(sum(_unread(item) for item in items), name)
    return Raw(msgspec.json.encode(items))


def _turns(value: Raw, name: str) -> Raw:
    texts = GenericAlias(list, (_merged("Text", TextBlock, type=str, text=str),))
    block = _merged("Block", *BLOCKS, type=str, text=str, thinking=str, content=str | texts | None)
    message = _merged("Turn", MessagesTurn, role=str, content=str | GenericAlias(list, (block,)))
    messages = _counted(value, message, name)
    blocks = [block for message in messages if isinstance(message.content, list) for block in message.content]
    _check_inputs([block.input for block in blocks], sum(map(_unread, blocks)), name)
    return Raw(msgspec.json.encode(messages))


def _plain_messages(value: Raw, name: str) -> Raw:
    messages = _counted(
        value, _merged("Message", OllamaMessage, role=str, content=str | None, thinking=str | None), name
    )
    _check_inputs([message.tool_calls for message in messages], sum(map(_unread, messages)), name)
    return Raw(msgspec.json.encode(messages))


def _check_inputs(inputs: Sequence[Any], unread: int, name: str) -> None:
    size = sum(len(bytes(text)) for text in inputs if isinstance(text, Raw))
    if size > MAX_TOOLS_BYTES:
        raise bad_request(f"{name}: inputs of tools must have at most {MAX_TOOLS_BYTES} bytes, got {size}", name)
    _check_small(unread - size, name)


def _tools(value: Raw, name: str) -> Raw:
    size = len(bytes(value))
    if size > MAX_TOOLS_BYTES:
        raise bad_request(f"{name} must have at most {MAX_TOOLS_BYTES} bytes of JSON, got {size}", name)
    _check_count(len(_read(value, list[Raw] | None, name) or ()), MAX_TOOLS, "tools", name)
    return value


def _unread(message: Any) -> int:
    return sum(
        len(bytes(value)) for name in message.__struct_fields__ if isinstance(value := getattr(message, name), Raw)
    )


def _check_count(count: int, most: int, what: str, name: str) -> None:
    if count > most:
        raise bad_request(f"{name} must have at most {most} {what}, got {count}", name)


# Fields that can exceed `MAX_FIELD_BYTES`, with functions that check and return their values.
LARGE_FIELDS: dict[str, Callable[[Raw, str], Raw]] = {
    "prompt": _prompts,
    "inputs": partial(_prompts, most=MAX_INPUTS),
    "documents": _documents,
    "messages": _messages,
    "items": _items,
    "turns": _turns,
    "plain_messages": _plain_messages,
    "tokens": _ids,
    "tools": _tools,
}
