from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The names of the Model Context Protocol, which include OpenAI's. Others could not stand in all formats of calls.
TOOL_NAME = r"^[A-Za-z0-9_.-]{1,128}$"
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def no_tools(param: str) -> str:
    what = "tools" if param == "tools" else "calls and results of tools"
    return (
        f"{param}: this model's chat template has no support for tools: leave out {what}, use a model that was trained "
        "with tools, give the server a template with them (--chat-template), or let it write them into the prompt "
        "(--tool-format json), which works with any model"
    )


def template_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": function.get("parameters") or {"type": "object", "properties": {}},
        },
    }
