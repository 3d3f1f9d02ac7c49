"""Bodies that become chat requests."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import Annotated, Any

from pydantic import model_validator

from skipjoin.server.api.conversation import CalledFunction, Function, Message, Tool, ToolCall
from skipjoin.server.api.fields import Null, Off, Only
from skipjoin.server.api.protocol import ChatRequest, GenerationBody


class ConvertedBody(GenerationBody):
    """Body that is converted to a chat request while it is validated, which large bodies are in a thread."""

    n: Annotated[Any, Only(None, 1)] = None
    prompt_logprobs: Null = None
    return_token_ids: Off = None

    @abstractmethod
    def to_chat(self) -> ChatRequest:
        """Return the chat request. Its parts were validated as parts of this body."""

    def schema_places(self) -> list[str]:
        """Return the fields of the schemas of the functions of `chat`, in their order."""
        return []

    @cached_property
    def chat(self) -> ChatRequest:
        return self.to_chat()

    @model_validator(mode="after")
    def _is_converted(self) -> ConvertedBody:
        _ = self.chat
        return self

    def shared(self) -> dict[str, Any]:
        """Return the given fields that all generation endpoints share."""
        return {name: getattr(self, name) for name in self.model_fields_set & GenerationBody.model_fields.keys()}


def tool_of(name: str, description: str | None, parameters: dict[str, Any] | None, *, strict: bool | None) -> Tool:
    function = Function.model_construct(name=name, description=description, parameters=parameters, strict=strict)
    return Tool.model_construct(type="function", function=function)


def call_of(call_id: str, name: str, arguments: str | None) -> ToolCall:
    function = CalledFunction.model_construct(name=name, arguments=arguments)
    return ToolCall.model_construct(id=call_id, type="function", function=function)


def hosted_kind(tool: Any, prefixes: tuple[str, ...]) -> str | None:
    """Return the type of a tool that a provider's server runs, or None.

    Agents offer them to every server. Beside functions they are left out, because a model may always answer without
    them; alone they are refused, because the answer would not be what was asked for.
    """
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) and kind.startswith(prefixes) else None


class Turns:
    """Builder of messages from parts of turns. Parts of one turn of the assistant become one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: Message | None = None

    def add(self, role: str, content: Any, **more: Any) -> None:
        self._turn = None
        self.messages.append(Message.model_construct(role=role, content=content, **more))

    def think(self, text: str) -> None:
        """Add reasoning, which begins a turn unless the last one has only reasoning."""
        turn = self._turn
        if turn is None or turn.content is not None or turn.tool_calls:
            turn = self.begin()
        turn.reasoning_content = (turn.reasoning_content or "") + text

    def say(self, content: Any) -> None:
        """Add the words of a turn, which has them once."""
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
