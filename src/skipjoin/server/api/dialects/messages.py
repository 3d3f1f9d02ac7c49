from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from fastapi import Request, Response
from pydantic_core import from_json

from skipjoin.core.request import RequestOptions
from skipjoin.engine.text import Choice
from skipjoin.formats.calls import PartKind
from skipjoin.routes import MESSAGES, SERVER_SENT
from skipjoin.server.api.chat_prompt import estimate_chat
from skipjoin.server.api.dialects.endpoint import Change, ConvertedEndpoint, ConvertedFormat, Segment, prompt_tokens
from skipjoin.server.api.dialects.messages_body import MessagesRequest
from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.options import served_tier
from skipjoin.server.api.replies import open_body
from skipjoin.server.api.responses import Usage, encode
from skipjoin.server.api.service import Service
from skipjoin.server.api.tokens import counted

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_TIERS = {"default": "standard", "flex": "batch", "priority": "priority"}
# Field and type of a delta.
_DELTAS = {
    PartKind.TEXT: ("text", "text_delta"),
    PartKind.REASONING: ("thinking", "thinking_delta"),
    PartKind.CALL: ("partial_json", "input_json_delta"),
}


def error_status(error: ApiError) -> int:
    """Return 529 for a full queue, unless it is full for one client only."""
    return 529 if error.status == 429 and error.code == "queue_full" and not error.is_of_client else error.status


def error_body(error: ApiError) -> bytes:
    return encode(_error(error))


def _error(error: ApiError) -> dict[str, Any]:
    status = error_status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    found: dict[str, Any] = {"type": kind, "message": error.message.encode("utf-8", "replace").decode()}
    if error.param == "thread":  # tool runners of Anthropic's clients then send all messages
        found["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": found}


_NAMES = {
    r"messages\..*": "messages",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "stop": "stop_sequences",
}


class MessagesFormat(ConvertedFormat):
    prefix = "msg_"

    def __init__(self, service: Service, body: MessagesRequest, options: RequestOptions) -> None:
        super().__init__(service, body)
        self._max_tokens = body.max_tokens
        self._tier = _TIERS[served_tier(options)]

    def begin(self, usage: Usage) -> bytes:
        return _event("message_start", message=self._message([], usage)) + _event("ping")

    def item(self, choice: Choice, text: str, usage: Usage | None) -> bytes:
        self.started = choice
        return _events(self.segments.add(choice.take_parts(text)))

    def end(self, usage: Usage) -> bytes:
        last = _events(self.segments.finish())
        return last + _event("message_delta", delta=self._end(usage), usage=self._usage(usage)) + _event("message_stop")

    def error(self, error: ApiError) -> bytes:
        return SERVER_SENT.frame(error_body(error), "error")

    def complete(self, usage: Usage) -> dict[str, Any]:
        return self._message([_block(segment) for segment in self.segments.found], usage) | self._end(usage)

    def _end(self, usage: Usage) -> dict[str, Any]:
        choice = self.choice
        reason = "end_turn"
        if choice.finish_reason == "length":
            is_full = self._max_tokens is None or usage.completion_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif choice.has_calls:
            reason = "tool_use"
        elif choice.stop_string is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": choice.stop_string}

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(usage) | {"service_tier": self._tier},
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }


class MessagesEndpoint(ConvertedEndpoint[MessagesRequest]):
    """Generate the next message of a conversation in Anthropic's format."""

    route = MESSAGES
    body_type = MessagesRequest
    format_type = MessagesFormat
    names: ClassVar[Mapping[str, str]] = _NAMES
    ends_with_context = True  # clients have a fixed maximum, whatever the model


async def count_tokens(request: Request) -> Response:
    """Return the number of tokens of a prompt in Anthropic's format."""
    service, body = await open_body(request, MessagesRequest)
    tokens = estimate_chat(body.chat)

    async def count() -> bytes:
        return encode({"input_tokens": await prompt_tokens(service, body.chat, _NAMES)})

    return await counted(service, request, tokens, "messages", count)


def _event(kind: str, **fields: Any) -> bytes:
    return SERVER_SENT.frame(encode({"type": kind, **fields}), kind)


def _events(changes: Iterable[Change]) -> bytes:
    found = b""
    for change in changes:
        segment = change.segment
        if change.begins:
            found += _event("content_block_start", index=segment.index, content_block=_block(segment, is_new=True))
        elif change.ends:
            found += _event("content_block_stop", index=segment.index)
        else:
            name, kind = _DELTAS[segment.kind]
            found += _event("content_block_delta", index=segment.index, delta={"type": kind, name: change.text})
    return found


def _block(segment: Segment, *, is_new: bool = False) -> dict[str, Any]:
    if segment.kind is PartKind.CALL:
        given = {} if is_new or not segment.text.strip() else from_json(segment.text, allow_partial=True)
        return {"type": "tool_use", "id": segment.id, "name": segment.name, "input": given}
    if segment.kind is PartKind.REASONING:
        return {"type": "thinking", "thinking": segment.text, "signature": ""}
    return {"type": "text", "text": segment.text}
