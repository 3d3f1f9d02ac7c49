"""Messages and tools of OpenAI's form as chat templates expect them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from skipjoin.formats.table import Calls

# The names of the Model Context Protocol, which include OpenAI's. Others could not stand in all formats of calls.
TOOL_NAME = r"^[A-Za-z0-9_.-]{1,128}$"
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def no_tools(param: str) -> str:
    """Return the error for tools if the template does not support them."""
    what = "tools" if param == "tools" else "calls and results of tools"
    return (
        f"{param}: this model's chat template has no support for tools: leave out {what}, use a model that was trained "
        "with tools, or give the server a template with them (--chat-template)"
    )


def template_message(message: Mapping[str, Any], calls: Calls | None) -> dict[str, Any]:
    """Return a message for the template.

    Args:
        message: With a content that is text or None, and calls whose arguments are JSON.
        calls: Format of the model's calls, if it is known.
    """
    found = {**message, "role": "system" if message["role"] == "developer" else message["role"]}
    if (given := message.get("tool_call_id")) is not None:
        found["tool_call_id"] = _call_id(given, calls)
    thoughts = message.get("reasoning_content")
    if (thoughts := message.get("reasoning") if thoughts is None else thoughts) is not None:
        # Templates differ in the name.
        found["reasoning_content"] = found["thinking"] = thoughts
    if message.get("tool_calls"):
        found["content"] = message.get("content") or None
        found["tool_calls"] = [_template_call(call, calls) for call in message["tool_calls"]]
    return found


def template_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function as a tool for the template."""
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": function.get("parameters") or {"type": "object", "properties": {}},
        },
    }


def _template_call(call: Mapping[str, Any], calls: Calls | None) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if not (calls is not None and calls.has_text_arguments):
        arguments = _decoded(arguments)
    return {
        "id": _call_id(call["id"], calls),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _call_id(given: str, calls: Calls | None) -> str:
    """Return an id that the template accepts; other servers' ids may begin or continue a conversation."""
    length = None if calls is None else calls.id_length
    if length is None or re.fullmatch(rf"[A-Za-z0-9]{{{length}}}", given):
        return given
    return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:length]


def _decoded(text: str) -> Any:
    """Return arguments as an object, or the text itself if the model wrote something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text
