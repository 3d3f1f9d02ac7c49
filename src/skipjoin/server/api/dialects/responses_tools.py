from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, Tag

from skipjoin.formats.conversation import TOOL_NAME
from skipjoin.server.api.conversation import MAX_TOOLS, AllowedChoice, AllowedTools
from skipjoin.server.api.dialects.bodies import HostedTool, function_choice, hosted_kind, only_type, only_types
from skipjoin.server.api.fields import Body, Ignored, Off, Only, one_of

# The argument of custom tools, as models see them.
_CUSTOM_INPUT = "input"

# Types of tools that OpenAI's servers run, or the beginnings of their names.
_HOSTED = ("code_interpreter", "file_search", "image_generation", "mcp", "tool_search", "web_search")
_TOOLS = {"function": "~function", "custom": "~custom", "namespace": "~namespace"}
NO_SUCH_TOOL = "this server runs no tools of the type {type}: only functions"
_NO_LARK = "grammars must be regular expressions, with syntax regex: a call is JSON, in which others are not enforced"


def _tool_kind(tool: Any) -> str | None:
    if hosted_kind(tool, _HOSTED):
        return "~hosted"
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return _TOOLS.get(kind) if isinstance(kind, str) else None


class _NamedTool(Body):
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    defer_loading: Off = None
    allowed_callers: Ignored = None
    async_: Annotated[Off, Field(alias="async")] = None


class FunctionTool(_NamedTool):
    type: Literal["function"]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: Ignored = None


class CustomText(Body):
    type: Literal["text"]


class CustomGrammar(Body):
    type: Literal["grammar"]
    syntax: Annotated[Any, Only("regex", why=_NO_LARK)]
    definition: Annotated[str, Field(min_length=1)]


def _format_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {"text": "~text", "grammar": "~grammar"}.get(str(kind))


class CustomTool(_NamedTool):
    """Tool whose input is a text, which models see as a function with one argument."""

    type: Literal["custom"]
    format: (
        Annotated[
            Annotated[CustomText, Tag("~text")] | Annotated[CustomGrammar, Tag("~grammar")],
            one_of(_format_kind, "must be an object of the type text or grammar"),
        ]
        | None
    ) = None

    @property
    def function(self) -> FunctionTool:
        text: dict[str, Any] = {"type": "string"}
        if isinstance(self.format, CustomGrammar):
            text["pattern"] = f"^(?:{self.format.definition})$"
        parameters = {
            "type": "object",
            "properties": {_CUSTOM_INPUT: text},
            "required": [_CUSTOM_INPUT],
            "additionalProperties": False,
        }
        return FunctionTool.model_construct(
            type="function", name=self.name, description=self.description, parameters=parameters, strict=True
        )


class NamespaceTool(Body):
    """Functions with a shared name, which models see as `NAMESPACE__NAME`. Codex offers plugins' tools so."""

    type: Literal["namespace"]
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    tools: Annotated[
        list[Annotated[FunctionTool, only_types("tools", ("function",), NO_SUCH_TOOL)]],
        Field(max_length=MAX_TOOLS),
        Field(fail_fast=True),
    ]


OfferedTool = Annotated[
    Annotated[FunctionTool, Tag("~function")]
    | Annotated[CustomTool, Tag("~custom")]
    | Annotated[NamespaceTool, Tag("~namespace")]
    | Annotated[HostedTool, BeforeValidator(only_type), Tag("~hosted")],
    one_of(_tool_kind, "must be a tool of the type function, custom or namespace"),
    only_types("tools", _TOOLS, NO_SUCH_TOOL, _HOSTED),
]


def full_name(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}__{name}"


class PlacedFunction(NamedTuple):
    tool: FunctionTool
    place: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def name(self) -> str:
        return full_name(self.namespace, self.tool.name)

    @property
    def description(self) -> str | None:
        return self.tool.description

    @property
    def strict(self) -> bool | None:
        return self.tool.strict


class NamedFunction(Body):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    @property
    def full_name(self) -> str:
        return full_name(self.namespace, self.name)


class AllowedFunctions(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS), Field(fail_fast=True)]


def _choice_kind(value: Any) -> str | None:
    if isinstance(value, dict):
        kinds = {"function": "~named", "custom": "~named", "allowed_tools": "~allowed"}
        return kinds.get(str(value.get("type")))
    return "~mode" if isinstance(value, str) else None


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~mode")]
    | Annotated[NamedFunction, Tag("~named")]
    | Annotated[AllowedFunctions, Tag("~allowed")],
    one_of(_choice_kind, 'must be "none", "auto", "required" or an object that names functions'),
]


def custom_input(arguments: str) -> str:
    """Return the text; the arguments as written if they were cut off."""
    try:
        return str(json.loads(arguments)[_CUSTOM_INPUT])
    except (ValueError, LookupError, TypeError):
        return arguments


def custom_arguments(text: str) -> str:
    return json.dumps({_CUSTOM_INPUT: text}, ensure_ascii=False)


def functions_of(tools: list[Any] | None) -> list[PlacedFunction]:
    found: list[PlacedFunction] = []
    for number, tool in enumerate(tools or ()):
        place = f"tools.{number}"
        if isinstance(tool, FunctionTool):
            found.append(PlacedFunction(tool, f"{place}.parameters"))
        elif isinstance(tool, CustomTool):
            found.append(PlacedFunction(tool.function, f"{place}.format", is_custom=True))
        elif isinstance(tool, NamespaceTool):
            places = [f"{place}.tools.{n}.parameters" for n in range(len(tool.tools))]
            found += [PlacedFunction(inner, at, tool.name) for inner, at in zip(tool.tools, places, strict=True)]
    return found


def chat_choice(choice: Any) -> Any:
    if isinstance(choice, NamedFunction):
        return function_choice(choice.full_name)
    if isinstance(choice, AllowedFunctions):
        tools = [function_choice(tool.full_name) for tool in choice.tools]
        allowed = AllowedTools.model_construct(mode=choice.mode, tools=tools)
        return AllowedChoice.model_construct(type="allowed_tools", allowed_tools=allowed)
    return choice
