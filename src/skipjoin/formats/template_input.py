from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

NoContent = Literal["null", "empty", "absent"]
# A template's own default for messages without text comes first.
NO_CONTENT: tuple[NoContent, ...] = ("null", "empty", "absent")
_ROLES = ("system", "user", "assistant", "tool")
# Words that no template has of its own.
_MARKS = {role: f"zq{role}qz" for role in _ROLES}
_CALLED, _OTHER, _VALUE = "zqcalledqz", "zqotherqz", "zqvalueqz"
_ARGUMENTS = {"zqnameqz": _VALUE}
_NOTHING = {"type": "object", "properties": {}}
_TOOL = {"type": "function", "function": {"name": "zqtoolqz", "description": "", "parameters": _NOTHING}}

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str | None]


class MessageError(ValueError):
    def __init__(self, param: str, what: str) -> None:
        super().__init__(f"{param} {what}")
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInput:
    """Form of messages that a chat template expects.

    Attributes:
        parts: Roles whose content is a list of parts, not text.
        no_content: What stands for the text of a message that has only calls.
        has_text_arguments: Arguments of calls are JSON as text, not objects.
        takes_text: Arguments may be text, such as those of a call that was cut off.
        has_one_call: The template loses or rejects further calls of a message.
        joins_thoughts: A message with calls has text or reasoning, but not both.
        keeps_systems: System messages after the first one are not lost.
    """

    parts: frozenset[str] = frozenset()
    no_content: NoContent = "null"
    has_text_arguments: bool = False
    takes_text: bool = False
    has_one_call: bool = False
    joins_thoughts: bool = False
    keeps_systems: bool = True
    has_system: bool = True
    id_length: int | None = None

    def messages(self, given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        numbered = list(enumerate(given))
        if self.has_one_call:
            numbered = _one_by_one(numbered)
        return [self._message(f"messages.{number}", message) for number, message in numbered]

    def _message(self, path: str, message: Mapping[str, Any]) -> dict[str, Any]:
        role = "system" if message.get("role") == "developer" else message.get("role")
        found = {**message, "role": role} if role is not None else {**message}
        if not message.get("tool_calls"):
            found.pop("tool_calls", None)  # templates ask whether it is there
        elif self.joins_thoughts and (both := _thoughts(message)) and (text := text_of(message.get("content"))):
            message = {**message, "content": None, "reasoning_content": f"{both}\n\n{text}"}
        if "content" in message or message.get("tool_calls"):
            found["content"] = self._content(role, message.get("content"))
        if (given := message.get("tool_call_id")) is not None:
            found["tool_call_id"] = self._call_id(given)
        if (thoughts := _thoughts(message)) is not None:
            # Templates differ in the name.
            found["reasoning_content"] = found["reasoning"] = found["thinking"] = thoughts
        if message.get("tool_calls"):
            if not text_of(message.get("content")):
                self._leave_out_content(found)
            calls = enumerate(message["tool_calls"])
            found["tool_calls"] = [self._call(f"{path}.tool_calls.{number}", call) for number, call in calls]
        return found

    def _content(self, role: Any, content: Any) -> Any:
        if role not in self.parts:
            return text_of(content) if isinstance(content, list | tuple) else content
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    def _leave_out_content(self, message: dict[str, Any]) -> None:
        if self.no_content == "absent":
            del message["content"]
        elif self.no_content == "null":
            message["content"] = None
        else:
            message["content"] = [] if message["role"] in self.parts else ""

    def _call(self, path: str, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = self._arguments(f"{path}.function.arguments", function.get("arguments"))
        found = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        return found if call.get("id") is None else {"id": self._call_id(call["id"]), **found}

    def _arguments(self, path: str, given: Any) -> Any:
        text = "{}" if given is None or (isinstance(given, str) and not given.strip()) else given
        if not isinstance(text, str):
            return json.dumps(text, ensure_ascii=False) if self.has_text_arguments else text
        if self.has_text_arguments:
            return text
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            return found
        if self.takes_text:
            return text
        raise MessageError(
            path,
            f"must be a JSON object as text, because this model's chat template lists arguments, got {_shown(text)}: "
            "leave out a call that was cut off, with its result, or send {}",
        )

    def _call_id(self, given: str) -> str:
        """Return an id that the template accepts; other servers' ids may begin or continue a conversation."""
        length = self.id_length
        if length is None or re.fullmatch(rf"[A-Za-z0-9]{{{length}}}", given):
            return given
        return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:length]


def regrouped(given: Sequence[Mapping[str, Any]], *, has_system: bool = True) -> list[dict[str, Any]]:
    """Return a conversation for templates that want one system message, first, and turns that alternate.

    Agents send several system messages, also between turns, and several messages of the user in a row. System messages
    at the beginning become one (without `has_system`, the beginning of the user's first turn), later ones belong to the
    user's turn, and messages in a row are joined by empty lines.
    """
    found: list[dict[str, Any]] = []
    is_begin = has_system
    for message in given:
        role = message.get("role")
        is_begin = is_begin and role in ("system", "developer")
        if role in ("system", "developer"):
            role = "system" if is_begin else "user"
        last = found[-1] if found else {}
        if role in ("system", "user", "assistant") and last.get("role") == role and not last.get("tool_calls"):
            texts = [text for text in (text_of(last.get("content")), text_of(message.get("content"))) if text]
            found[-1] = {**last, **message, "role": role, "content": "\n\n".join(texts)}
        else:
            found.append({**message, "role": role})
    return found


def has_late_systems(given: Sequence[Mapping[str, Any]]) -> bool:
    return any(message.get("role") in ("system", "developer") for message in given[1:])


def _one_by_one(given: Sequence[tuple[int, Mapping[str, Any]]]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return messages with one call each, whose result follows it; they are numbered as those that had them."""
    found: list[tuple[int, Mapping[str, Any]]] = []
    at = 0
    while at < len(given):
        number, message = given[at]
        calls, at = message.get("tool_calls") or (), at + 1
        if len(calls) < 2:
            found.append((number, message))
            continue
        results = []
        while at < len(given) and given[at][1].get("role") == "tool":
            results.append(given[at])
            at += 1
        for call in calls:
            found.append((number, {**message, "tool_calls": [call]}))
            message = {"role": message.get("role"), "content": None}  # the others have no text
            own = next((result for result in results if result[1].get("tool_call_id") == call.get("id")), None)
            if own is not None:
                results.remove(own)
                found.append(own)
        found += results
    return found


def text_of(content: Any) -> str:
    if isinstance(content, list | tuple):
        return "".join(part["text"] for part in content)
    return content or ""


def _thoughts(message: Mapping[str, Any]) -> str | None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        if message.get(name) is not None:
            return str(message[name])
    return None


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}..."


def find_input(render: Render) -> TemplateInput:
    """Return the form that a template expects, by what it renders of short conversations; None if it refuses one."""
    found = TemplateInput()
    found = replace(found, parts=frozenset(role for role in ("user", "assistant") if _wants_parts(render, found, role)))
    found = replace(found, has_system=_shows(render, found, "system") or _wants_parts(render, found, "system"))
    if found.has_system and _wants_parts(render, found, "system"):
        found = replace(found, parts=found.parts | {"system"})
    found = _with_arguments(render, found)
    found = replace(found, no_content=_no_content(render, found))
    if _wants_parts(render, found, "tool"):
        found = replace(found, parts=found.parts | {"tool"})
    return replace(
        found,
        has_one_call=_loses(render, found, _two_calls(), _OTHER),
        joins_thoughts=_loses(render, found, _thinking(), _CALLED),
        keeps_systems=not (found.has_system and _is_silent(render, found, _late_system(), _MARKS["system"])),
    )


def _loses(render: Render, form: TemplateInput, messages: Sequence[Mapping[str, Any]], mark: str) -> bool:
    """Return whether a template loses text, or its mark, of messages of which it knows the last one's kind.

    It must write a call with text.
    """
    user = {"role": "user", "content": _MARKS["user"]}
    has_calls = _CALLED in (render(form.messages([user, _calling(_MARKS["assistant"])]), [_TOOL]) or "")
    return has_calls and mark not in (render(form.messages(messages), [_TOOL]) or "")


def _is_silent(render: Render, form: TemplateInput, messages: Sequence[Mapping[str, Any]], mark: str) -> bool:
    text = render(form.messages(messages), None)
    return text is not None and _MARKS["user"] in text and mark not in text


def _two_calls() -> list[dict[str, Any]]:
    call, result = _calling(None), _conversation("tool")[-1]
    (first,) = call["tool_calls"]
    other = {**first, "id": "abcdefghj", "function": {**first["function"], "name": _OTHER}}
    messages = [{"role": "user", "content": _MARKS["user"]}, {**call, "tool_calls": [first, other]}]
    return [*messages, result, {**result, "tool_call_id": "abcdefghj"}]


def _thinking() -> list[dict[str, Any]]:
    call = {**_calling(_MARKS["assistant"]), "reasoning_content": _VALUE}
    return [{"role": "user", "content": _MARKS["user"]}, call]


def _late_system() -> list[dict[str, Any]]:
    user, assistant, system = ({"role": name, "content": _MARKS[name]} for name in ("user", "assistant", "system"))
    return [user, assistant, system, user]


def _conversation(role: str) -> list[dict[str, Any]]:
    user, assistant = ({"role": name, "content": _MARKS[name]} for name in ("user", "assistant"))
    if role == "system":
        return [{"role": "system", "content": _MARKS["system"]}, user]
    if role == "tool":
        return [user, _calling(None), {"role": "tool", "tool_call_id": "abcdefghi", "content": _MARKS["tool"]}]
    return [user, assistant, user] if role == "assistant" else [user]


def _calling(content: str | None) -> dict[str, Any]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": _CALLED, "arguments": json.dumps(_ARGUMENTS)}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _shows(render: Render, form: TemplateInput, role: str) -> bool:
    messages = form.messages(_conversation(role))
    return _MARKS[role] in (render(messages, [_TOOL] if role == "tool" else None) or "")


def _wants_parts(render: Render, form: TemplateInput, role: str) -> bool:
    as_parts = replace(form, parts=form.parts | {role})
    return not _shows(render, form, role) and _shows(render, as_parts, role)


def _with_arguments(render: Render, form: TemplateInput) -> TemplateInput:
    user = {"role": "user", "content": _MARKS["user"]}
    contents = [(_MARKS["assistant"], NO_CONTENT[0]), *((None, kind) for kind in NO_CONTENT)]
    is_object = is_text = takes_text = False
    for content, kind in contents:
        # A template that lists arguments fails with text, and one that adds them to text fails with an object.
        for has_text in (False, True):
            form_so = replace(form, no_content=kind, has_text_arguments=has_text)
            text = render(form_so.messages([user, _calling(content)]), [_TOOL]) or ""
            if has_text:
                is_text, takes_text = is_text or json.dumps(_ARGUMENTS) in text, takes_text or _VALUE in text
            else:
                is_object = is_object or (_VALUE in text and repr(_ARGUMENTS) not in text)
    return replace(form, takes_text=takes_text, has_text_arguments=is_text and not is_object)


def _no_content(render: Render, form: TemplateInput) -> NoContent:
    """Return what a message without text has, so that the template writes its calls and nothing else."""
    scores = {kind: _score(render, replace(form, no_content=kind)) for kind in NO_CONTENT}
    return max(NO_CONTENT, key=lambda kind: scores[kind])  # the first of the best


def _score(render: Render, form: TemplateInput) -> int:
    user, result, answer = ({"role": role, "content": _MARKS[role]} for role in ("user", "tool", "assistant"))
    result["tool_call_id"] = "abcdefghi"
    score = 0
    for more in ([], [result], [result, answer, user]):
        with_text, without = (
            render(form.messages([user, _calling(content), *more]), [_TOOL]) for content in (_MARKS["assistant"], None)
        )
        if without is not None:
            is_clean = without.count("None") <= (with_text or "").count("None")
            score += 2 if _CALLED in without and is_clean else 1
    return score
