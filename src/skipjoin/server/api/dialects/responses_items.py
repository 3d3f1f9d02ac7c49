from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from skipjoin.server.api.conversation import MAX_MESSAGES
from skipjoin.server.api.dialects.bodies import only_types
from skipjoin.server.api.fields import MAX_LABEL, Body, Ignored, Off, one_of, text_or_list

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


class _Call(Body):
    call_id: Id
    name: Id
    id: Ignored = None
    status: Status = None
    namespace: Id | None = None
    caller: Ignored = None


class FunctionCall(_Call):
    type: Literal["function_call"]
    arguments: str
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


class CustomCall(_Call):
    type: Literal["custom_tool_call"]
    input: str


class CustomOutput(FunctionCallOutput):
    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]


class ReasoningItem(Body):
    """Reasoning of an earlier answer. Encrypted reasoning of other servers is left out."""

    type: Literal["reasoning"]
    id: Ignored = None
    summary: Parts | None = None
    content: Parts | None = None
    encrypted_content: Ignored = None
    status: Status = None


class ItemReference(Body):
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


_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def new_id(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def whole_item(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    name = item.get("id") or new_id(kind)
    found = {**item, "type": kind, "id": name}
    if kind != "reasoning":
        found.setdefault("status", "completed")
    if kind == "message" and isinstance(text := item["content"], str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        found["content"] = [{"type": part, "text": text}]
    return found
