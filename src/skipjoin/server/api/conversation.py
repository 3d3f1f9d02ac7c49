from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from skipjoin.formats.conversation import TOOL_NAME
from skipjoin.formats.template_input import text_of
from skipjoin.server.api.fields import MAX_LABEL, Body, Ignored, Label, Null, Off, Only, one_of, text_or_list

MAX_MESSAGES = 4096
MAX_TOOLS = 1024


class TextPart(Body):
    type: Annotated[Any, Only("text", why="models get no images, sound or files")]
    text: str
    cache_control: Ignored = None
    prompt_cache_breakpoint: Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _take_refusal(cls, given: Any) -> Any:
        """Read a refusal as the text that the assistant wrote."""
        if isinstance(given, dict) and given.get("type") == "refusal" and "refusal" in given and "text" not in given:
            return {("text" if key == "refusal" else key): value for key, value in given.items()} | {"type": "text"}
        return given


Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("~list")],
    one_of(text_or_list, "must be a string or a list of text parts"),
]


class CalledFunction(Body):
    name: Annotated[str, Field(max_length=MAX_LABEL)]
    arguments: str | None = None
    parsed_arguments: Ignored = None


class ToolCall(Body):
    id: Annotated[str, Field(max_length=MAX_LABEL)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    extra_content: Ignored = None
    provider_specific_fields: Ignored = None


ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_TOOLS), Field(fail_fast=True)]


def _check_role(role: Any) -> Any:
    if role == "function":
        raise PydanticCustomError("tools", "functions are called by tools here: use tools, and the role tool")
    return role


def _check_no_function(call: Any) -> Any:
    if call:
        raise PydanticCustomError("tools", "functions are called by tools here: use tools and tool_calls")
    return call


class Message(Body):
    """Message of a conversation. "developer" means "system"."""

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_check_role)]
    tool_calls: ToolCalls | None = None
    refusal: str | None = None
    function_call: Annotated[Null, BeforeValidator(_check_no_function)] = None
    content: Annotated[Content | None, Field(validate_default=True)] = None
    tool_call_id: Annotated[Label, Field(validate_default=True)] = None
    name: Label = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    # Of OpenRouter and LiteLLM, beside the text.
    reasoning_details: Ignored = None
    thinking_blocks: Ignored = None
    annotations: Ignored = None
    audio: Null = None
    parsed: Ignored = None
    # lm-evaluation-harness sends the first. Agents mark messages for Anthropic's cache, and LiteLLM adds the last.
    type: Annotated[Any, Only(None, "text", "message")] = None
    id: Ignored = None
    cache_control: Ignored = None
    provider_specific_fields: Ignored = None
    prefix: Off = None

    @field_validator("tool_calls")
    @classmethod
    def _is_of_assistant(cls, value: list[ToolCall] | None, info: ValidationInfo) -> list[ToolCall] | None:
        if value and info.data.get("role") not in ("assistant", None):
            raise ValueError("only messages of the assistant have calls")
        return value

    @field_validator("content")
    @classmethod
    def _may_be_missing(cls, value: Any, info: ValidationInfo) -> Any:
        # The assistant's may be empty: an answer that was cut in its reasoning has none.
        if value is None and info.data.get("role") != "assistant":
            raise ValueError("must be a string or a list of text parts")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _belongs_to_role(cls, value: str | None, info: ValidationInfo) -> str | None:
        is_result = info.data.get("role") == "tool"
        if is_result and not value:
            raise ValueError("a message with the role tool needs the id of the call that it answers")
        if not is_result and value is not None:
            raise ValueError("only messages with the role tool have it")
        return value

    @property
    def plain_content(self) -> str | list[dict[str, str]]:
        content = self.content or self.refusal or ""
        return content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]

    @property
    def text(self) -> str:
        return text_of(self.plain_content)

    @property
    def thoughts(self) -> str | None:
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning

    @property
    def texts(self) -> list[str]:
        calls = [text for call in self.tool_calls or () for text in (call.function.name, call.function.arguments or "")]
        return [self.text, self.thoughts or "", *calls]


class Function(Body):
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Annotated[Any, Only("function", why="custom tools are for /v1/responses")]
    function: Function
    cache_control: Ignored = None


class ChosenFunction(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS), Field(fail_fast=True)]


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind(value: Any) -> str | None:
    if isinstance(value, dict):
        return "~allowed" if value.get("type") == "allowed_tools" else "~named"
    return "~mode" if isinstance(value, str) else None


def check_unique(names: Iterable[str]) -> None:
    known: set[str] = set()
    for name in names:
        if name in known:
            raise ValueError(f"each name must be unique, got {name!r} twice")
        known.add(name)


def _check_names(tools: list[Tool]) -> list[Tool]:
    check_unique(tool.function.name for tool in tools)
    return tools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), Field(fail_fast=True)]
UniqueTools = Annotated[Tools, AfterValidator(_check_names)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~mode")]
    | Annotated[NamedChoice, Tag("~named")]
    | Annotated[AllowedChoice, Tag("~allowed")],
    one_of(_choice_kind, 'must be "none", "auto", "required" or an object that names functions'),
]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), Field(fail_fast=True)]


def functions_of(tools: list[Tool] | None) -> list[dict[str, Any]]:
    return [tool.function.model_dump() for tool in tools or ()]
