from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skipjoin.formats.calls import JoinedCall, Part, joined
from skipjoin.formats.constraint import Constraints
from skipjoin.formats.conversation import NO_ARGUMENTS, no_tools
from skipjoin.formats.grammar import CallSchema
from skipjoin.formats.message import MessageReader, is_thinking
from skipjoin.formats.table import unknown_calls
from skipjoin.formats.template_input import MessageError
from skipjoin.model.chat_text import chat_text, format_of
from skipjoin.model.tokenizer import Tokenizer
from skipjoin.sampling import ParameterError, ThinkingBudget
from skipjoin.structured_output import GrammarError, StructuredOutput

Message = Mapping[str, Any]
# Tokens of the end of a prompt that may begin the reasoning.
_TAIL = 16


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Functions of a conversation in OpenAI's form, and which of them, by `names`, may or must be called."""

    functions: Sequence[Mapping[str, Any]] = ()
    names: frozenset[str] = field(default_factory=frozenset)
    must_call: bool = False
    is_parallel: bool = True

    @property
    def offered(self) -> list[Mapping[str, Any]]:
        return [function for function in self.functions if function["name"] in self.names]

    @property
    def must_enforce(self) -> bool:
        """True if calls follow a grammar."""
        is_limited = not self.is_parallel or len(self.names) < len(self.functions)
        return self.must_call or is_limited or any(function.get("strict") for function in self.offered)

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        return {function["name"]: function.get("parameters") or NO_ARGUMENTS for function in self.offered}


class Conversations:
    """Renders conversations with a model's chat template, and reads its messages. Raises `ParameterError`.

    Attributes:
        format: Format of reasoning and tool calls, or None if it is unknown.
    """

    def __init__(self, tokenizer: Tokenizer, tool_format: str = "auto") -> None:
        self._tokenizer = tokenizer
        self.format = format_of(tokenizer, tool_format)

    def text(self, messages: Sequence[Message], use: ToolUse, **variables: Any) -> str:
        template = self._tokenizer.chat_template
        is_prompted = self.format is not None and self.format.is_prompted
        if template is not None and not is_prompted and "tools" not in template.variables:
            if any(message.get("tool_calls") or message.get("role") == "tool" for message in messages):
                raise ParameterError("messages", no_tools("messages"))
            if use.functions:
                raise ParameterError("tools", no_tools("tools"))
        try:
            return chat_text(self._tokenizer, self.format, messages, use.functions, **variables)
        except MessageError as error:
            raise ParameterError(error.param, str(error)) from None

    def check_calls(self, use: ToolUse) -> None:
        """Raise `ParameterError` if calls of the offered tools could not be read."""
        if use.offered and (self.format is None or self.format.calls is None):
            raise ParameterError("tools", f"tools: {unknown_calls()}")

    def constraint(
        self, structured: StructuredOutput | None, prompt: str, use: ToolUse, name: str = "structured_outputs"
    ) -> StructuredOutput | None:
        """Adapt a constraint to tools and reasoning. Errors name the field `name`, or else the tools."""
        offered = use.offered
        must_enforce = offered and (use.must_enforce or (self.format is not None and self.format.is_prompted))
        if self.format is None or not (structured or must_enforce):
            return structured
        constraints = Constraints(self.format, self._tokenizer, prompt)
        try:
            if not offered:
                assert structured is not None
                return constraints.after_reasoning(structured)
            schemas = use.schemas
            functions = [CallSchema(tool["name"], schemas[tool["name"]], bool(tool.get("strict"))) for tool in offered]
            return constraints.calls(functions, is_parallel=use.is_parallel, must_call=use.must_call, answer=structured)
        except GrammarError as error:
            if structured is None:
                raise ParameterError("tools", f"tools: the grammar of their calls {error}") from None
            raise ParameterError(name, f"{name} {error}") from None

    def thinking_budget(self, tokens: int, prompt: str) -> ThinkingBudget | None:
        """Return a bound of the reasoning, or None if the model has none."""
        think = None if self.format is None else self.format.think
        if think is None or self.format is None:
            return None
        opening, closing = (
            tuple(self._tokenizer.encode(mark.strip(), add_special_tokens=False)) for mark in (think.open, think.close)
        )
        if len(closing) != 1:
            raise ParameterError(
                "thinking_token_budget",
                "thinking_token_budget must be null: the mark that ends this model's reasoning is not one token",
            )
        is_open = is_thinking(self.format, prompt)
        return ThinkingBudget(tokens=tokens, opening=opening, closing=closing[0], is_open=is_open)

    def kept(self, use: ToolUse) -> frozenset[int]:
        return self._tokenizer.ids_of(self.format.markers) if self.format and self.is_read(use) else frozenset()

    def reader(self, prompt: Sequence[int], use: ToolUse) -> MessageReader | None:
        if self.format is None or not self.is_read(use):
            return None
        tail = self._tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False)
        return MessageReader(
            self.format, reads_calls=bool(use.offered), is_thinking=is_thinking(self.format, tail), schemas=use.schemas
        )

    def is_read(self, use: ToolUse) -> bool:
        return self.format is not None and bool(use.offered or self.format.think is not None)


def delta_of(parts: Sequence[Part], *, shows_reasoning: bool = True) -> dict[str, Any]:
    """Return what parts add to a message, with one entry for each call, because clients do not add up several."""
    content, reasoning, calls = joined(parts)
    found: dict[str, Any] = {"content": content} if content else {}
    if reasoning and shows_reasoning:
        found["reasoning_content"] = reasoning
    if calls:
        found["tool_calls"] = [{"index": number, **_shown_call(call)} for number, call in calls.items()]
    return found


def message_of(parts: Sequence[Part], *, shows_reasoning: bool = True) -> dict[str, Any]:
    content, reasoning, calls = joined(parts)
    found: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning and shows_reasoning:
        found["reasoning_content"] = reasoning
    if calls:
        found["tool_calls"] = [_shown_call(call) for call in calls.values()]
    return found


def finish_reason_of(reason: str | None, *, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and reason == "stop" else reason


def _shown_call(call: JoinedCall) -> dict[str, Any]:
    if not call.name:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
