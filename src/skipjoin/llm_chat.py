"""Conversations of `LLM` and `AsyncLLM`: checked messages and tools, constrained calls, and the model's messages."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from skipjoin.formats.calls import JoinedCall, Part, joined
from skipjoin.formats.constraint import Constraints
from skipjoin.formats.conversation import NO_ARGUMENTS, TOOL_NAME, no_tools
from skipjoin.formats.grammar import CallSchema
from skipjoin.formats.message import MessageReader, is_thinking
from skipjoin.formats.table import unknown_calls
from skipjoin.formats.template_input import MessageError
from skipjoin.model.chat_text import chat_text, format_of
from skipjoin.model.tokenizer import Tokenizer
from skipjoin.sampling import ParameterError, SamplingParams
from skipjoin.structured_output import GrammarError

Message = Mapping[str, Any]
ToolChoice = str | Mapping[str, Any] | None
_MODES = ("auto", "none", "required")


class ChatPrompt(NamedTuple):
    """Conversation as text and as token ids."""

    text: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Functions of a conversation, and which of them may or must be called.

    Attributes:
        functions: All functions, which the prompt shows.
        names: Those that may be called.
        must_call: There must be a call.
        is_parallel: There may be more than one.
    """

    functions: Sequence[Mapping[str, Any]] = ()
    names: frozenset[str] = field(default_factory=frozenset)
    must_call: bool = False
    is_parallel: bool = True

    @classmethod
    def of(cls, tools: Any, choice: ToolChoice = None, *, is_parallel: bool | None = None) -> ToolUse:
        """Check tools and a choice in OpenAI's form; raise `ParameterError`.

        Args:
            is_parallel: None allows several calls unless the choice is one function.
        """
        functions = [_function(number, tool) for number, tool in enumerate(tools or ())]
        names = [function["name"] for function in functions]
        if len(set(names)) < len(names):
            raise ParameterError("tools", "tools: each name must be unique")
        mode, chosen = _choice(choice, names)
        if mode == "none":
            return cls()
        if mode == "required" and not names:
            raise ParameterError("tool_choice", "tool_choice required needs tools")
        if is_parallel is None:
            is_parallel = not (isinstance(choice, Mapping) and choice.get("type") == "function")
        return cls(functions, frozenset(chosen), mode == "required", is_parallel)

    @property
    def offered(self) -> list[Mapping[str, Any]]:
        return [function for function in self.functions if function["name"] in self.names]

    @property
    def must_enforce(self) -> bool:
        """True if calls must follow a grammar even if none is required."""
        is_limited = not self.is_parallel or len(self.names) < len(self.functions)
        return self.must_call or is_limited or any(function.get("strict") for function in self.offered)

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        return {function["name"]: function.get("parameters") or NO_ARGUMENTS for function in self.offered}


class AnswerReader:
    """Builds one answer as a message in OpenAI's form, in parts or whole."""

    def __init__(self) -> None:
        self._parts: list[Part] = []

    def read(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return what more parts add to the message, as OpenAI's API streams it."""
        self._parts += parts
        content, reasoning, calls = joined(parts)
        found: dict[str, Any] = {"content": content} if content else {}
        if reasoning:
            found["reasoning_content"] = reasoning
        if calls:
            found["tool_calls"] = [{"index": number, **_shown_call(call)} for number, call in calls.items()]
        return found

    def finish(self, reason: str | None) -> tuple[dict[str, Any], str | None]:
        """Return the message, and the finish reason of an answer that ended for a reason."""
        content, reasoning, calls = joined(self._parts)
        found: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        if reasoning:
            found["reasoning_content"] = reasoning
        if calls:
            found["tool_calls"] = [_shown_call(call) for call in calls.values()]
        return found, "tool_calls" if calls and reason == "stop" else reason


def _shown_call(call: JoinedCall) -> dict[str, Any]:
    """Return a call, or the next part of it, which has no name."""
    if not call.name:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class Conversations:
    """Renders conversations with a model's chat template, and reads its messages."""

    def __init__(self, tokenizer: Tokenizer, tool_format: str = "auto") -> None:
        self._tokenizer = tokenizer
        self._format = format_of(tokenizer, tool_format)

    def prompt(self, messages: Sequence[Message], use: ToolUse) -> ChatPrompt:
        if use.functions:
            self._check_tools()
        try:
            text = chat_text(self._tokenizer, self._format, messages, use.functions)
        except MessageError as error:
            raise ParameterError(error.param, str(error)) from None
        return ChatPrompt(text, self._tokenizer.encode(text, add_special_tokens=False))

    def constrained(self, params: SamplingParams, prompt: str, use: ToolUse) -> SamplingParams:
        """Return the parameters with their constraint adapted to tools and reasoning."""
        structured, offered = params.structured_outputs, use.offered
        if self._format is None:
            return params
        must_enforce = offered and (use.must_enforce or self._format.is_prompted)
        if not (structured or must_enforce):
            return params
        constraints = Constraints(self._format, self._tokenizer, prompt)
        try:
            if not offered:
                assert structured is not None
                return replace(params, structured_outputs=constraints.after_reasoning(structured))
            schemas = use.schemas
            functions = [CallSchema(one["name"], schemas[one["name"]], bool(one.get("strict"))) for one in offered]
            found = constraints.calls(
                functions, is_parallel=use.is_parallel, must_call=use.must_call, answer=structured
            )
        except GrammarError as error:
            name = "tools" if structured is None else "structured_outputs"
            raise ParameterError(name, f"{name} {error}") from None
        return replace(params, structured_outputs=found)

    def kept(self, use: ToolUse) -> frozenset[int]:
        """Return the special tokens that belong to the text of an answer."""
        return self._tokenizer.ids_of(self._format.markers) if self._format and self._is_read(use) else frozenset()

    def reader(self, prompt: str, use: ToolUse) -> MessageReader | None:
        """Return a reader of one answer, or None if all of it is content."""
        if self._format is None or not self._is_read(use):
            return None
        return MessageReader(
            self._format,
            reads_calls=bool(use.offered),
            is_thinking=is_thinking(self._format, prompt),
            schemas=use.schemas,
        )

    def _is_read(self, use: ToolUse) -> bool:
        return self._format is not None and bool(use.offered or self._format.think is not None)

    def _check_tools(self) -> None:
        template = self._tokenizer.chat_template
        if self._format is not None and self._format.is_prompted:
            return
        if template is not None and "tools" not in template.variables:
            raise ParameterError("tools", no_tools("tools"))
        if template is not None and (self._format is None or self._format.calls is None):
            raise ParameterError("tools", f"tools: {unknown_calls()}")


def conversations_of(given: Any) -> list[list[Message]]:
    """Return one or many conversations as a list."""
    is_single = isinstance(given, Sequence) and bool(given) and isinstance(given[0], Mapping)
    conversations = [given] if is_single else given
    if not isinstance(conversations, list | tuple):
        raise _no_conversation(given)
    for conversation in conversations:
        if not isinstance(conversation, list | tuple) or not conversation:
            raise _no_conversation(conversation)
        for number, message in enumerate(conversation):
            _check_message(f"messages.{number}", message)
    return [list(conversation) for conversation in conversations]


def _check_message(path: str, message: Any) -> None:
    """Raise `ParameterError` unless a message has text, or calls of functions."""
    if not (isinstance(message, Mapping) and "role" in message and (message.get("tool_calls") or "content" in message)):
        raise _no_conversation(message)
    content, calls = message.get("content"), message.get("tool_calls") or ()
    parts = content if isinstance(content, list | tuple) else ()
    is_text = content is None or isinstance(content, str | list | tuple)
    if not (is_text and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts)):
        raise ParameterError(
            f"{path}.content", f"{path}.content must be a text or a list of text parts, got {shown(content)}"
        )
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
            name = f"{path}.tool_calls.{number}"
            raise ParameterError(name, f"{name} must have a function with a name and arguments, got {shown(call)}")
        arguments = function.get("arguments")
        if not (arguments is None or isinstance(arguments, str | Mapping)):
            name = f"{path}.tool_calls.{number}.function.arguments"
            raise ParameterError(name, f"{name} must be JSON as text or an object, got {shown(arguments)}")


def _no_conversation(got: Any) -> ParameterError:
    return ParameterError(
        "messages",
        "messages must be a list of messages such as {'role': 'user', 'content': 'Hello'}, or a list of such lists, "
        f"got {shown(got)}",
    )


def shown(given: Any) -> str:
    return f"{type(given).__name__} {reprlib.repr(given)}"


def _function(number: int, tool: Any) -> Mapping[str, Any]:
    is_function = isinstance(tool, Mapping) and tool.get("type", "function") == "function"
    found: Any = tool.get("function") if is_function else None
    function: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    if re.fullmatch(TOOL_NAME, str(function.get("name", ""))) is None:
        raise ParameterError(
            f"tools.{number}",
            f"tools.{number} must be a function such as {{'type': 'function', 'function': {{'name': 'count', "
            f"'parameters': {{...}}}}}} with a name of 1 to 128 letters, digits, _, - and ., got {shown(tool)}",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        name = f"tools.{number}.function.parameters"
        raise ParameterError(name, f"{name} must be a JSON schema, got {shown(parameters)}")
    return function


def _choice(choice: ToolChoice, names: Sequence[str]) -> tuple[str, Iterable[str]]:
    """Return the mode of a choice, and the functions that may be called."""
    if choice is None or (isinstance(choice, str) and choice in _MODES):
        return choice or "auto", names
    mode: Any = "required"
    chosen: Any = [choice]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        mode, chosen = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, Mapping) else ("", [])
    try:
        found = [str(one["function"]["name"]) for one in chosen]
    except (TypeError, KeyError):
        found = []
    if not found or mode not in ("auto", "required") or not set(found) <= set(names):
        raise ParameterError(
            "tool_choice",
            f"tool_choice must be one of {', '.join(_MODES)}, or name functions of tools, such as {{'type': "
            f"'function', 'function': {{'name': 'count'}}}}, got {shown(choice)}",
        )
    return mode, found
