from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from skipjoin.formats.conversation import TOOL_NAME
from skipjoin.sampling import INT32
from skipjoin.server.api.chat_body import ChatRequest
from skipjoin.server.api.conversation import MAX_MESSAGES, MAX_TOOLS, check_unique
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
from skipjoin.server.api.fields import (
    MAX_LABEL,
    Body,
    Ignored,
    Integer,
    Label,
    Null,
    Off,
    Only,
    StopText,
    one_of,
    text_or_list,
)

Id = Annotated[str, Field(min_length=1, max_length=MAX_LABEL)]


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Ignored = None
    parsed_output: Ignored = None

    @property
    def words(self) -> str:
        return self.text


def _only(*types: str) -> BeforeValidator:
    why = f"blocks of the type {{type}} are not supported here: only {', '.join(types)}"
    return only_types("block", types, why)


Words = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[list[Annotated[TextBlock, _only("text")]], Field(fail_fast=True), Tag("~list")],
    one_of(text_or_list, "must be a string or a list of text blocks"),
]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Id
    name: Id
    input: dict[str, Any]
    cache_control: Ignored = None
    caller: Ignored = None
    toolset_name: Null = None


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: Words | None = None
    is_error: Ignored = None  # its content says so
    cache_control: Ignored = None
    toolset_name: Null = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None


class RedactedThinkingBlock(Body):
    """Encrypted reasoning of another server, which is left out."""

    type: Literal["redacted_thinking"]
    data: Ignored = None


BLOCKS = (TextBlock, ToolUseBlock, ToolResultBlock, ThinkingBlock, RedactedThinkingBlock)


def _block_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"~{kind}" if isinstance(kind, str) else None


Block = Annotated[
    Annotated[TextBlock, Tag("~text")]
    | Annotated[ToolUseBlock, Tag("~tool_use")]
    | Annotated[ToolResultBlock, Tag("~tool_result")]
    | Annotated[ThinkingBlock, Tag("~thinking")]
    | Annotated[RedactedThinkingBlock, Tag("~redacted_thinking")],
    one_of(_block_kind, "must be a block with a type"),
    _only("text", "tool_use", "tool_result", "thinking", "redacted_thinking"),
]


Content = Annotated[
    Annotated[str, Tag("~text")] | Annotated[list[Block], Field(fail_fast=True), Tag("~list")],
    one_of(text_or_list, "must be a string or a list of blocks"),
]
# Blocks that only one role has.
_ROLES: dict[type[Body], str] = {
    ToolUseBlock: "assistant",
    ThinkingBlock: "assistant",
    RedactedThinkingBlock: "assistant",
    ToolResultBlock: "user",
}


class MessagesTurn(Body):
    role: Literal["user", "assistant", "system"]
    content: Content

    @field_validator("content")
    @classmethod
    def _belongs_to_role(cls, value: Any, info: ValidationInfo) -> Any:
        for block in value if isinstance(value, list) else ():
            role = _ROLES.get(type(block))
            if role is not None and info.data.get("role") not in (role, None):
                raise ValueError(f"only messages of the {role} have blocks of the type {block.type}")
        return value


# Beginnings of the types of tools that Anthropic's servers run.
_HOSTED = ("code_execution", "web_fetch", "web_search")
_NO_SUCH_TOOL = "this server runs no tools of the type {type}: only those with input_schema"


def _tool_kind(tool: Any) -> str | None:
    if isinstance(tool, HostedTool) or hosted_kind(tool, _HOSTED):
        return "~hosted"
    return "~custom" if isinstance(tool, (dict, _InputTool)) else None


class _InputTool(Body):
    name: Annotated[str, Field(pattern=TOOL_NAME)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None
    allowed_callers: Ignored = None
    defer_loading: Off = None


InputTool = Annotated[
    Annotated[_InputTool, Tag("~custom")] | Annotated[HostedTool, BeforeValidator(only_type), Tag("~hosted")],
    one_of(_tool_kind, "must be a tool with a name and input_schema"),
    only_types("tools", ("custom",), _NO_SUCH_TOOL, _HOSTED),
]


class InputChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Integer(1, INT32)] | None = None
    display: Ignored = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: Label = None
    session_id: Label = None


class MessagesRequest(ConvertedBody):
    """Body of POST /v1/messages and /v1/messages/count_tokens."""

    large_fields: ClassVar[Mapping[str, str]] = {"messages": "turns"}

    messages: Annotated[list[MessagesTurn], Field(min_length=1, max_length=MAX_MESSAGES), Field(fail_fast=True)]
    system: Words | None = None
    max_tokens: Annotated[int, Integer(1, INT32)] | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16), Field(fail_fast=True)] | None = None
    tools: Annotated[list[InputTool], Field(max_length=MAX_TOOLS), Field(fail_fast=True)] | None = None
    tool_choice: Annotated[InputChoice | None, Field(validate_default=True)] = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the former name of output_config.format
    metadata: Metadata | None = None  # type: ignore[assignment]
    service_tier: Literal["auto", "standard_only", "flex", "priority"] | None = None  # type: ignore[assignment]
    stop: Annotated[Any, Only(None, why="use stop_sequences")] = None
    response_format: Annotated[Any, Only(None, why="use output_config.format")] = None
    thread: Annotated[Any, Only(None, False, why="conversations are not stored; send all messages")] = None
    container: Null = None
    mcp_servers: Annotated[Any, Only(None, [])] = None
    inference_geo: Ignored = None
    speed: Annotated[Any, Only(None, "standard")] = None
    # It saves tokens of old results, which remain.
    context_management: Ignored = None
    diagnostics: Ignored = None

    @field_validator("tools")
    @classmethod
    def _has_functions(cls, value: list[Any] | None) -> list[Any] | None:
        check_unique(tool.name for tool in _functions(value).values())
        if value and not _functions(value):
            raise PydanticCustomError("tools", _NO_SUCH_TOOL, {"type": value[0].type})
        return value

    @field_validator("tool_choice")
    @classmethod
    def _is_offered(cls, value: InputChoice | None, info: ValidationInfo) -> InputChoice | None:
        names = {tool.name for tool in _functions(info.data.get("tools")).values()}
        if value is not None and value.type == "any" and not names:
            raise ValueError("any needs tools")
        if value is not None and value.type == "tool" and value.name not in names:
            raise ValueError(f"must name one of the tools, got {value.name!r}")
        return value

    @model_validator(mode="after")
    def _has_user(self) -> MessagesRequest:
        if self.user is None and self.metadata is not None:
            self.user = self.metadata.user_id
        return self

    @property
    def session(self) -> str | None:
        if (metadata := self.metadata) is None:
            return None
        # Claude Code appends the id of its session to that of the user.
        of_user = metadata.user_id if metadata.user_id is not None and "session" in metadata.user_id else None
        return metadata.session_id or of_user

    def to_chat(self) -> ChatRequest:
        config, choice = self.output_config or OutputConfig(), self.tool_choice
        is_single = choice and choice.disable_parallel_tool_use
        given = config.format or self.output_format
        form = None if given is None else format_of("json_schema", "output", given.schema_)
        messages = self._messages()
        last = messages[-1]
        has_prefill = last.role == "assistant" and not last.tool_calls and bool(last.text.strip())
        budget = self.thinking and self.thinking.budget_tokens
        thinks = None if self.thinking is None else self.thinking.type != "disabled"
        return ChatRequest.model_construct(
            **self.shared()
            | {
                "metadata": None,
                "service_tier": None,
                "messages": messages,
                "continue_final_message": has_prefill or None,
                "max_tokens": self.max_tokens,
                "stop": self.stop_sequences,
                "tools": tools_of((tool, tool.input_schema) for tool in _functions(self.tools).values()),
                "tool_choice": choice and _chat_choice(choice),
                "parallel_tool_calls": None if is_single is None else not is_single,
                "response_format": form,
                "reasoning_effort": config.effort,
                "chat_template_kwargs": None if thinks is None else {"enable_thinking": thinks, "thinking": thinks},
            }
            | ({} if budget is None else {"thinking_token_budget": budget})
        )

    def schema_places(self) -> list[str]:
        return [f"{place}.input_schema" for place in _functions(self.tools)]

    def _messages(self) -> Any:
        turns = Turns()
        if self.system:
            turns.add("system", text_parts(self.system))
        for message in self.messages:
            if isinstance(message.content, str):
                turns.add(message.role, message.content)
            elif message.role == "assistant":
                _add_answer(turns, message.content)
            else:
                _add_request(turns, message.role, message.content)
        return turns.messages


def _functions(tools: list[Any] | None) -> dict[str, _InputTool]:
    return {f"tools.{n}": tool for n, tool in enumerate(tools or ()) if isinstance(tool, _InputTool)}


def _add_answer(turns: Turns, blocks: list[Any]) -> None:
    turns.begin()
    if thoughts := "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        turns.think(thoughts)
    if texts := [block for block in blocks if isinstance(block, TextBlock)]:
        turns.say(text_parts(texts))
    for block in blocks:
        if isinstance(block, ToolUseBlock):
            turns.call(call_of(block.id, block.name, json.dumps(block.input, ensure_ascii=False)))


def _add_request(turns: Turns, role: str, blocks: list[Any]) -> None:
    texts: list[TextBlock] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        if texts:
            turns.add(role, text_parts(texts))
            texts = []
        turns.add("tool", text_parts(block.content or ""), tool_call_id=block.tool_use_id)
    if texts or not blocks:
        turns.add(role, text_parts(texts))


def _chat_choice(choice: InputChoice) -> Any:
    if choice.type == "tool":
        return function_choice(choice.name)
    return "required" if choice.type == "any" else choice.type
