"""Messages of responses, from the text of a choice: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from skipjoin.formats.calls import JoinedCall, Part, joined
from skipjoin.formats.message import MessageReader, is_thinking
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
        schemas: Schemas of the functions' arguments.
    """

    format: OutputFormat
    reads_calls: bool
    schemas: Mapping[str, Mapping[str, Any]]

    def reader(self, prompt: list[int], tokenizer: Tokenizer) -> MessageReader:
        tail = tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False)
        return MessageReader(
            self.format,
            reads_calls=self.reads_calls,
            is_thinking=is_thinking(self.format, tail),
            schemas=self.schemas,
        )


def delta_of(parts: Sequence[Part], shows_reasoning: bool) -> Delta | None:
    """Return the parts as one delta, or None if there is nothing to show.

    It has one entry for each call, because clients do not add up several.
    """
    content, reasoning, calls = joined(parts)
    reasoning = reasoning if shows_reasoning else ""
    if not (content or reasoning or calls):
        return None
    return Delta(
        content=content or UNSET,
        reasoning_content=reasoning or UNSET,
        reasoning=reasoning or UNSET,
        tool_calls=[_call(number, call) for number, call in calls.items()] if calls else UNSET,
    )


def message_of(parts: Sequence[Part], shows_reasoning: bool) -> ChatMessage:
    """Return the parts as a whole message. Its content is null if it has only calls."""
    content, reasoning, calls = joined(parts)
    reasoning = reasoning if shows_reasoning else ""
    whole = [_call(number, call) for number, call in calls.items()]
    for call in whole:
        call.index = UNSET
    return ChatMessage(
        content=content or (None if calls else ""),
        reasoning_content=reasoning or UNSET,
        reasoning=reasoning or UNSET,
        tool_calls=whole or UNSET,
    )


def _call(number: int, call: JoinedCall) -> ToolCall:
    """Return a call, or the next part of it."""
    if not call.name:
        return ToolCall(CalledFunction(call.arguments), number)
    return ToolCall(CalledFunction(call.arguments, call.name), number, call.id, "function")
