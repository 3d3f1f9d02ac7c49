from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from skipjoin.sampling import INT32, SamplingParams, parameters_of
from skipjoin.server.api.chat_body import ChatRequest
from skipjoin.server.api.conversation import MAX_TOOLS, check_unique
from skipjoin.server.api.dialects.bodies import (
    ConvertedBody,
    HostedTool,
    Turns,
    call_of,
    format_of,
    text_parts,
    tools_of,
)
from skipjoin.server.api.dialects.responses_items import (
    CustomCall,
    FunctionCall,
    FunctionCallOutput,
    Id,
    Input,
    ItemReference,
    ReasoningItem,
    whole_item,
)
from skipjoin.server.api.dialects.responses_tools import (
    NO_SUCH_TOOL,
    AllowedFunctions,
    Choice,
    NamedFunction,
    OfferedTool,
    PlacedFunction,
    chat_choice,
    custom_arguments,
    full_name,
    functions_of,
)
from skipjoin.server.api.fields import Body, Ignored, Integer, Label, Null, Only
from skipjoin.server.api.protocol import ResponseFormat

_LOGPROBS = "message.output_text.logprobs"
_SYSTEM = ("system", "developer")


class TextFormat(Body):
    """Format of the text. A schema is enforced whether `strict` or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: Label = None
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
    def _has_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("schema must not be null with the type json_schema")
        return self

    @property
    def response_format(self) -> ResponseFormat:
        return format_of(self.type, self.name, self.schema_)


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Body):
    """Effort of the reasoning, which is returned itself instead of a summary."""

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
    max_output_tokens: Annotated[int, Integer(1, INT32)] | None = None
    top_logprobs: Annotated[int, Integer(0, parameters_of(SamplingParams)["logprobs"].parameter.high)] | None = None
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
        check_unique(function.name for function in functions_of(value))
        hosted = next((tool.type for tool in value or () if isinstance(tool, HostedTool)), None)
        if hosted is not None and not functions_of(value):
            raise PydanticCustomError("tools", NO_SUCH_TOOL, {"type": hosted})
        return value

    @field_validator("tool_choice")
    @classmethod
    def _is_offered(cls, value: Any, info: ValidationInfo) -> Any:
        names = {function.name for function in functions_of(info.data.get("tools"))}
        if value == "required" and not names:
            raise ValueError("required needs tools")
        chosen = value.tools if isinstance(value, AllowedFunctions) else [value]
        for function in chosen:
            if isinstance(function, NamedFunction) and function.full_name not in names:
                raise ValueError(f"must name one of the tools, got {function.full_name!r}")
        return value

    @cached_property
    def functions(self) -> dict[str, PlacedFunction]:
        return {function.name: function for function in functions_of(self.tools)}

    def shortened(self, count: int) -> ChatRequest | None:
        """Return `chat` without the `count` oldest turns, or None if none would be left.

        System messages stay, and a call goes with its results.
        """
        begins = [n for n, message in enumerate(self.chat.messages) if message.role not in (*_SYSTEM, "tool")]
        if count >= len(begins):
            return None
        first = begins[count]
        kept = [message for n, message in enumerate(self.chat.messages) if n >= first or message.role in _SYSTEM]
        return self.chat.model_copy(update={"messages": kept})

    def is_custom(self, name: str) -> bool:
        function = self.functions.get(name)
        return function is not None and function.is_custom

    def called(self, name: str) -> dict[str, str]:
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
                "tool_choice": chat_choice(self.tool_choice),
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
        items = () if isinstance(self.input, str) else self.input
        return {number: item.id for number, item in enumerate(items) if isinstance(item, ItemReference)}

    def items(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            given: list[dict[str, Any]] = [{"role": "user", "content": self.input}]
        else:
            given = [item.model_dump(by_alias=True, exclude_unset=True) for item in self.input]
        return [whole_item(item) for item in given]

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
                turns.call(call_of(item.call_id, full_name(item.namespace, item.name), custom_arguments(item.input)))
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
