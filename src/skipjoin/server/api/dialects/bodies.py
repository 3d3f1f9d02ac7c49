from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Annotated, Any, Protocol

from pydantic import BeforeValidator, model_validator
from pydantic_core import PydanticCustomError

from skipjoin.server.api.chat_body import ChatRequest
from skipjoin.server.api.conversation import (
    CalledFunction,
    ChosenFunction,
    Function,
    Message,
    NamedChoice,
    TextPart,
    Tool,
    ToolCall,
)
from skipjoin.server.api.fields import Body, Null, Off, Only
from skipjoin.server.api.protocol import GenerationBody, JsonSchema, ResponseFormat


class ConvertedBody(GenerationBody):
    """Body that becomes a chat request during validation, which is in a thread if it is large."""

    n: Annotated[Any, Only(None, 1)] = None
    prompt_logprobs: Null = None
    return_token_ids: Off = None

    @abstractmethod
    def to_chat(self) -> ChatRequest:
        """Its parts were validated as parts of this body."""

    def schema_places(self) -> list[str]:
        return []

    @cached_property
    def chat(self) -> ChatRequest:
        return self.to_chat()

    @model_validator(mode="after")
    def _is_converted(self) -> ConvertedBody:
        _ = self.chat
        return self

    def shared(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.model_fields_set & GenerationBody.model_fields.keys()}


def only_types(error: str, types: Collection[str], why: str, hosted: tuple[str, ...] = ()) -> BeforeValidator:
    """Refuse objects of other types, except those that begin with one of `hosted`. `why` has the {type}."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in types and not kind.startswith(hosted):
            raise PydanticCustomError(error, why, {"type": kind[:64]})
        return value

    return BeforeValidator(check)


class _Described(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str | None: ...
    @property
    def strict(self) -> bool | None: ...


def tools_of(tools: Iterable[tuple[_Described, dict[str, Any] | None]]) -> list[Tool] | None:
    functions = [
        Function.model_construct(name=of.name, description=of.description, parameters=parameters, strict=of.strict)
        for of, parameters in tools
    ]
    return [Tool.model_construct(type="function", function=function) for function in functions] or None


def function_choice(name: str | None) -> NamedChoice:
    return NamedChoice.model_construct(type="function", function=ChosenFunction.model_construct(name=name))


def format_of(kind: str, name: str | None, schema: Any) -> ResponseFormat:
    named = JsonSchema.model_construct(name=name, schema_=schema) if kind == "json_schema" else None
    return ResponseFormat.model_construct(type=kind, json_schema=named)


def text_parts(words: Any) -> str | list[TextPart]:
    if isinstance(words, str):
        return words
    return [TextPart.model_construct(type="text", text=part.words) for part in words]


def call_of(call_id: str, name: str, arguments: str | None) -> ToolCall:
    function = CalledFunction.model_construct(name=name, arguments=arguments)
    return ToolCall.model_construct(id=call_id, type="function", function=function)


class HostedTool(Body):
    type: str


def only_type(tool: Any) -> Any:
    return {"type": tool["type"][:64]}


def hosted_kind(tool: Any, prefixes: tuple[str, ...]) -> str | None:
    """Return the type of a tool that a provider's server runs.

    Agents offer them to every server. They are ignored beside functions, and refused alone.
    """
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) and kind.startswith(prefixes) else None


class Turns:
    """Builder of messages. Parts of one turn of the assistant become one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: Message | None = None

    def add(self, role: str, content: Any, **more: Any) -> None:
        self._turn = None
        self.messages.append(Message.model_construct(role=role, content=content, **more))

    def think(self, text: str) -> None:
        turn = self._turn
        if turn is None or turn.content is not None or turn.tool_calls:
            turn = self.begin()
        turn.reasoning_content = (turn.reasoning_content or "") + text

    def say(self, content: Any) -> None:
        turn = self._turn
        if turn is None or turn.content is not None:
            turn = self.begin()
        turn.content = content

    def call(self, call: ToolCall) -> None:
        turn = self._turn or self.begin()
        turn.tool_calls = [*(turn.tool_calls or ()), call]

    def begin(self) -> Message:
        self._turn = Message.model_construct(role="assistant")
        self.messages.append(self._turn)
        return self._turn
