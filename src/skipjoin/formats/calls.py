from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from skipjoin.formats.table import Calls
from skipjoin.formats.tagged import json_text, read_tagged

if TYPE_CHECKING:
    import regex

_IN_STRING, _OUTSIDE = re.compile(r'["\\]'), re.compile(r'["{}\[\]]')
# Rest of a region that only closes its calls.
_CLOSERS = "]},;`"


class PartKind(Enum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"
    MARK = "mark"


class Part(NamedTuple):
    """Part of a message: text, reasoning, or part of the call number `call`, which begins with its `name`."""

    text: str
    call: int | None = None
    name: str = ""
    id: str = ""
    is_reasoning: bool = False

    @property
    def kind(self) -> PartKind:
        if self.is_reasoning:
            return PartKind.REASONING
        return PartKind.TEXT if self.call is None else PartKind.CALL


@dataclass(slots=True)
class JoinedCall:
    name: str = ""
    id: str = ""
    arguments: str = ""


class Joined(NamedTuple):
    content: str
    reasoning: str
    calls: dict[int, JoinedCall]


def joined(parts: Sequence[Part]) -> Joined:
    calls: dict[int, JoinedCall] = {}
    for part in parts:
        if part.call is not None:
            call = calls.setdefault(part.call, JoinedCall())
            call.name, call.id = part.name or call.name, part.id or call.id
            call.arguments += part.text
    texts = [
        "".join(part.text for part in parts if part.call is None and part.is_reasoning is of) for of in (False, True)
    ]
    return Joined(texts[0], texts[1], calls)


class _JsonValue:
    """Finds the end of a JSON object or list in text that arrives in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped = 0, False, False

    def end(self, text: str) -> int | None:
        at = 0
        while True:
            if self._is_escaped:
                if at == len(text):
                    return None
                at, self._is_escaped = at + 1, False
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return None
            at, char = found.end(), found[0]
            if char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if char in "{[" else -1
                if self._depth == 0:
                    return at


class CallsReader:
    """Reader of a region of calls. A call begins when its name and the start of its arguments are known.

    Text that never becomes a call is content when the region closes.
    """

    def __init__(
        self,
        calls: Calls,
        head: regex.Pattern[str],
        count: int,
        new_id: Callable[[], str],
        schemas: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.count = count
        self.is_other = False
        self._calls, self._head, self._new_id = calls, head, new_id
        self._first = count
        self._schemas = schemas
        self.held = ""
        self._value: _JsonValue | None = None
        self._own: list[str] | None = None  # arguments in a notation of the format

    @property
    def is_in_arguments(self) -> bool:
        return self._value is not None or self._own is not None

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        if self._calls.tags is not None:  # read as a whole, because the types of values are known at their ends
            self.held += text
            return parts
        while text:
            if self._own is not None:
                self._own.append(text)
                break
            if self._value is None:
                text = self._find_head(text, parts)
                continue
            end = self._value.end(text)
            parts.append(Part(text[:end], self.count - 1))
            if end is None:
                break
            self._value, text = None, text[end:]
        return parts

    def after(self, mark: str) -> str | None:
        _, found, rest = self.held.partition(mark)
        return rest if found else None

    def close(self, opening: str = "", closing: str = "") -> list[Part]:
        """Return the rest. The marks of the region become content with it."""
        held, self.held = self.held, ""
        if self._calls.tags is not None:
            return self._tagged(held) or [Part(opening + held + closing)]
        if self._own is not None:
            text, self._own = "".join(self._own), None
            return [Part(_as_json(text), self.count - 1)]
        self._value = None
        if self.count > self._first:
            after = self._calls.after.strip().lstrip(_CLOSERS).strip()
            rest = held.strip().lstrip(_CLOSERS).strip().removeprefix(after).strip()
            is_cut = any(mark.startswith(rest) for mark in (after, self._calls.close or ""))  # within the closing mark
            return [Part(rest)] if rest and not is_cut else []
        return self._whole(held) or [Part(opening + held + closing)]

    def _find_head(self, text: str, parts: list[Part]) -> str:
        """Hold text until it has a head, and then return the rest, from the first brace of the arguments."""
        self.held += text
        if self.is_other:
            return ""
        head = self._head.match(self.held, partial=True)
        if head is None or head.partial:
            self.is_other = head is None
            return ""
        call_id = (head.groupdict().get("id") or "") or self._new_id()
        parts.append(Part("", self.count, head["name"], call_id))
        self.count += 1
        rest, self.held = self.held[head.end() - 1 :], ""
        if self._calls.has_own_strings:
            self._own = []
        else:
            self._value = _JsonValue()
        return rest

    def _tagged(self, text: str) -> list[Part]:
        found = read_tagged(self._calls, text, self._schemas)
        if found is None:
            return []
        name, arguments = found
        self.count += 1
        return [Part(arguments, self.count - 1, name, self._new_id())]

    def _whole(self, text: str) -> list[Part]:
        """Return the calls of a complete region whose heads are in another order."""
        try:
            found = json.loads(text)
            json_text(found)
        except (ValueError, RecursionError):
            return []
        parts: list[Part] = []
        for call in found if isinstance(found, list) else [found]:
            if not (isinstance(call, dict) and isinstance(name := call.get("name"), str)):
                return []
            arguments = call.get("arguments", call.get("parameters"))
            if not isinstance(arguments, str | dict):
                return []
            shown = arguments if isinstance(arguments, str) else json_text(arguments)
            parts.append(Part(shown, self.count + len(parts), name, self._new_id()))
        self.count += len(parts)
        return parts


def _as_json(text: str) -> str:
    from transformers.utils.chat_parsing.content_parsers import parse_content  # noqa: PLC0415 - takes two seconds

    options = {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]}
    try:
        return json_text(parse_content(text, "json", options))
    except (ValueError, RecursionError):
        return text
