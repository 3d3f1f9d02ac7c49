from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from skipjoin.routes import CHAT, COMPLETIONS, MESSAGES, OPENAI_EVENTS, RESPONSES, Frames, Route

# Maximum length of an error's text in reports, because some servers return HTML pages.
_LONGEST_DETAIL = 200


class Failure(NamedTuple):
    kind: str
    detail: str


def failure(kind: str, detail: object) -> Failure:
    text = " ".join(str(detail).split())
    return Failure(kind, text if len(text) <= _LONGEST_DETAIL else text[:_LONGEST_DETAIL] + "...")


class Piece(NamedTuple):
    """What an event of a stream adds to the answer."""

    text: str | None = None  # of a token, perhaps empty; None for an event without a token
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: Any = None
    is_end: bool = False  # the event ends a complete stream


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def content(self) -> str:
        return self.text or (self.delta.content if self.delta is not None else None) or ""

    def shows_token(self) -> bool:
        """Chats begin with a role only, and some tokens have no text."""
        delta = self.delta
        spoken = delta is not None and (delta.content or delta.reasoning_content)
        return self.text is not None or bool(spoken) or self.finish_reason is not None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int
    completion_tokens: int


class _OpenAiEvent(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None

    def piece(self) -> Piece:
        usage, choice = self.usage, self.choices[0] if self.choices else None
        has_token = choice is not None and choice.shows_token()
        return Piece(
            choice.content() if choice is not None and has_token else None,
            choice.finish_reason if choice is not None and has_token else None,
            None if usage is None else usage.prompt_tokens,
            None if usage is None else usage.completion_tokens,
            self.error,
        )


class _Counts(msgspec.Struct, gc=False):
    input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def prompt_tokens(self) -> int | None:
        """Only Anthropic's format counts cached tokens apart."""
        cached = (self.cache_creation_input_tokens or 0) + (self.cache_read_input_tokens or 0)
        return None if self.input_tokens is None else self.input_tokens + cached


class _Response(msgspec.Struct, gc=False):
    status: str | None = None
    usage: _Counts | None = None
    error: Any = None


class _ResponsesEvent(msgspec.Struct, gc=False):
    type: str
    delta: str | None = None
    response: _Response | None = None
    message: str | None = None

    def piece(self) -> Piece:
        if self.type == "error":
            return Piece(error={"message": self.message})
        if self.type in ("response.output_text.delta", "response.reasoning_text.delta"):
            return Piece(self.delta or "")
        if (response := self.response) is None or response.status in (None, "in_progress", "queued"):
            return Piece()
        usage = response.usage or _Counts()
        reason = "stop" if response.status == "completed" else "length"
        return Piece(None, reason, usage.prompt_tokens, usage.output_tokens, response.error, is_end=True)


class _BlockDelta(msgspec.Struct, gc=False):
    text: str | None = None
    thinking: str | None = None
    stop_reason: str | None = None


class _Message(msgspec.Struct, gc=False):
    usage: _Counts | None = None


class _MessagesEvent(msgspec.Struct, gc=False):
    type: str
    message: _Message | None = None
    delta: _BlockDelta | None = None
    usage: _Counts | None = None
    error: Any = None

    def piece(self) -> Piece:
        delta = self.delta or _BlockDelta()
        usage = self.usage or (self.message and self.message.usage) or _Counts()
        reason = delta.stop_reason and ("length" if delta.stop_reason == "max_tokens" else "stop")
        is_end = self.type == "message_stop"
        # The first event counts the prompt, and output before there is any.
        output_tokens = usage.output_tokens if self.type == "message_delta" else None
        text = delta.text if delta.thinking is None else delta.thinking
        return Piece(text, reason, usage.prompt_tokens, output_tokens, self.error, is_end)


class _Kind(Protocol):
    def piece(self) -> Piece: ...


def _decoder(kind: type[_Kind]) -> Callable[[bytes], _Kind]:
    return msgspec.json.Decoder(kind).decode


_DECODERS = {
    CHAT: (openai := _decoder(_OpenAiEvent)),
    COMPLETIONS: openai,
    RESPONSES: _decoder(_ResponsesEvent),
    MESSAGES: _decoder(_MessagesEvent),
}


@dataclass(slots=True)
class Answer:
    route: Route = COMPLETIONS
    first_token: float | None = None
    last_token: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    ended: float | None = None
    error: Failure | None = None
    _tail: bytes = b""
    _parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def feed(self, data: bytes, now: float) -> None:
        *lines, self._tail = (self._tail + data).split(b"\n")
        prefix = self._frames.prefix.rstrip()
        for line in lines:
            if line.startswith(prefix) and (data := line[len(prefix) :].strip()):
                self._take(data, now)

    @property
    def _frames(self) -> Frames:
        return self.route.frames or OPENAI_EVENTS

    def close(self, now: float) -> None:
        self.feed(b"\n", now)

    def problem(self, wanted: int, *, may_stop: bool) -> Failure | None:
        if self.error is not None:
            return self.error
        if self.ended is None:
            end = self._frames.end.decode() or "its last event"
            return Failure("truncated", f"the stream ended without {end}")
        if self.output_tokens is None:
            return Failure("no_usage", "the stream reported no usage, which stream_options.include_usage requests")
        if self.output_tokens < wanted and not (may_stop and self.finish_reason == "stop"):
            return Failure("truncated", f"{self.output_tokens} tokens of {wanted}, finish reason {self.finish_reason}")
        if self.first_token is None:
            return Failure("malformed", "no event of the stream held a token")
        return None

    def _take(self, payload: bytes, now: float) -> None:
        end = self._frames.end
        if end and payload == end:
            self.ended = now
            return
        try:
            piece = _DECODERS[self.route](payload).piece()
        except ValueError as error:  # not JSON, or not UTF-8
            self.error = self.error or failure("malformed", f"{error}: {payload.decode('utf-8', 'replace')}")
            return
        if piece.error is not None:
            message = piece.error.get("message") if isinstance(piece.error, dict) else None
            self.error = self.error or failure("error_event", message or piece.error)
        if piece.prompt_tokens is not None:
            self.prompt_tokens = piece.prompt_tokens
        if piece.output_tokens is not None:
            self.output_tokens = piece.output_tokens
        if piece.text is not None:
            self.last_token = now
            self._parts.append(piece.text)
            if self.first_token is None:
                self.first_token = now
        self.finish_reason = piece.finish_reason or self.finish_reason
        if piece.is_end:
            self.ended = now
