from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from skipjoin.formats.table import HERMES, Calls, OutputFormat
from skipjoin.formats.template_input import text_of

_RESULT, _END_OF_RESULT = "<tool_response>\n", "\n</tool_response>"


def prompted_format(known: OutputFormat | None) -> OutputFormat:
    """Return a format of calls with the marks that most models have seen in their training."""
    if known is None:
        return replace(HERMES, name="json", think=None, is_prompted=True)
    markers = tuple(dict.fromkeys((*known.markers, *HERMES.markers)))
    return replace(known, name="json", calls=HERMES.calls, markers=markers, is_prompted=True)


def prompted_messages(
    messages: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]], calls: Calls, *, has_system: bool
) -> list[dict[str, Any]]:
    """Return a conversation with tools as text, for models whose templates know none.

    Without `has_system`, the first message of the user describes them.
    """
    found: list[dict[str, Any]] = []
    is_result = False  # the last message has results, which go on with the next ones, because templates want turns
    for message in messages:
        role, text = message["role"], text_of(message.get("content"))
        if role == "tool" or (role == "user" and is_result):
            text, space = (_RESULT + text + _END_OF_RESULT, "\n") if role == "tool" else (text, "\n\n")
            if is_result:
                found[-1]["content"] += space + text
            else:
                found.append({"role": "user", "content": text})
            is_result = role == "tool"
            continue
        is_result = False
        found.append({name: value for name, value in message.items() if name != "tool_calls"})
        if message.get("tool_calls"):
            found[-1]["content"] = "\n".join(filter(None, (text, _written(calls, message["tool_calls"]))))
    return _described(found, functions, calls, has_system=has_system) if functions else found


def _described(
    messages: list[dict[str, Any]], functions: Sequence[Mapping[str, Any]], calls: Calls, *, has_system: bool
) -> list[dict[str, Any]]:
    text = _description(functions, calls)
    roles = [message["role"] for message in messages]
    if has_system:
        if roles and roles[0] in ("system", "developer"):
            messages[0]["content"] = f"{text_of(messages[0]['content'])}\n\n{text}"
            return messages
        return [{"role": "system", "content": text}, *messages]
    if "user" not in roles:
        return [{"role": "user", "content": text}, *messages]
    first = messages[roles.index("user")]
    first["content"] = f"{text}\n\n{text_of(first['content'])}"
    return messages


def _description(functions: Sequence[Mapping[str, Any]], calls: Calls) -> str:
    lines = [json.dumps(function, ensure_ascii=False) for function in functions]
    example = calls.before + "NAME" + calls.middle + '{"ARGUMENT": VALUE}' + calls.after
    return "\n".join(
        (
            "You can call these functions. Each line has a name, a purpose and the JSON schema of the arguments:",
            *lines,
            "",
            "To call a function, write its name and its arguments as JSON in this form:",
            example,
            f"The result is then given between {_RESULT.strip()} and {_END_OF_RESULT.strip()}. "
            "If no function helps, answer in words.",
        )
    )


def _written(calls: Calls, given: Sequence[Mapping[str, Any]]) -> str:
    texts = []
    for call in given:
        function = call["function"]
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        texts.append(calls.before + function["name"] + calls.middle + ((arguments or "").strip() or "{}") + calls.after)
    return calls.begin + (calls.between or "\n").join(texts) + calls.end
