"""Body of POST /v1/responses, OpenAI's format for agents."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, Tag, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from skipjoin.formats.conversation import TOOL_NAME
from skipjoin.sampling import INT32, SamplingParams, parameters_of
from skipjoin.server.api.conversation import (
    MAX_MESSAGES,
    MAX_TOOLS,
    AllowedChoice,
    AllowedTools,
    check_unique,
)
from skipjoin.server.api.dialects.bodies import (
    ConvertedBody,
    HostedTool,
    Turns,
    call_of,
    format_of,
    function_choice,
    hosted_kind,
    only_type,
    only_types,
    text_parts,
    tools_of,
)
from skipjoin.server.api.fields import MAX_LABEL, Body, Ignored, Null, Off, Only, one_of, text_or_list
from skipjoin.server.api.protocol import ChatRequest, ResponseFormat

# The argument of custom tools, as models see them.
CUSTOM_INPUT = "input"
_LOGPROBS = "message.output_text.logprobs"
_SYSTEM = ("system", "developer")
Status = Literal["in_progress", "completed", "incomplete"] | None
Id = Annotated[str, Field(max_length=MAX_LABEL)]


_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_ONLY_TEXT = only_types("part", _TEXTS, "only text is supported, got {type}")


class ContentPart(Body):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
    text: str = ""
    refusal: str = ""
    annotations: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None
    prompt_cache_breakpoint: Ignored = None

    @property
    def words(self) -> str:
        return self.text or self.refusal


Parts = Annotated[list[Annotated[ContentPart, _ONLY_TEXT]], Field(fail_fast=True)]


Words = Annotated[
    Annotated[str, Tag("~text")] | Annotated[Parts, Tag("~list")],
    one_of(text_or_list, "must be a string or a list of text parts"),
]


class ResponsesMessage(Body):
    """Message of an input. "developer" means "system"."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Words
    id: Ignored = None
    status: Status = None
    phase: Ignored = None


class FunctionCall(Body):
    type: Literal["function_call"]
    call_id: Id
    name: Id
    arguments: str
    id: Ignored = None
    status: Status = None
    namespace: Id | None = None
    caller: Ignored = None
    parsed_arguments: Ignored = None
    async_: Annotated[Off, Field(alias="async")] = None


class FunctionCallOutput(Body):
    type: Literal["function_call_output"]
    call_id: Id
    output: Words
    id: Ignored = None
    status: Status = None
    name: Ignored = None
    namespace: Ignored = None
    caller: Ignored = None


class CustomCall(Body):
    type: Literal["custom_tool_call"]
    call_id: Id
    name: Id
    input: str
    id: Ignored = None
    status: Status = None
    namespace: Id | None = None
    caller: Ignored = None


class CustomOutput(FunctionCallOutput):
    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]


class ReasoningItem(Body):
    """Reasoning of an earlier answer, or a summary of it. Encrypted reasoning of other servers is left out."""

    type: Literal["reasoning"]
    id: Ignored = None
    summary: Parts | None = None
    content: Parts | None = None
    encrypted_content: Ignored = None
    status: Status = None


class ItemReference(Body):
    """Item of a stored response, which replaces it before the conversation is read."""

    type: Literal["item_reference"]
    id: Id


ITEMS = (ResponsesMessage, FunctionCall, FunctionCallOutput, CustomCall, CustomOutput, ReasoningItem)
_KINDS = {
    "message": "~message",
    "function_call": "~call",
    "function_call_output": "~output",
    "custom_tool_call": "~custom",
    "custom_tool_call_output": "~result",
    "reasoning": "~reasoning",
    "item_reference": "~reference",
}


def _item_kind(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    return "~message" if kind is None and "role" in value else _KINDS.get(kind) if isinstance(kind, str) else None


Item = Annotated[
    Annotated[ResponsesMessage, Tag("~message")]
    | Annotated[FunctionCall, Tag("~call")]
    | Annotated[FunctionCallOutput, Tag("~output")]
    | Annotated[CustomCall, Tag("~custom")]
    | Annotated[CustomOutput, Tag("~result")]
    | Annotated[ReasoningItem, Tag("~reasoning")]
    | Annotated[ItemReference, Tag("~reference")],
    one_of(_item_kind, f"must be an item of the type {', '.join(_KINDS)}"),
]


Input = Annotated[
    Annotated[str, Field(min_length=1), Tag("~text")]
    | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES), Field(fail_fast=True), Tag("~list")],
    one_of(text_or_list, "must be a string or a list of items"),
]


# Types of tools that OpenAI's servers run, or the beginnings of their names.
_HOSTED = ("code_interpreter", "file_search", "image_generation", "mcp", "tool_search", "web_search")
_TOOLS = {"function": "~function", "custom": "~custom", "namespace": "~namespace"}
_NO_SUCH_TOOL = "this server runs no tools of the type {type}: only functions"
_NO_LARK = "grammars must be regular expressions, with syntax regex: a call is JSON, in which others are not enforced"


def _tool_kind(tool: Any) -> str | None:
    if hosted_kind(tool, _HOSTED):
        return "~hosted"
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return _TOOLS.get(kind) if isinstance(kind, str) else None


class FunctionTool(Body):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: Ignored = None
    defer_loading: Off = None
    allowed_callers: Ignored = None
    async_: Annotated[Off, Field(alias="async")] = None


class CustomText(Body):
    type: Literal["text"]


class CustomGrammar(Body):
    type: Literal["grammar"]
    syntax: Annotated[Any, Only("regex", why=_NO_LARK)]
    definition: Annotated[str, Field(min_length=1)]


def _format_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {"text": "~text", "grammar": "~grammar"}.get(str(kind))


class CustomTool(Body):
    """Tool whose input is a text. Models see it as a function with the text as its one argument."""

    type: Literal["custom"]
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    format: (
        Annotated[
            Annotated[CustomText, Tag("~text")] | Annotated[CustomGrammar, Tag("~grammar")],
            one_of(_format_kind, "must be an object of the type text or grammar"),
        ]
        | None
    ) = None
    defer_loading: Off = None
    allowed_callers: Ignored = None
    async_: Annotated[Off, Field(alias="async")] = None

    @property
    def function(self) -> FunctionTool:
        text: dict[str, Any] = {"type": "string"}
        if isinstance(self.format, CustomGrammar):
            text["pattern"] = f"^(?:{self.format.definition})$"
        parameters = {
            "type": "object",
            "properties": {CUSTOM_INPUT: text},
            "required": [CUSTOM_INPUT],
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
        list[Annotated[FunctionTool, only_types("tools", ("function",), _NO_SUCH_TOOL)]],
        Field(max_length=MAX_TOOLS),
        Field(fail_fast=True),
    ]


OfferedTool = Annotated[
    Annotated[FunctionTool, Tag("~function")]
    | Annotated[CustomTool, Tag("~custom")]
    | Annotated[NamespaceTool, Tag("~namespace")]
    | Annotated[HostedTool, BeforeValidator(only_type), Tag("~hosted")],
    one_of(_tool_kind, "must be a tool of the type function, custom or namespace"),
    only_types("tools", _TOOLS, _NO_SUCH_TOOL, _HOSTED),
]


def full_name(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}__{name}"


class PlacedFunction(NamedTuple):
    """Function of a body: where its schema stands there, and its namespace."""

    tool: FunctionTool
    place: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def name(self) -> str:
        """Return the name that models see."""
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


class TextFormat(Body):
    """Format of the text. A schema is enforced whether `strict` or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @field_validator("schema_")
    @classmethod
    def _is_named_by_type(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("type") not in (None, "json_schema") and value is not None:
            raise ValueError("it must be null unless the type is json_schema")
        return value

    @model_validator(mode="after")
    def _has_name(self) -> TextFormat:
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise ValueError("name and schema must not be null with the type json_schema")
        return self

    @property
    def response_format(self) -> ResponseFormat:
        return format_of(self.type, self.name, self.schema_)


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Body):
    """Effort of the reasoning. A summary is accepted without effect, because the reasoning itself is returned."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Ignored = None
    encrypted_content: Ignored = None


Include = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]


class ResponsesRequest(ConvertedBody):
    """Body of POST /v1/responses."""

    large_fields: ClassVar[Mapping[str, str]] = {"input": "items"}

    input: Input
    instructions: str | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS), Field(fail_fast=True)] | None = None
    tool_choice: Annotated[Choice | None, Field(validate_default=True)] = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=parameters_of(SamplingParams)["logprobs"].parameter.high)] | None = None
    include: Annotated[list[Include], Field(max_length=16)] | None = None

    store: bool | None = None
    previous_response_id: Id | None = None
    conversation: Annotated[
        Any, Only(None, why="it stores no conversations; send the whole one as input, or previous_response_id")
    ] = None
    background: Annotated[Any, Only(None, False, why="use a batch, or a stream")] = None
    truncation: Literal["auto", "disabled"] | None = None
    response_format: Annotated[Any, Only(None, why="use text.format")] = None
    client_metadata: Ignored = None
    max_tool_calls: Ignored = None  # of tools that a server runs
    context_management: Annotated[Any, Only(None, [])] = None
    prompt: Null = None

    @field_validator("tools")
    @classmethod
    def _has_functions(cls, value: list[Any] | None) -> list[Any] | None:
        check_unique(function.name for function in _functions(value))
        hosted = next((tool.type for tool in value or () if isinstance(tool, HostedTool)), None)
        if hosted is not None and not _functions(value):
            raise PydanticCustomError("tools", _NO_SUCH_TOOL, {"type": hosted})
        return value

    @field_validator("tool_choice")
    @classmethod
    def _is_offered(cls, value: Any, info: ValidationInfo) -> Any:
        names = {function.name for function in _functions(info.data.get("tools"))}
        if value == "required" and not names:
            raise ValueError("required needs tools")
        chosen = value.tools if isinstance(value, AllowedFunctions) else [value]
        for function in chosen:
            if isinstance(function, NamedFunction) and function.full_name not in names:
                raise ValueError(f"must name one of the tools, got {function.full_name!r}")
        return value

    @cached_property
    def functions(self) -> dict[str, PlacedFunction]:
        """Return the functions by the names that models see."""
        return {function.name: function for function in _functions(self.tools)}

    def shortened(self, count: int) -> ChatRequest | None:
        """Return `chat` without the `count` oldest turns, or None if it has no more than these.

        System messages stay. A call goes with its results, without which it means nothing.
        """
        begins = [n for n, message in enumerate(self.chat.messages) if message.role not in (*_SYSTEM, "tool")]
        if count >= len(begins):
            return None
        first = begins[count]
        kept = [message for n, message in enumerate(self.chat.messages) if n >= first or message.role in _SYSTEM]
        return self.chat.model_copy(update={"messages": kept})

    def is_custom(self, name: str) -> bool:
        """Return whether a called tool is one whose input is a text."""
        function = self.functions.get(name)
        return function is not None and function.is_custom

    def called(self, name: str) -> dict[str, str]:
        """Return name and namespace of a function by the name that the model called."""
        function = self.functions.get(name)
        if function is None or function.namespace is None:
            return {"name": name}
        return {"name": function.tool.name, "namespace": function.namespace}

    def schema_places(self) -> list[str]:
        return [function.place for function in self.functions.values()]

    def to_chat(self) -> ChatRequest:
        text, reasoning = self.text or TextOptions(), self.reasoning or ReasoningOptions()
        has_logprobs = self.top_logprobs is not None or _LOGPROBS in (self.include or ())
        return ChatRequest.model_construct(
            **self.shared()
            | {
                "messages": self._messages(),
                "tools": tools_of((found, found.tool.parameters) for found in self.functions.values()),
                "tool_choice": _chat_choice(self.tool_choice),
                "parallel_tool_calls": self.parallel_tool_calls,
                "response_format": text.format and text.format.response_format,
                "reasoning_effort": reasoning.effort,
                "max_completion_tokens": self.max_output_tokens,
                "logprobs": has_logprobs or None,
                "top_logprobs": self.top_logprobs if has_logprobs else None,
            }
        )

    @property
    def references(self) -> dict[int, str]:
        """Return the ids of items that the input refers to, by position."""
        items = () if isinstance(self.input, str) else self.input
        return {number: item.id for number, item in enumerate(items) if isinstance(item, ItemReference)}

    def items(self) -> list[dict[str, Any]]:
        """Return the input as items in full, each with an id."""
        if isinstance(self.input, str):
            given: list[dict[str, Any]] = [{"role": "user", "content": self.input}]
        else:
            given = [item.model_dump(by_alias=True, exclude_unset=True) for item in self.input]
        return [_whole_item(item) for item in given]

    def _messages(self) -> Any:
        turns = Turns()
        if self.instructions:
            turns.add("system", self.instructions)
        if isinstance(self.input, str):
            turns.add("user", self.input)
            return turns.messages
        for item in self.input:
            if isinstance(item, FunctionCall):
                turns.call(call_of(item.call_id, full_name(item.namespace, item.name), item.arguments))
            elif isinstance(item, CustomCall):
                arguments = json.dumps({CUSTOM_INPUT: item.input}, ensure_ascii=False)
                turns.call(call_of(item.call_id, full_name(item.namespace, item.name), arguments))
            elif isinstance(item, ItemReference):
                continue  # replaced or refused before the conversation is used
            elif isinstance(item, FunctionCallOutput):
                turns.add("tool", text_parts(item.output), tool_call_id=item.call_id)
            elif isinstance(item, ReasoningItem):
                if words := "".join(part.words for part in item.content or item.summary or ()):
                    turns.think(words)
            elif item.role == "assistant":
                turns.say(text_parts(item.content))
            else:
                turns.add(item.role, text_parts(item.content))
        return turns.messages


_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def _whole_item(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    name = item.get("id") or f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"
    found = {**item, "type": kind, "id": name}
    if kind != "reasoning":
        found.setdefault("status", "completed")
    if kind == "message" and isinstance(text := item["content"], str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        found["content"] = [{"type": part, "text": text}]
    return found


def custom_input(arguments: str) -> str:
    """Return the input of a call of a custom tool, or its arguments as written if they were cut off."""
    try:
        return str(json.loads(arguments)[CUSTOM_INPUT])
    except (ValueError, LookupError, TypeError):
        return arguments


def _functions(tools: list[Any] | None) -> list[PlacedFunction]:
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


def _chat_choice(choice: Any) -> Any:
    if isinstance(choice, NamedFunction):
        return function_choice(choice.full_name)
    if isinstance(choice, AllowedFunctions):
        tools = [function_choice(tool.full_name) for tool in choice.tools]
        allowed = AllowedTools.model_construct(mode=choice.mode, tools=tools)
        return AllowedChoice.model_construct(type="allowed_tools", allowed_tools=allowed)
    return choice
