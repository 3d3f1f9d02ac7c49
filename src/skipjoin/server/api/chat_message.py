"""Messages of responses, from the text of a choice: content, reasoning and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from skipjoin.engine.text import Choice
from skipjoin.formats.calls import Part
from skipjoin.formats.message import MessageReader
from skipjoin.formats.table import OutputFormat
from skipjoin.model.tokenizer import Tokenizer
from skipjoin.server.api.responses import CalledFunction, ChatMessage, Delta, ToolCall

# Tokens of the end of a prompt that may begin the reasoning.
_TAIL = 16


@dataclass(frozen=True, slots=True)
class Reading:
    """How the outputs of a request are read.

    Attributes:
        reads_calls: The request has tools.
        shows_reasoning: The response contains the reasoning.
    """

    format: OutputFormat
    reads_calls: bool
    shows_reasoning: bool

    def reader(self, choice: Choice, tokenizer: Tokenizer) -> MessageReader:
        tail = tokenizer.decode(choice.prompt[-_TAIL:], skip_special_tokens=False)
        return MessageReader(
            self.format,
            reads_calls=self.reads_calls,
            is_thinking=is_thinking(self.format, tail),
            new_id=_new_id(None if self.format.calls is None else self.format.calls.id_length),
        )


def is_thinking(output_format: OutputFormat, prompt: str) -> bool:
    """Return whether a prompt ends with the start of the reasoning."""
    think = output_format.think
    return think is not None and prompt.rstrip().endswith(think.open.rstrip())


def _new_id(length: int | None) -> Callable[[], str]:
    if length is None:
        return lambda: f"call_{secrets.token_hex(12)}"
    return lambda: secrets.token_hex(length)[:length]


def delta_of(parts: Sequence[Part], shows_reasoning: bool) -> Delta | None:
    """Return the parts as one delta, or None if there is nothing to show.

    It has one entry for each call, because clients do not add up several.
    """
    content, reasoning, calls = _joined(parts, shows_reasoning)
    if not (content or reasoning or calls):
        return None
    return Delta(
        content=content or UNSET,
        reasoning_content=reasoning or UNSET,
        reasoning=reasoning or UNSET,
        tool_calls=[*calls.values()] if calls else UNSET,
    )


def message_of(parts: Sequence[Part], shows_reasoning: bool) -> ChatMessage:
    """Return the parts as a whole message. Its content is null if it has only calls."""
    content, reasoning, calls = _joined(parts, shows_reasoning)
    for call in calls.values():
        call.index = UNSET
    return ChatMessage(
        content=content or (None if calls else ""),
        reasoning_content=reasoning or UNSET,
        reasoning=reasoning or UNSET,
        tool_calls=[*calls.values()] if calls else UNSET,
    )


def _joined(parts: Sequence[Part], shows_reasoning: bool) -> tuple[str, str, dict[int, ToolCall]]:
    content: list[str] = []
    reasoning: list[str] = []
    arguments: dict[int, list[str]] = {}
    calls: dict[int, ToolCall] = {}
    for part in parts:
        if part.call is not None:
            if part.call not in calls:
                calls[part.call] = ToolCall(CalledFunction(""), part.call)
            if part.name:
                call = calls[part.call]
                call.id, call.type, call.function.name = part.id, "function", part.name
            arguments.setdefault(part.call, []).append(part.text)
        elif not part.is_reasoning:
            content.append(part.text)
        elif shows_reasoning:
            reasoning.append(part.text)
    for number, texts in arguments.items():
        calls[number].function.arguments = "".join(texts)
    return "".join(content), "".join(reasoning), calls
